"""`rstar-lab push` and `rstar-lab pull`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import RunsFolder, examples
from rstar_lab.untrusted.text import counted, echo

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab push tiny-rl me/tiny-rl-rollouts --dry-run",
        "rstar-lab push runs/tiny-rl/checkpoints/step=000034 me/tiny-tool-user",
    )
)
def push(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Run id, folder of a run, or folder of a model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hugging Face Hub: NAMESPACE/NAME.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public. Default: private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and print the card; send nothing.")
    ] = False,
    runs_dir: RunsFolder = Path("runs"),
) -> None:
    """Send a model, or a run as a data set, to the Hugging Face Hub, with a card written from the run.

    The token is read from `hf auth login` or the environment variable HF_TOKEN. Optimizer states, logs and pickles are
    not sent.
    """
    from rstar_lab.exchange.hub import prepare
    from rstar_lab.exchange.hub import push as send

    upload = prepare(Path(source) if Path(source).is_dir() else runs_dir / source)
    if dry_run:
        card = upload.files["README.md"]
        echo(card.decode() if isinstance(card, bytes) else card)
        for name in upload.files:
            echo(name)
        return
    echo(f"{send(upload, repo, public=public)} ({counted(len(upload.files), 'file')}, {upload.size / 1e6:.1f} MB)")


@app.command(
    epilog=examples("rstar-lab pull someone/tiny-rl-rollouts", "rstar-lab pull someone/tiny-tool-user --to models")
)
def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hugging Face Hub: NAMESPACE/NAME.")],
    to: Annotated[Path, typer.Option(help="Folder that receives the run or model.")] = Path("runs"),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
) -> None:
    """Fetch a run or a model from the Hugging Face Hub. A run can be inspected and compared like one of your own."""
    from rstar_lab.exchange.hub import pull as fetch

    kind, folder = fetch(repo, to, revision=revision)
    echo(f"{kind} {folder}")
