"""Run a recipe on verl: `python -m rstar_lab.rl.verl.train RECIPE --profile P`. The same command again resumes.

Its SFT first, where no model of it is there, then its stages of RL.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.errors import UserError
from rstar_lab.profiles import Profile, load_profile
from rstar_lab.rl.models.model_folder import starting_model
from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.training.stages import difficulty_file
from rstar_lab.rl.verl.config import PREFIX, compose, overrides, split_overrides
from rstar_lab.rl.verl.resume import checkpointed, model_before, stages_of, to_do
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.unsupported import check

PLUGIN = "rstar_lab.rl.verl.plugin"
HANDED_ON = "RSTAR_LAB_HANDED_ON"  # what the plug-in looks for


def environment(profile: Profile, run_dir: Path) -> dict[str, str]:
    """What every process of the run has set, on top of what it inherits."""
    # Where verl's loggers of these names write; without a word from them they would write where the process stands.
    folders = {"TENSORBOARD_DIR": str(run_dir / "tensorboard"), "WANDB_DIR": str(run_dir)}
    # A CPU counts as a GPU by name only; verl's FSDP engine is registered for cuda and npu.
    on_cpu = {"VERL_PLATFORM": "rstar_cpu", "VERL_ENGINE_DEVICE": "cuda"}
    own = {"VERL_USE_EXTERNAL_MODULES": PLUGIN} | folders | profile.env
    return own | (on_cpu if not profile.hardware.gpus else {})


@contextmanager
def handed_on(profile: Profile, run_dir: Path) -> Iterator[dict[str, str]]:
    """The profile's secrets for the run's processes on other nodes, in a file that only this user reads, as long as the run lasts."""
    found = {name: os.environ[name] for name in profile.secrets if name in os.environ}
    path = run_dir / ".handed_on.json"
    path.unlink(missing_ok=True)
    if not found:
        yield {}
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(found, file)
    try:
        yield {HANDED_ON: str(path)}
    finally:
        path.unlink(missing_ok=True)


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


def train_stage(settings: Settings, profile: Profile, start: Path, extra: dict[str, Any]) -> None:
    """What is left of one stage, in this process and the Ray cluster it joins or starts. start: the model before all stages."""
    variables = environment(profile, settings.run_dir)
    os.environ.update(variables)
    import ray
    from omegaconf import open_dict
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    write_tickets(settings.run_dir / "tickets.parquet", settings.keys.problems_per_step)
    config = compose(overrides(settings, profile, model_before(settings, start), extra))
    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
        """verl's own, once our trainer is registered in its process."""

        def run(self, config: Any) -> None:
            from rstar_lab.rl.verl import trainer  # noqa: F401

            super().run(config)

    try:
        with handed_on(profile, settings.run_dir) as secret:
            with open_dict(config):
                config.ray_kwargs.ray_init.runtime_env.env_vars = variables | secret
            run_ppo(config, task_runner_class=ray.remote(Runner))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise


def fine_tune(arguments: list[str], sets: list[str], attempts: int) -> None:
    """The recipe's SFT, in a process of its own; one that fails goes on from its last checkpoint."""
    command = [sys.executable, "-m", "rstar_lab.rl.verl.sft", *arguments]
    command += [part for pair in sets for part in ("--set", pair)]
    for left in reversed(range(attempts)):
        if not (code := subprocess.run(command).returncode):
            return
        if not left:
            raise typer.Exit(code)
        print(f"SFT ended with {code}; it goes on from its checkpoint", flush=True)


def filter_problems(settings: Settings, start: Path, recipe: str, sets: list[str]) -> None:
    """Measure a stage's problems before it, where its filter asks for that. Raises UserError where that fails."""
    stage = settings.stage
    if stage.filter is None or difficulty_file(settings.run_dir, stage.name).exists():
        return
    command = [sys.executable, "-m", "rstar_lab.rl.commands.filter", recipe, stage.name]
    command += [str(model_before(settings, start)), "--runs-dir", str(settings.runs_dir)]
    command += [part for pair in sets if not pair.startswith(PREFIX) for part in ("--set", pair)]
    if code := subprocess.run(command).returncode:
        raise UserError(f"stages.{stage.name}.filter: measuring its problems ended with {code}")


def require_sandbox_service(recipe: Recipe, profile: Profile) -> None:
    """Raise UserError if the profile has a sandbox service and the recipe's calls would not go there."""
    if profile.sandbox.redis and recipe.sandbox.url == "local":
        raise UserError(
            f"sandbox.url: local, but profile {profile.name} has sandbox.redis: true; submit the recipe with `rstar-lab jobs "
            "submit`, which starts the service, or set sandbox.url to the URL of `rstar-lab sandbox serve`"
        )


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
    watchdog_s: Annotated[float, typer.Option(help="Longest a phase of a step may take.")] = 7200.0,
    retries: Annotated[
        int | None,
        typer.Option(
            envvar="RSTAR_LAB_RETRIES",
            help="How often a failed stage continues from its last checkpoint. Default: 2 on GPUs, else 0.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """SFT and all stages, from the last checkpoint on; each in a process of its own."""
    ours, verls = split_overrides(parse_overrides(sets or []))
    loaded = load_recipe(recipe, ours | {"runs": str(runs_dir.absolute())}, load_profile(profile))
    check(loaded)
    require_sandbox_service(loaded, load_profile(profile))
    chosen, folder = load_profile(profile), runs_dir.absolute()
    start = starting_model(loaded, folder)

    def plan() -> list[Settings]:
        return stages_of(loaded, folder, watchdog_s)

    if stage is not None:
        settings = next((s for s in plan() if s.stage.name == stage), None)
        if settings is None:
            raise UserError(f"--stage {stage}: the recipe has {', '.join(one.name for one in loaded.stages)}")
        train_stage(settings, chosen, start, verls)
        return
    attempts = 1 + ((2 if chosen.hardware.gpus else 0) if retries is None else retries)
    if any(map(to_do, plan())):
        with own_ray(chosen):
            if loaded.sft is not None and not (start / "config.json").exists():
                fine_tune([recipe, "--profile", profile, "--runs-dir", str(folder)], sets or [], attempts)
            for number in range(len(loaded.stages)):
                for left in reversed(range(attempts)):
                    settings = plan()[number]  # where its first step is, the stages before it have decided
                    if not to_do(settings):
                        break
                    filter_problems(settings, start, recipe, sets or [])
                    if attempts == 1 and settings.is_last:
                        train_stage(settings, chosen, start, verls)  # nothing comes after it: no second process
                        break
                    own = [sys.executable, "-m", "rstar_lab.rl.verl.train", *sys.argv[1:]]
                    if not (code := subprocess.run([*own, "--stage", settings.stage.name]).returncode):
                        break
                    if not left:
                        raise typer.Exit(code)
                    print(f"{settings.stage.name} ended with {code}; it goes on from its checkpoint", flush=True)
    if as_json:
        run_dir = plan()[0].run_dir
        print(json.dumps({"run": str(run_dir), "steps": checkpointed(run_dir)}))


def run(app: typer.Typer) -> None:
    """The whole of a process that may bring up a Ray cluster of its own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    try:
        app()
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run(app)
