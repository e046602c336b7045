"""`rstar-lab serve`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, RunsDir, examples, run_async

app = typer.Typer()


@app.command(
    context_settings={"allow_extra_args": True},
    epilog=examples(
        "rstar-lab serve runs/tiny_fast-rl",
        "rstar-lab serve MODEL --replicas 2 --port 8000 -- --enforce-eager",
        "rstar-lab serve models/rStar2-Agent-14B --prompt-format released",
    ),
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder in Hugging Face format, or a run (its last model).")],
    replicas: Annotated[int, typer.Option(min=1, help="Number of servers, on consecutive ports.")] = 1,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address other than loopback requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first server; 0 picks free ports.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="RSTAR_LAB_API_KEY",
            help="Token that every request must carry. Default: one in a file that our clients find.",
        ),
    ] = None,
    own_token: Annotated[
        bool,
        typer.Option(
            "--token/--no-token",
            help="Without --api-key: make a token for each server. --no-token: serve every user of this machine.",
        ),
    ] = True,
    updatable: Annotated[
        bool, typer.Option("--updatable", help="Let a trainer load new weights. Requires a token.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum tokens of prompt plus response. Default: the model's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="A dtype of vLLM. auto: the model's on a GPU, float32 on a CPU.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs per server.")] = 1,
    prompt_format: Annotated[
        str | None,
        typer.Option(
            help="Chat template of chat completions: paper, or released (the prompts of microsoft/rStar). Default: the model's."
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model with vLLM: token ids for training and evaluation, chat with tools for OpenAI clients.

    Prints a line when the servers are ready. Restarts a server that dies or hangs. Ctrl-C ends all. Options after `--` go to
    vLLM, such as `--gpu-memory-utilization 0.7`.
    """
    from rstar_lab.rl.models.model_folder import model_folder
    from rstar_lab.rl.serving.serve import ServeOptions, serve_command

    options = ServeOptions(
        model_folder(model, runs_dir or Path("runs")), replicas, host, port, api_key, updatable, max_model_len, dtype,
        tensor_parallel, prompt_format, tuple(context.args), own_token,
    )  # fmt: skip
    run_async(serve_command(options, as_json))
