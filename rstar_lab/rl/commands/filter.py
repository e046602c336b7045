"""Filter the problems of a stage by difficulty: `python -m rstar_lab.rl.commands.filter RECIPE STAGE MODEL`.

Both trainers run the filter before the first step of the stage. This command runs it earlier, with engines on this machine.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar_lab.errors import UserError

if TYPE_CHECKING:
    from rstar_lab.rl.recipe import Recipe


def main(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    stage: Annotated[str, typer.Argument(help="Name of a stage with a filter.")],
    model: Annotated[Path, typer.Argument(help="Model after the previous stage: RUN/checkpoints/step=...")],
    runs_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key.")] = None,
) -> None:
    """Sample rollouts of every problem and write RUN/difficulty/stage=STAGE.parquet. Run it again to resume."""
    from rstar_lab.rl.overrides import load_recipe, parse_overrides

    loaded = load_recipe(recipe, parse_overrides(sets or []) | {"runs": str(runs_dir)})
    try:
        kept, count = asyncio.run(measure(loaded, stage, model))
    except UserError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{kept} of {count} problems are kept")


async def measure(recipe: "Recipe", stage_name: str, model: Path) -> tuple[int, int]:
    """Return (problems that are kept, all problems). Raises UserError for a stage without a filter."""
    from rstar_lab.progress import Reporter
    from rstar_lab.rl.evaluation import local_rollouts
    from rstar_lab.rl.models.model import load_tokenizer
    from rstar_lab.rl.rollout.codec import Codec
    from rstar_lab.rl.rollout.context import RolloutContext
    from rstar_lab.rl.session import RunSession, read_stage_problems
    from rstar_lab.rl.training.stages import filter_problems
    from rstar_lab.runs.reader import RunReader

    stage = next((entry for entry in recipe.stages if entry.name == stage_name and entry.filter), None)
    if stage is None or stage.filter is None:
        with_filter = ", ".join(entry.name for entry in recipe.stages if entry.filter) or "none"
        raise UserError(
            f"stage {stage_name}: the recipe has no stage of this name with a filter; stages with a filter: {with_filter}"
        )
    async with RunSession.open(recipe, Reporter()) as session:
        run_dir = session.runs_dir / session.run_id("rl")
        steps = RunReader(run_dir).steps() if (run_dir / "run.json").exists() else {}
        problems = read_stage_problems(recipe, stage, session.excluded)
        engines, tools = await session.engines(model), await session.tools()
        await engines.load_folder(model)
        rl = recipe.settings(stage)
        codec = Codec(load_tokenizer(model), tools, recipe.rl.prompt_style)
        context = RolloutContext.for_training(codec, tools, session.reward, rl)
        context = context.with_environments(await session.environments())
        kept = await filter_problems(
            problems,
            stage.filter,
            local_rollouts(problems, context, engines=engines, mode=rl.rollout),
            stage=stage.name,
            step=max(steps, default=0),
            recipe=recipe,
            run_dir=run_dir,
        )
        return len(kept), len(problems)


if __name__ == "__main__":
    typer.run(main)
