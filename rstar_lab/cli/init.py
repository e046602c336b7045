"""`rstar-lab init`."""

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rstar_lab.cli.shared import examples
from rstar_lab.common.errors import UserError, program
from rstar_lab.untrusted.text import counted, echo

if TYPE_CHECKING:
    from rstar_lab.hardware.profiles import Profile
    from rstar_lab.rl.problems import Problem

app = typer.Typer()
# Names of columns that data sets use for ours, most common first.
COLUMNS = {
    "question": ("question", "problem", "prompt", "problem_statement", "query", "instruction", "input"),
    "answer": ("answer", "final_answer", "expected_answer", "solution", "ground_truth", "target", "output", "label"),
}
CHATS = ("messages", "conversations")  # columns of whole conversations
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 100
STATE_BYTES = 18  # per parameter: weights, gradient and two moments in float32, and the engine's copy in bfloat16
TEMPLATE = Path(__file__).parent / "templates" / "recipe.yaml.jinja"
FEW_HELD_OUT = 20  # fewer give an interval that hides most differences
MOST_SHOWN = 5  # rows that a message lists


@app.command(
    epilog=examples(
        "rstar-lab init --model smollm2-135m --problems gsm8k.csv",
        "rstar-lab init --model Qwen/Qwen3-0.6B --problems problems.jsonl --profile one_gpu --out mine.yaml",
    )
)
def init(
    model: Annotated[
        str | None, typer.Option(help="A folder, a name on the Hugging Face Hub, or smollm2-135m.")
    ] = None,
    problems: Annotated[
        str | None,
        typer.Option(help="A CSV, JSONL, JSON or Parquet file with questions and answers, or the name of a data set."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", "--machine", help="Hardware profile. Default: laptop, or one_gpu if there is a GPU."),
    ] = None,
    fields: Annotated[
        str, typer.Option(help="Columns of the file, as question=Q,answer=A. Default: by their names.")
    ] = "",
    sft: Annotated[
        bool | None,
        typer.Option(
            "--sft/--no-sft", help="Teach tool calls by SFT first. Default: if the chat template knows no tools."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The recipe to write. Its problems are written beside it.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe that trains your model on your problems. Asks for what is not given, in a terminal.

    The problems are split into training and held-out ones. `rstar-lab run` starts the recipe.
    """
    from rstar_lab.hardware.profiles import load_profile
    from rstar_lab.rl.overrides import load_recipe
    from rstar_lab.rl.problems import write_problems
    from rstar_lab.runs.files import atomic_write

    missing = [flag for flag, value in (("--model", model), ("--problems", problems)) if not value]
    if missing and not _in_terminal():
        raise UserError(f"init: give {' and '.join(missing)}, as in --model smollm2-135m --problems gsm8k.csv")
    model = model or typer.prompt("Model (folder, ORG/NAME on the Hub, or smollm2-135m)")
    problems = problems or typer.prompt("Problems (CSV, JSONL, JSON or Parquet file, or name of a data set)")
    detected = "one_gpu" if Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists() else "laptop"
    if profile is None:
        profile = typer.prompt("Machine", default=detected) if _in_terminal() else detected
    machine = load_profile(profile)
    if out.suffix != ".yaml" or out.exists():
        raise UserError(
            f"--out {out}: {'exists already' if out.exists() else 'a recipe ends in .yaml'}; choose another name"
        )
    _check_model_folder(Path(str(model)))
    train, held_out = _split(str(problems), fields)  # before the model, which may be downloaded
    knows_tools = _knows_tools(str(model))
    if sft is None:
        sft = not knows_tools
        if sft and _in_terminal():
            sft = typer.confirm(
                "The chat template of this model knows no tools. Teach tool calls by SFT first?", default=True
            )
    files = [out.with_name(f"{out.stem}-{part}.jsonl") for part in ("train", "held-out")]
    for file, part, use in zip(files, (train, held_out), ("training problem", "held-out problem"), strict=True):
        write_problems(file, part)
        echo(f"{file}: {counted(len(part), use)}")
    tests = all(problem.info.get("tests") for problem in (*train, *held_out))
    text = recipe_text(
        str(model), machine, sft=sft, train=files[0], held_out=files[1], knows_tools=knows_tools, tests=tests
    )
    with atomic_write(out) as recipe_file:
        recipe_file.write(text.encode())
    recipe = load_recipe(out)
    echo(
        f"{out}: {'SFT, then ' if sft else ''}{counted(recipe.stages[0].steps, 'step')} of GRPO-RoC on profile {machine.name}"
    )
    if not sft and not knows_tools:
        echo("The chat template knows no tools, so tools are described in the system prompt; --sft teaches them first")
    command = program()
    echo(f"next: {command} preflight {out} --profile {profile}\n      {command} run {out}\n      {command} view runs")


def _in_terminal() -> bool:
    return sys.stdin.isatty()


def _knows_tools(model: str) -> bool:
    """Return whether the chat template of a model renders tools. Raises UserError without tokenizer, or for `tiny`."""
    from rstar_lab.rl.models.model import load_tokenizer
    from rstar_lab.rl.models.sources import get_model
    from rstar_lab.rl.renderers.base import PromptStyle
    from rstar_lab.rl.renderers.model import ModelRenderer

    if model == "tiny":
        raise UserError("--model tiny: it has random weights; run `rstar-lab demo`, or copy the recipe `tiny`")
    tokenizer = load_tokenizer(get_model(model, weights=False))
    try:
        return ModelRenderer(PromptStyle("model"), tokenizer=tokenizer).uses_tools
    except UserError:  # no chat template, or one with an unknown syntax of calls
        return False


def _check_model_folder(folder: Path) -> None:
    """Raise UserError for a folder without a config.json, or with a file of weights that is shorter than its header says."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {folder}: the folder has no config.json; give the folder of a model of transformers")
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):  # reads the header
                pass
        except (SafetensorError, OSError):
            raise UserError(f"{path}: the file is cut off or no safetensors file; copy or download it again") from None


def _split(source: str, fields: str) -> tuple["list[Problem]", "list[Problem]"]:
    """Return the training problems and the held-out problems of a set, in random order. Prints what is left out or cannot be met.

    Raises UserError that names the rows of a question with two answers.
    """
    from rstar_lab.rl.data.filters import conflicts, duplicates, keep_texts
    from rstar_lab.rl.data.similarity import Corpus
    from rstar_lab.rl.data.sources import parse_fields, parse_source, read_source

    parsed = parse_source(source, parse_fields(fields))
    if parsed.path and not parsed.source.fields:
        parsed = parse_source(source, _guess_fields(parsed.path))
    bad: list[str] = []
    candidates = list(read_source(parsed, bad.append))
    if bad and not candidates:
        raise UserError(f"--problems {bad[0]}")
    if bad:
        echo(f"left out rows: {len(bad)}; the first: {bad[0]}")
    texts = Corpus().encode(candidate.problem.question for candidate in candidates)
    if clash := conflicts(candidates, texts):
        rows = [f"{candidates[place].where} ({candidates[place].problem.answer[:40]})" for place in sorted(clash)]
        raise UserError(f"--problems {source}: a question has several answers: {_listed(rows)}; correct or remove them")
    repeated = duplicates(candidates, texts)
    if repeated:
        rows = [candidates[place].where for place in sorted(repeated)]
        echo(f"left out repeated rows: {len(repeated)}: {_listed(rows)}")
    candidates, texts = [c for n, c in enumerate(candidates) if n not in repeated], keep_texts(texts, repeated)
    if len(candidates) < 2:
        found = counted(len(candidates), "different problem")
        raise UserError(f"--problems {source}: {found}; at least 2 are needed, one of them held out")
    if unmet := [f"{one.where} ({one.problem.answer[:40]!r})" for one in candidates if _is_text(one.problem.answer)]:
        echo(f"answers that only the same text meets: {len(unmet)}: {_listed(unmet)}")
    chosen = random.Random(0).sample([candidate.problem for candidate in candidates], len(candidates))
    held_out = max(1, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * len(chosen))))
    if held_out < FEW_HELD_OUT:
        half = f"about ±{98 / held_out**0.5:.0f} points" if held_out > 1 else "no interval"
        echo(f"warning: {counted(held_out, 'held-out problem')} of {len(chosen)}: pass@1 has {half}; use more problems")
    return chosen[held_out:], chosen[:held_out]


def _listed(rows: list[str]) -> str:
    more = f" and {len(rows) - MOST_SHOWN} more" if len(rows) > MOST_SHOWN else ""
    return ", ".join(rows[:MOST_SHOWN]) + more


def _is_text(answer: str) -> bool:
    """Return whether an answer is not read as mathematics, so that only the same text is correct."""
    from rstar_lab.verify import readable
    from rstar_lab.verify.gold import fault_of_answer

    return bool(answer) and (fault_of_answer(answer) is not None or not readable(answer))


def _guess_fields(path: Path) -> dict[str, str]:
    """Return our field name -> column of a file, by common names of columns. Raises UserError that lists the columns.

    Rows with tests of a known format need no names. Of a column of messages, the last question and answer are used.
    """
    from rstar_lab.rl.data.code_problems import converter_of
    from rstar_lab.rl.problems import read_rows

    _, row = next(read_rows(path), (0, {}))
    if not isinstance(row, dict) or converter_of(row):
        return {}
    columns = {str(column).strip().lower(): str(column) for column in row}
    fields: dict[str, str] = {}
    for ours, names in COLUMNS.items():
        theirs = next((columns[name] for name in (*names, *CHATS) if name in columns), None)
        if theirs is None and ours == "answer" and "info" in columns:
            continue  # tests, or the environment decides
        if theirs is None:
            raise UserError(
                f"{path}: no column with the {ours}; name it with --fields question=COLUMN,answer=COLUMN; columns: "
                f"{', '.join(columns.values()) or 'none'}"
            )
        fields[ours] = theirs
    return fields


def recipe_text(
    model: str, profile: "Profile", *, sft: bool, train: Path, held_out: Path, knows_tools: bool, tests: bool
) -> str:
    """Return a commented recipe of at most 25 lines. The same arguments always give the same text.

    Args:
        model: model of the recipe.
        profile: machine that trains.
        sft: whether SFT teaches tool calls and the answer format of the paper before RL.
        train: file of training problems.
        held_out: file of held-out problems.
        knows_tools: whether the chat template renders tools.
        tests: whether the problems have hidden tests.
    """
    import jinja2
    import yaml

    from rstar_lab.rl.preflight.context import architecture_of
    from rstar_lab.untrusted.files import read_text

    hardware = profile.hardware
    size = "cpu" if not hardware.gpus else "one_gpu" if profile.trainer == "local" else "cluster"
    memory_gb = hardware.hbm_gb or hardware.memory_gb_per_node
    shape = architecture_of(model)

    def quoted(value: Any) -> str:
        return yaml.safe_dump(str(value), default_style=None, width=2**20).removesuffix("...\n").strip()

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    template = jinja2.Template(read_text(TEMPLATE), undefined=jinja2.StrictUndefined, **options)
    return template.render(
        size=size, model=quoted(model), train=quoted(train), held_out=quoted(held_out), sft=sft, knows_tools=knows_tools, tests=tests,
        lora=shape is not None and size != "cluster" and STATE_BYTES * shape.parameters > 0.6 * memory_gb * 1e9,
    )  # fmt: skip
