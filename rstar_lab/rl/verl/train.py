"""Run a recipe's RL on verl: `python -m rstar_lab.rl.verl.train RECIPE --profile P`. The same command again resumes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.errors import UserError
from rstar_lab.profiles import Profile, load_profile
from rstar_lab.rl.recipe import Recipe, load_recipe, parse_overrides
from rstar_lab.rl.verl.settings import Settings

PLUGIN = "rstar_lab.rl.verl.plugin"


def stages_of(recipe: Recipe, runs_dir: Path, watchdog_s: float | None = None) -> list[Settings]:
    """Every stage with the number of its first step."""
    found, first = [], 1
    for stage in recipe.stages:
        found.append(Settings(recipe, stage, f"{recipe.name}-rl", runs_dir, first, watchdog_s))
        first += stage.steps
    return found


def environment(profile: Profile) -> dict[str, str]:
    """What every process of the run has set, on top of what it inherits."""
    # A CPU counts as a GPU by name only; verl's FSDP engine is registered for cuda and npu.
    on_cpu = {"VERL_PLATFORM": "rstar_cpu", "VERL_ENGINE_DEVICE": "cuda"}
    return {"VERL_USE_EXTERNAL_MODULES": PLUGIN} | profile.env | (on_cpu if not profile.hardware.gpus else {})


def own_ray(profile: Profile) -> AbstractContextManager[Any]:
    """On a CPU a Ray cluster of this run's own, which is told to count the CPU as a GPU; elsewhere verl's to find or start."""
    if profile.hardware.gpus or "RAY_ADDRESS" in os.environ:
        return nullcontext()
    from rstar_lab.local_ray import LocalRay

    return LocalRay(cpus=8, gpus=1, dashboard=False)  # CPUs are places for actors, not cores


def write_tickets(path: Path, count: int) -> None:
    """verl's data set: one blank row for each problem of a step. What it stands for, the manager decides."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"prompt": [{"role": "user", "content": "-"}], "data_source": "rstar_lab", "agent_name": "rstar"}
    pq.write_table(pa.Table.from_pylist([row | {"extra_info": {"index": i}} for i in range(count)]), path)


def train_stage(settings: Settings, profile: Profile, model: Path, extra: dict[str, Any]) -> None:
    """One stage, in this process and the Ray cluster it joins or starts."""
    os.environ.update(environment(profile))
    import ray
    from omegaconf import open_dict
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from rstar_lab.rl.verl.config import compose, overrides

    write_tickets(settings.runs_dir / settings.run / "tickets.parquet", settings.keys.problems_per_step)
    config = compose(overrides(settings, profile, model, extra))
    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = environment(profile)

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
        """verl's own, once our trainer is registered in its process."""

        def run(self, config: Any) -> None:
            from rstar_lab.rl.verl import trainer  # noqa: F401

            super().run(config)

    run_ppo(config, task_runner_class=ray.remote(Runner))


app = typer.Typer(add_completion=False)


@app.command()
def main(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    profile: Annotated[str, typer.Option(help="Hardware profile.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key=value; verl.KEY=VALUE sets a key of verl.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of runs, seen by every node.")] = Path("runs"),
    stage: Annotated[str | None, typer.Option(help="This stage only, in this process.")] = None,
    watchdog_s: Annotated[float | None, typer.Option(help="Longest a phase of a step may take.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Each stage runs in a process of its own and begins at the last checkpoint."""
    from rstar_lab.rl.verl.config import split_overrides

    ours, verls = split_overrides(parse_overrides(sets or []))
    loaded = load_recipe(recipe, ours | {"runs": str(runs_dir)})
    chosen = load_profile(profile)
    plan = stages_of(loaded, runs_dir.absolute(), watchdog_s)
    if not plan:
        raise UserError(f"recipe {recipe}: it has no stages to train")
    if stage is not None:
        settings = next((s for s in plan if s.stage.name == stage), None)
        if settings is None:
            raise UserError(f"--stage {stage}: the recipe has {', '.join(s.stage.name for s in plan)}")
        train_stage(settings, chosen, starting_model(loaded, runs_dir), verls)
        return
    with own_ray(chosen):
        for settings in plan:
            command = [sys.executable, "-m", "rstar_lab.rl.verl.train", *sys.argv[1:], "--stage", settings.stage.name]
            if code := subprocess.run(command).returncode:
                raise typer.Exit(code)
    if as_json:
        print(json.dumps({"run": str(runs_dir / plan[0].run), "steps": sum(s.stage.steps for s in plan)}))


def starting_model(recipe: Recipe, runs_dir: Path) -> Path:
    """The recipe's model after its SFT. Raises UserError where that has not been made."""
    after_sft = runs_dir / f"{recipe.name}-sft" / "sft" / "model"
    if recipe.sft is None:
        return Path(recipe.model).absolute()
    if not (after_sft / "config.json").exists():
        raise UserError(
            f"{after_sft}: no model yet; `rstar-lab sft {recipe.name} --runs-dir {runs_dir}` makes it, or set sft=null and model=FOLDER"
        )
    return after_sft.absolute()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a Ray cluster of our own is taken down
    try:
        app()
    except UserError as error:
        sys.exit(f"error: {error}")
