"""The `rstar-lab` command. Heavy imports wait until a command needs them, so `--help` is fast and needs no extra."""

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from rstar_lab import __version__
from rstar_lab.errors import UserError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)  # fmt: skip

# Extra that installs a package, for the error of a command that needs it.
EXTRA_OF = {
    "duckdb": "analysis", "pandas": "analysis", "plotly": "analysis", "pyarrow": "analysis", "anywidget": "analysis",
    "papermill": "notebooks", "nbconvert": "notebooks", "jupytext": "notebooks",
    "fastapi": "sandbox", "httpx": "sandbox", "math_verify": "sandbox", "redis": "sandbox", "sympy": "sandbox",
    "uvicorn": "sandbox", "uvloop": "sandbox", "numpy": "sandbox", "scipy": "sandbox", "prometheus_client": "sandbox",
    "torch": "cpu", "transformers": "cpu", "tokenizers": "cpu", "safetensors": "cpu", "vllm": "cpu",
    "ray": "verl", "verl": "verl", "transfer_queue": "verl", "datasets": "hub", "inspect_ai": "inspect",
}  # fmt: skip

RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Folder of runs (default: the recipe's, runs/).")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, as in --set rl.lr=1e-4.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe's file, or the name of one that ships: tiny ...")
]


def _read(recipe: str, sets: list[str] | None, runs_dir: Path | None) -> Any:
    from rstar_lab.rl.overrides import load_recipe, parse_overrides

    overrides = parse_overrides(sets or [])
    if runs_dir:
        overrides["runs"] = str(runs_dir)
    return load_recipe(recipe, overrides)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        # Handled here because Typer prints only "Aborted!".
        _fail("stopped; run the same command again to continue", 130)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A workbench for reinforcement learning with a Python tool. Start with `rstar-lab demo --fast`.

    Install rstar_lab[sandbox], [analysis], [notebooks] or, with `make setup`, everything.
    """


@app.command()
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="A shorter story: about a minute and a half.")] = False,
    runs_dir: RunsDir = None,
    out: Annotated[Path, typer.Option(help="Where the executed notebook goes.")] = Path("out"),
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model from nothing to a tool user, here and now, and leave its story as a notebook.

    SFT on executed traces, GRPO-RoC against the sandbox, evaluation before and after. Run again, it goes on where it was stopped.
    """
    from rstar_lab.progress import Reporter
    from rstar_lab.rl.commands.demo import run_demo

    recipe = _read("tiny_fast" if fast else "tiny", sets, runs_dir)
    result = _run(run_demo(recipe, out, Reporter(as_json)))
    if as_json:
        print(json.dumps(result))


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the shipped recipes. Use a name as RECIPE: `rstar-lab run tiny_fast`."""
    from rstar_lab.rl.overrides import shipped_recipes

    for name, summary in shipped_recipes().items():
        print(json.dumps({"name": name, "summary": summary}) if as_json else f"{name:22} {summary}")


@app.command()
def sft(recipe: RecipeName, runs_dir: RunsDir = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """Run a recipe's SFT only. The same command again resumes."""
    _pieces(_read(recipe, sets, runs_dir), as_json, stages=False, evaluations=False)


@app.command()
def train(recipe: RecipeName, runs_dir: RunsDir = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """Run a recipe's RL stages, after its SFT where that is missing. The same command again resumes."""
    _pieces(_read(recipe, sets, runs_dir), as_json, stages=True, evaluations=False)


@app.command()
def run(recipe: RecipeName, runs_dir: RunsDir = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """Run everything a recipe describes: SFT, RL stages, evaluations. What is done is not done again."""
    _pieces(_read(recipe, sets, runs_dir), as_json, stages=True, evaluations=True)


def _pieces(recipe: Any, as_json: bool, *, stages: bool, evaluations: bool) -> None:
    from rstar_lab.progress import Reporter
    from rstar_lab.rl.pipeline import run_recipe

    reporter = Reporter(as_json)
    result = _run(run_recipe(recipe, reporter, stages=stages, evaluations=evaluations))
    if as_json:
        print(json.dumps(result))
        return
    if stages and not recipe.stages:
        print(f"recipe {recipe.name} has no stages: no RL was run")
    for name, path in result.items():
        if name.startswith("model_"):
            print(f"{name.removeprefix('model_')} model: {path}")


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|URL...",
            help="A model folder in Hugging Face format, a run whose last model is meant, or URLs of vLLM servers that have it.",
        ),
    ],
    problems: Annotated[
        str,
        typer.Option(
            help="aime24, aime25, hmmt25, math500 or their Hugging Face names (from the hub), aime24=FILE (a file in that "
            "set's schema), or any Parquet, JSON or JSONL of question, answer ..."
        ),
    ],
    samples: Annotated[int, typer.Option(help="Rollouts a problem.")] = 16,
    fields: Annotated[str, typer.Option(help="Names in the file: question=problem,answer=final_answer.")] = "",
    recipe: Annotated[
        str, typer.Option(help="Recipe that says how to sample, with which engine and sandbox.")
    ] = "evaluate",
    limit: Annotated[int | None, typer.Option(help="Only the first so many problems.")] = None,
    name: Annotated[str | None, typer.Option(help="Run id (default: from model and problems).")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the servers' tokenizer, where their model's is not here.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Sample again in a new run, even if this evaluation is finished.")
    ] = False,
    runs_dir: RunsDir = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on problems: avg@k, pass@k and maj@k with intervals clustered by problem.

    The paper's settings unless --recipe or --set say otherwise: 30 turns, 30,000 tokens, temperature 0.6, top-p 0.95.
    Results land in the run store; a killed evaluation started again makes only what is missing.
    """
    from rstar_lab.progress import Reporter
    from rstar_lab.rl.commands.evaluate import evaluate_command

    sets = [*(sets or []), f"evaluate.samples={samples}"]
    result = _run(
        evaluate_command(
            models,
            problems,
            _read(recipe, sets, runs_dir),
            Reporter(as_json),
            fields=fields,
            limit=limit,
            name=name,
            tokenizer=tokenizer,
            force=force,
        )
    )
    if as_json:
        print(json.dumps(result))


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A model folder in Hugging Face format, or a run whose last model is meant.")
    ],
    replicas: Annotated[int, typer.Option(min=1, help="Servers, on ports that follow one another.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback a token is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the first server; 0 takes free ones.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="RSTAR_LAB_API_KEY", help="Token that every request must bring.")
    ] = None,
    updatable: Annotated[
        bool, typer.Option("--updatable", help="Let a trainer push new weights (needs a token).")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and response (default: the model's).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 ...")] = "auto",
    max_batch: Annotated[int, typer.Option(help="Requests that a server generates for at once.")] = 256,
    kv_cache_gb: Annotated[float, typer.Option(help="KV cache of a server; CPU only.")] = 1.0,
    memory_share: Annotated[float, typer.Option(help="Share of a GPU's memory; GPU only.")] = 0.85,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs a server.")] = 1,
    hung_after: Annotated[
        float, typer.Option(min=10, help="Seconds without an answer after which a server is started anew.")
    ] = 120.0,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model with vLLM: token ids for training and evaluation, chat with tools for any OpenAI client.

    Says when it is ready; a server that dies or hangs is started again; Ctrl-C ends them all. Flags after `--` go to vLLM.
    """
    from rstar_lab.rl.models.model_folder import model_folder
    from rstar_lab.rl.serving.serve import ServeOptions, serve_command

    options = ServeOptions(
        model_folder(model, runs_dir or Path("runs")), replicas, host, port, api_key, updatable, max_model_len, dtype, max_batch,
        kv_cache_gb, memory_share, tensor_parallel, hung_after, tuple(context.args),
    )  # fmt: skip
    _run(serve_command(options, as_json))


@app.command()
def chat(
    model_or_url: Annotated[
        str, typer.Argument(help="A model folder, a run whose last model is meant, or the URL of a server.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Ask this, show the reply and end.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply, the tools' answers included.")] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Turns of a reply.")] = 30,
    temperature: Annotated[float, typer.Option(min=0)] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.01, max=1)] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed says the same.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the chat in the run store.")] = False,
    name: Annotated[str | None, typer.Option(help="Run id (default: from the time).")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="By chat completions with tools, whatever the server could do.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the server's tokenizer, where its model's is not here.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="For a folder: vllm, transformers, or auto (vllm on a GPU, else transformers).")
    ] = "auto",
    sandbox: Annotated[str, typer.Option(help="local, or the URL of `rstar-lab sandbox serve`.")] = "local",
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a model that runs Python in the sandbox: thinking, code, results and answer set apart.

    A vLLM server is spoken to by token ids, any other OpenAI-style one by chat completions with tools.
    """
    from rstar_lab.rl.chat.session import ChatOptions
    from rstar_lab.rl.chat.view import chat_command

    if prompt is not None and not prompt.strip():
        raise UserError("chat --prompt: the prompt is empty; give a question, or leave --prompt out to chat")
    if as_json and prompt is None:
        raise UserError("chat --json: give a --prompt")
    if engine not in ("auto", "vllm", "transformers"):
        raise UserError(f"--engine {engine}: choose from auto, vllm, transformers")
    options = ChatOptions(temperature, top_p, max_tokens, max_turns, seed)
    _run(
        chat_command(
            model_or_url,
            options,
            prompt=prompt,
            tokenizer=tokenizer,
            plain=plain,
            engine=engine,
            sandbox=sandbox,
            save=save,
            name=name,
            runs_dir=runs_dir or Path("runs"),
            as_json=as_json,
        )
    )


@app.command()
def preflight(
    recipe: RecipeName,
    profile: Annotated[str, typer.Option(help="Hardware profile: a name of cluster/profiles, or a file.")] = "laptop",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where something cannot be looked at from here.")
    ] = False,
    trainer: Annotated[str | None, typer.Option(help="local or verl. Default: the profile's trainer.")] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Look at all that can go wrong before a GPU is touched, and estimate memory and time."""
    from rstar_lab.rl.overrides import parse_overrides
    from rstar_lab.rl.preflight.run import run_preflight

    raise typer.Exit(
        run_preflight(recipe, profile, parse_overrides(sets or []), trainer=trainer, strict=strict, as_json=as_json)
    )


@app.command()
def rehearse(
    recipe: RecipeName,
    profile: Annotated[str, typer.Option(help="Hardware profile: a name from cluster/profiles, or a file.")] = "laptop",
    folder: Annotated[Path | None, typer.Option(help="Keep all files here. Default: a temporary folder.")] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole job of a recipe on a profile at small size on this machine, with kills and resumes.

    Prints a table of phases and the keys that only the real machine can test.
    """
    from rstar_lab.rl.overrides import parse_overrides
    from rstar_lab.rl.rehearsal.run import rehearse as run_rehearsal

    raise typer.Exit(run_rehearsal(recipe, profile, parse_overrides(sets or []), folder=folder, as_json=as_json))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="trainer, sandbox, rollout, scheduler, store, verl or gpu.")],
    against: Annotated[str | None, typer.Option(help="URL of a running peer, where the bench wants one.")] = None,
    grid: Annotated[Path | None, typer.Option(help="scheduler: file of regimes.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="verl: training ranks (gloo, on the CPU). Default: 1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a part against a peer in one run; what counts is the ratio."""
    homes = {
        "trainer": "rl.bench.trainer", "sandbox": "sandbox.bench", "rollout": "rl.bench.rollout",
        "scheduler": "rl.bench.scheduler", "store": "analysis.bench", "verl": "rl.bench.verl",
        "gpu": "rl.bench.gpu",
    }  # fmt: skip
    if name not in homes:
        raise UserError(f"bench {name}: there is none; choose from {', '.join(homes)}")
    given = {"grid": (grid, "scheduler"), "ranks": (ranks, "verl")}
    options = {key: value for key, (value, _) in given.items() if value is not None}
    if wrong := next((key for key in options if given[key][1] != name), None):
        raise UserError(f"bench {name}: --{wrong} is an option of `bench {given[wrong][1]}` only")
    # Printed as it is measured: some benches take a quarter of an hour.
    row = "{:30} {:>10} {:24} {:>8}   {:20} {}".format
    if not as_json:
        print(row("bench", "value", "unit", "ratio", "against", "n"))
    for line in import_module(f"rstar_lab.{homes[name]}").bench(against, **options):
        if as_json:
            print(json.dumps(line), flush=True)
            continue
        value, peer = (
            f"{it:.4g}" if isinstance(it, float) else "" if it is None else str(it)
            for it in (line["value"], line["against"])
        )
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}x"
        print(row(line["name"], value, line["unit"], ratio, peer, line["n"]), flush=True)


@app.command()
def notebooks(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that receives the notebooks.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace notebooks of the same name.")] = False,
) -> None:
    """Copy the notebooks into a folder of your own, for example after `pip install rstar_lab[notebooks]`."""
    from rstar_lab.resources import copy_notebooks

    for path in copy_notebooks(folder, overwrite=overwrite):
        print(path)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def mount() -> None:
    """Add the command groups of the other packages; a group whose extra is missing says so when it is called."""
    groups = {
        "sandbox": (
            "rstar_lab.sandbox.cli",
            "Run untrusted Python: serve the sandbox, start workers, check this machine.",
        ),
        "runs": ("rstar_lab.runs.cli", "List, show and compact runs."),
        "ablation": ("rstar_lab.analysis.cli", "Compare the arms of an ablation."),
        "jobs": ("rstar_lab.jobs.cli", "Submit recipes as jobs: on this machine, to Ray or to Slurm."),
        "data": ("rstar_lab.rl.commands.data", "Synthesize problems; prepare problems and conversations."),
    }
    for name, (module, text) in groups.items():
        try:
            app.add_typer(import_module(module).app, name=name, help=text, no_args_is_help=True)
        except ModuleNotFoundError as error:
            settings = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, help=text, context_settings=settings)(_command_without_extra(error))


def _command_without_extra(error: ModuleNotFoundError) -> Callable[[], None]:
    def fail() -> None:
        _missing(error)

    return fail


def _missing(error: ModuleNotFoundError) -> None:
    package = (error.name or "").split(".")[0]
    if package not in EXTRA_OF:
        raise error
    raise UserError(f"this command needs {package}: install rstar_lab[{EXTRA_OF[package]}]") from error


def main() -> None:
    """Run the command line; print errors that a user can fix as one line instead of a traceback."""
    # Must be set before torch is imported: OpenMP threads that spin while they wait starve the engines beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    gc.set_threshold(50_000)  # garbage collection would take a fifth of the import time
    mount()
    try:
        try:
            app()
        except ModuleNotFoundError as error:
            _missing(error)
    except UserError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("stopped; run the same command again to continue", 130)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True, highlight=False, emoji=False).print(f"[bold red]error[/]: {escape(message)}", soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
