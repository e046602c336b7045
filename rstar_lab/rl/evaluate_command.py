"""`rstar-lab evaluate`: evaluate a model folder, the last model of a run, or a model on inference servers."""

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rich.table import Table

from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import format_interval
from rstar_lab.common.progress import Reporter, plain
from rstar_lab.hardware.processes import PeakMemory
from rstar_lab.rl.data.sources import load_problems, parse_fields, parse_source
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.rl.evaluation import per_problem, usable_rows
from rstar_lab.rl.identity import evaluation_identity, identity_digest, model_hash
from rstar_lab.rl.models.model_folder import model_folder
from rstar_lab.rl.pipeline import evaluate_model
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.problems import Problem, without_copies
from rstar_lab.rl.recipe import EnvironmentEntry, Recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.rollout.words import first_remedy, phase_text, rollout_line
from rstar_lab.rl.session import RunSession
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.text import counted

SHOWN = 40  # rows of the printed table, hardest problems first


async def evaluate_command(
    models: Sequence[str],
    source: str | Sequence[str],
    recipe: Recipe,
    reporter: Reporter,
    *,
    fields: str = "",
    limit: int | None = None,
    name: str | None = None,
    tokenizer: Path | None = None,
    environment: str = "",
) -> dict[str, Any]:
    """Evaluate a model, print the result, and return the last line of `evaluate --json`.

    models: one folder, one run, or any number of URLs of servers with the same model. source: see `data.sources`; several
    sets are one run, and the result has the key `sets` with the result of each by its name.
    environment: environment of all problems, see `with_environment`.
    """
    if environment:
        recipe, environment = with_environment(recipe, environment)
    urls = [model for model in models if model.startswith(("http://", "https://"))]
    if len(models) > 1 and len(urls) < len(models):
        raise UserError("evaluate: give one model, or any number of URLs of servers with the same model")
    if urls:
        folder, identity = await _tokenizer_of(urls, tokenizer)
        engine = recipe.engine.model_copy(update={"kind": "server", "urls": tuple(urls)})
        recipe = recipe.model_copy(update={"engine": engine})
    else:
        folder = model_folder(models[0], recipe.runs)
        identity = str(folder.resolve())
    sets = load_sets([source] if isinstance(source, str) else source, fields, limit, environment)
    title, problems = "-".join(sets), [problem for part in sets.values() for problem in part]
    # The run id contains the identity: the same command resumes its run, and any other setting gives a new run.
    weights = model_hash(folder, recipe.runs / ".cache")
    if urls:  # the folder may contain only the tokenizer; the name includes the version of pushed weights
        weights = f"{identity} {weights}"
    parts = evaluation_identity(recipe, problems, weights, recipe.evaluate.samples)
    settings = recipe.evaluate.model_copy(update={"sets": {}})
    changed = {"name": name or f"evaluate-{title}", "sft": None, "stages": (), "evaluate": settings}
    recipe = recipe.model_copy(update=changed)
    run_suffix = identity_digest(parts)
    ids = {name: [problem.problem_id for problem in part] for name, part in sets.items()} if len(sets) > 1 else {}
    with PeakMemory() as memory:
        async with RunSession.open(resolve(recipe), reporter) as session:
            run = session.runs_dir / session.run_id(run_suffix)
            is_finished = (run / "run.json").exists() and RunReader(run).status == "finished"
            result = await evaluate_model(
                session, folder, problems, run_suffix, as_served=bool(urls), model_identity=weights, sets=ids
            )
    rows = RunReader(run).read("trajectories").to_pylist()
    table = per_problem(usable_rows(rows))
    seconds = sum(line["generate_s"] for line in RunReader(run).metrics())
    result |= {"generated_tokens_per_s": sum(row["model_tokens"] for row in rows) / seconds, "generate_s": seconds}
    if not (urls or is_finished):
        result["generate_gb"] = memory.gb
    for row in table:
        reporter.emit("problem", **row)
    if not reporter.as_json:
        print_result(result, table, run, reporter, tools=bool(recipe.rl.tools))
    return result | {"run": str(run), "model": identity}


def with_environment(recipe: Recipe, environment: str) -> tuple[Recipe, str]:
    """Return the recipe with an entry for an environment, and the name of the entry.

    environment: name of an entry of `rl.environments`, or `module:name`, for which an entry is added. Raises UserError for an
    unknown name.
    """
    names = [entry.name for entry in recipe.rl.environments]
    if environment in names:
        return recipe, environment
    if not NAME.fullmatch(environment):
        raise UserError(
            f"--environment {environment}: give module:name or an entry of rl.environments ({', '.join(names) or 'none'})"
        )
    entry = EnvironmentEntry(name=environment.partition(":")[2], environment=environment)
    if entry.name in names:
        raise UserError(f"--environment {environment}: rl.environments has another entry {entry.name}")
    rl = recipe.rl.model_copy(update={"environments": (*recipe.rl.environments, entry)})
    return recipe.model_copy(update={"rl": rl}), entry.name


def load_sets(
    sources: Sequence[str], fields: str, limit: int | None, environment: str = ""
) -> dict[str, list[Problem]]:
    """Return the problems of each set by its name; see `load`. An id that an earlier set has gets the name of its set in front.

    Raises UserError if two sets have the same name.
    """
    sets: dict[str, list[Problem]] = {}
    seen: set[str] = set()
    for source in sources:
        name, problems = load(source, fields, limit, environment)
        if name in sets:
            raise UserError(f"--problems {source}: another set is called {name} too; rename its file")
        sets[name] = [
            problem.model_copy(update={"problem_id": f"{name}/{problem.problem_id}"})
            if problem.problem_id in seen
            else problem
            for problem in problems
        ]
        seen |= {problem.problem_id for problem in sets[name]}
    return sets


def load(source: str, fields: str, limit: int | None, environment: str = "") -> tuple[str, list[Problem]]:
    """Return the name of a problem set and the problems that `load_problems` reads.

    environment: name of an environment that is used for all problems, which then need no answers; "": each row names its own.
    """
    columns = parse_fields(fields)
    problems = load_problems(source, fields=columns, answers=not environment, limit=limit)
    if environment:
        problems = [problem.model_copy(update={"environment": environment}) for problem in problems]
    return parse_source(source, columns).source.name, without_copies(problems)


async def _tokenizer_of(urls: Sequence[str], tokenizer: Path | None) -> tuple[Path, str]:
    """Return the folder of the tokenizer and the identity of the model on the servers. Raises UserError if the models differ."""
    identities, folders = [], []
    for url in urls:
        async with aclosing(ServerEngine(url)) as server:
            await server.start()
            identity = str(server.folder.resolve()) if server.folder else server.model
            version = await server.weight_version()
            identities.append(f"{identity} (weights {version})" if version is not None else identity)
            folders.append(server.folder)
    if len(set(identities)) > 1:
        raise UserError(f"evaluate: the servers have different models: {', '.join(dict.fromkeys(identities))}")
    folder = tokenizer or folders[0]
    if folder is None:
        raise UserError(
            f"evaluate: the folder of {identities[0]} at {urls[0]} is not on this machine: give its tokenizer with --tokenizer FOLDER"
        )
    return folder, identities[0]


def print_result(
    result: dict[str, Any], table: Sequence[dict[str, Any]], run: Path, reporter: Reporter, *, tools: bool
) -> None:
    """Print the table of problems and the result with its intervals. tools: whether the rollouts had tools."""
    k = result["samples"]
    printed = Table(
        "problem", f"correct of {k}", "majority", "truth", "tokens", "calls", "errors", title_justify="left"
    )
    for row in sorted(table, key=lambda row: row["correct"])[:SHOWN]:
        majority = plain(str(row["majority"])[:24], "green" if row["majority_correct"] else "red")
        printed.add_row(
            plain(row["problem_id"]), str(row["correct"]), majority, plain(str(row["truth"])[:24]),
            f"{row['response_tokens']:.0f}", f"{row['calls'] / row['samples']:.1f}", str(row["errors"]),
        )  # fmt: skip
    reporter.console.print(printed)
    if len(table) > SHOWN:
        reporter.print_line(f"... and {counted(len(table) - SHOWN, 'problem')} with more correct samples")
    intervals = result["intervals"]
    errors = "-" if result["error_rate"] is None else format_interval(intervals["error_rate"])
    lines = {
        f"avg@{k} (pass@1)": format_interval(result["pass1"]),
        f"pass@{k}": format_interval(result[f"pass{k}"]),
        f"maj@{k}": format_interval(result[f"maj{k}"]),
        "response tokens": format_interval(intervals["response_tokens"], ".0f"),
        "calls per rollout": format_interval(intervals["calls"], ".2f"),
        "tool errors": f"{errors} of the calls",
        "truncated": format_interval(intervals["truncated"]),
    }
    if result.get("text_answers"):
        lines["compared as text"] = f"{result['text_answers']:.1%} of the answers"
    for name, own in result.get("sets", {}).items():
        lines[name] = f"{format_interval(own['pass1'])} avg@{own['samples']}, {counted(own['problems'], 'problem')}"
    for title, text in lines.items():
        reporter.print_line(f"{title:18}{text}")
    for key, noun, why in (
        ("overlong_prompts", "problem", "with a prompt that does not fit into the model's context"),
        ("environment_failures", "rollout", "whose environment failed; the log names the cause"),
    ):
        if key in result:
            reporter.print_line(f"left out: {counted(result[key], noun)} {why}")
    shares = result | {"rollouts": result["n"], "correct": result["pass1"][0]}
    speed = ""
    if "generate_s" in result:
        speed = f"; {result['generated_tokens_per_s']:.0f} tokens/s; {phase_text('generate', result)}"
    reporter.print_line(f"{rollout_line(shares, tools=tools)}{speed}")
    if shares["correct"] in (0.0, 1.0):
        reporter.print_line(f"To train on such problems, first: {first_remedy(shares, tools=tools)}")
    reporter.print_line(f"{counted(result['problems'], 'problem')} x {counted(k, 'sample')}\nrun {run}")
