"""`rstar-lab chat`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, RunsDir, examples, run_async
from rstar_lab.common.errors import UserError

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab chat runs/tiny_fast-rl --engine transformers",
        'rstar-lab chat http://127.0.0.1:8000 --prompt "What is 17 * 23?"',
        "rstar-lab chat models/rStar2-Agent-14B --prompt-format released --tools python_released,jupyter",
    )
)
def chat(
    model_or_url: Annotated[
        str, typer.Argument(help="A model folder, a run (its last model), or the URL of a vLLM server.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Ask one question, print the reply and exit.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of a reply and tool results. Default: 30,000; transformers: 2,048."),
    ] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Maximum number of turns of a reply.")] = 30,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Nucleus sampling.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Sampling seed. Default: random.")] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            help="Tools, as the recipe key rl.tools: python,jupyter or module:function. Empty: no tools. "
            "Default: python, with --prompt-format released python_released."
        ),
    ] = None,
    prompt_format: Annotated[
        str,
        typer.Option(
            help="Prompt format: paper, released (models of microsoft/rStar) or model (the model's chat template)."
        ),
    ] = "paper",
    save: Annotated[bool, typer.Option("--save", help="Write the chat to the run store.")] = False,
    name: Annotated[str | None, typer.Option(help="Run id. Default: made from the time.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the server's tokenizer, if its model is not on this machine.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="Engine for a model folder: vllm, transformers, or auto (vllm on a GPU, else transformers)."),
    ] = "auto",
    sandbox: Annotated[str, typer.Option(help="local, or the URL of `rstar-lab sandbox serve`.")] = "local",
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Chat with a model that runs Python in the sandbox. Shows reasoning, code, results and answer separately."""
    from rstar_lab.rl.chat.session import ChatOptions
    from rstar_lab.rl.chat.view import chat_command
    from rstar_lab.rl.renderers.formats import renderer_type

    if prompt is not None and not prompt.strip():
        raise UserError("chat --prompt: the prompt is empty; give a question, or leave --prompt out to chat")
    if as_json and prompt is None:
        raise UserError("chat --json requires --prompt")
    if engine not in ("auto", "vllm", "transformers"):
        raise UserError(f"--engine {engine}: choose from auto, vllm, transformers")
    renderer = renderer_type(prompt_format)
    tools = renderer.python_tool if tools is None else tools
    names = tuple(name.strip() for name in tools.split(",") if name.strip())
    options = ChatOptions(temperature, top_p, max_tokens, max_turns, seed, names, renderer.name)
    run_async(
        chat_command(
            model_or_url, options, prompt=prompt, tokenizer=tokenizer, engine=engine, sandbox=sandbox, save=save,
            name=name, runs_dir=runs_dir or Path("runs"), as_json=as_json,
        )
    )  # fmt: skip
