"""`rstar-lab evaluate`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RunsDir, echo, examples, read_recipe, run_async

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab evaluate runs/tiny_fast-rl --problems held_out.jsonl --samples 4 --set engine.kind=transformers",
        "rstar-lab evaluate runs/tiny_fast-rl --problems aime24 --problems aime25",
        "rstar-lab evaluate http://127.0.0.1:8000 http://127.0.0.1:8001 --problems aime24",
    )
)
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|URL...",
            help="A model folder in Hugging Face format, a run (its last model), or URLs of vLLM servers of one model.",
        ),
    ],
    problems: Annotated[
        list[str],
        typer.Option(
            help="aime24, aime25, hmmt25, math500 or their Hugging Face names (downloaded), aime24=FILE (a file with that "
            "set's columns), or a Parquet, JSON, JSONL or CSV file with the columns question and answer. Repeat it to evaluate "
            "several sets in one run."
        ),
    ],
    samples: Annotated[
        int | None, typer.Option(help="Rollouts per problem. Default: evaluate.samples, 16 in the default recipe.")
    ] = None,
    fields: Annotated[str, typer.Option(help="Columns of the file, as question=Q,answer=A.")] = "",
    recipe: Annotated[str, typer.Option(help="Recipe with sampling, engine and sandbox settings.")] = "evaluate",
    limit: Annotated[int | None, typer.Option(help="Use only the first N problems.")] = None,
    name: Annotated[str | None, typer.Option(help="Prefix of the run id. Default: evaluate-SET.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the servers' tokenizer, if their model is not on this machine.")
    ] = None,
    environment: Annotated[
        str,
        typer.Option(help="Environment of all problems: module:Class, or an entry of rl.environments in the recipe."),
    ] = "",
    runs_dir: RunsDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on problems: avg@k, pass@k and maj@k with intervals clustered by problem.

    Default settings: 30 turns, 30,000 tokens and temperature 0.6, as in the paper, and top-p 0.95, which is our choice.
    --recipe and --set change them.
    Results are written to the run store. The same command again generates only missing rollouts.
    """
    from rstar_lab.common.progress import Reporter
    from rstar_lab.rl.evaluate_command import evaluate_command

    given = [] if samples is None else [f"evaluate.samples={samples}"]
    settings = read_recipe(recipe, [*(overrides or []), *given], runs_dir)
    result = run_async(
        evaluate_command(
            models, problems, settings, Reporter(as_json), fields=fields, limit=limit, name=name, tokenizer=tokenizer,
            environment=environment,
        )
    )  # fmt: skip
    if as_json:
        echo(json.dumps(result))
