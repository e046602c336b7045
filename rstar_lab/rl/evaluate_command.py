"""`rstar-lab evaluate`: a model and a file of problems, each as the command line gives them."""

import hashlib
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.evaluate import Estimate
from rstar_lab.rl.model_folder import model_folder
from rstar_lab.rl.pipeline import Lab, evaluate_model
from rstar_lab.rl.problems import load_problems, parse_fields
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.report import Reporter


async def evaluate_command(
    model: str,
    problems_file: Path,
    recipe: Recipe,
    reporter: Reporter,
    *,
    fields: str,
    limit: int | None,
    name: str | None,
) -> dict[str, Any]:
    """Evaluate and tell; returns what `evaluate --json` ends with."""
    folder = model_folder(model, recipe.runs)
    problems = load_problems(problems_file, fields=parse_fields(fields))[:limit]
    if not problems:
        raise UserError(f"{problems_file}: it holds no problem")
    # The same model, problems and settings are the same run, which resumes; anything else is another.
    content = repr(
        (str(folder.resolve()), [p.model_dump() for p in problems], recipe.evaluate.model_dump(), recipe.seed)
    )
    piece = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
    recipe = recipe.model_copy(update={"name": name or f"evaluate-{problems_file.stem}"})
    async with Lab.open(recipe, reporter) as lab:
        result = await evaluate_model(lab, folder, problems, piece)
        run = lab.runs_dir / lab.run_id(piece)
    if not reporter.as_json:
        tell(result, run, reporter)
    return result | {"run": str(run), "model": str(folder)}


def tell(result: dict[str, Any], run: Path, reporter: Reporter) -> None:
    k = result["samples"]
    for key, title in (("pass1", f"avg@{k} (pass@1)"), (f"pass{k}", f"pass@{k}"), (f"maj{k}", f"maj@{k}")):
        reporter.say(f"{title:18}{Estimate(*result[key])}")
    errors = "-" if result["error_rate"] is None else f"{result['error_rate']:.1%}"
    reporter.say(
        f"{result['problems']} problems x {k} samples, mean response {result['response_tokens']:.0f} tokens, "
        f"{result['calls']:.2f} calls, {errors} of them failed, {result['truncated']:.1%} of the rollouts truncated\nrun {run}"
    )
