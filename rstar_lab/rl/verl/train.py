"""Run a recipe with verl: `python -m rstar_lab.rl.verl.train RECIPE --profile P`. The same command again resumes.

It runs the SFT first if its model is missing, evaluates the model before it, and runs the RL stages.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.ends import STOPPED, end_like_ctrl_c, exit_code
from rstar_lab.hardware.limits import raise_open_files
from rstar_lab.hardware.processes import run_child, wait_until
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.models.model_folder import starting_model
from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.pipeline import base_folder, is_evaluated
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.rollout.checks import MAX_PROMPT_TOKENS, overlong_message, split_overlong
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.session import tool_maker
from rstar_lab.rl.verl import SECRETS_FILE, WITHOUT_NOISE
from rstar_lab.rl.verl.config import PLACEHOLDER_ROWS, compose, overrides, split_overrides
from rstar_lab.rl.verl.settings import Settings, checkpointed, has_steps_left, model_before, stages_of
from rstar_lab.rl.verl.unsupported import check, check_architecture
from rstar_lab.rl.verl.watchdog import STOP_FILE
from rstar_lab.runs.files import atomic_write
from rstar_lab.runs.lock import is_locked

SANDBOX_SECRETS = ("RSTAR_LAB_SANDBOX_TOKEN", "RSTAR_LAB_REDIS_URL")  # token of the job's own service


def environment(profile: Profile, run_dir: Path) -> dict[str, str]:
    """Return the environment variables of every process of the run, in addition to the inherited ones."""
    # Without these, verl's loggers write to the working directory.
    folders = {"TENSORBOARD_DIR": str(run_dir / "tensorboard"), "WANDB_DIR": str(run_dir)}
    # verl registers its FSDP engine for cuda and npu only, so the CPU platform uses the name cuda.
    on_cpu = {"VERL_PLATFORM": "rstar_cpu", "VERL_ENGINE_DEVICE": "cuda"}
    variables = {"VERL_USE_EXTERNAL_MODULES": "rstar_lab.rl.verl.plugin"} | folders | profile.env
    return variables | (on_cpu if not profile.hardware.gpus else {})


@contextmanager
def secrets_file(profile: Profile, run_dir: Path) -> Iterator[dict[str, str]]:
    """Write the secrets of the profile and the sandbox to a file for the processes on other nodes; delete it at the end.

    Only this user can read it.
    """
    names = dict.fromkeys([*profile.secrets, *SANDBOX_SECRETS])
    secrets = {name: os.environ[name] for name in names if name in os.environ}
    path = run_dir / ".handed_on.json"
    path.unlink(missing_ok=True)
    if not secrets:
        yield {}
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(secrets, file)
    try:
        yield {SECRETS_FILE: str(path)}
    finally:
        path.unlink(missing_ok=True)


def own_ray(profile: Profile) -> AbstractContextManager[Any]:
    """On a CPU, start a Ray cluster for this run that counts the CPU as a GPU. With GPUs, verl joins or starts one."""
    if profile.hardware.gpus or "RAY_ADDRESS" in os.environ:
        return nullcontext()
    from rstar_lab.hardware.local_ray import LocalRay

    return LocalRay(cpus=8, gpus=1, dashboard=False)  # Ray CPUs are slots for actors, not cores


def write_placeholder_rows(path: Path, count: int) -> None:
    """Write verl's data set: one placeholder row per problem of a step. The manager assigns the problems."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"prompt": [{"role": "user", "content": "-"}], "data_source": "rstar_lab", "agent_name": "rstar"}
    pq.write_table(pa.Table.from_pylist([row | {"extra_info": {"index": i}} for i in range(count)]), path)


def drop_overlong(settings: Settings, model: Path) -> None:
    """Write the ids of the problems of the stage whose prompts exceed MAX_PROMPT_TOKENS, and print their number. model: folder with
    the tokenizer. Raises UserError if no problem is left."""
    if settings.overlong_file.exists():
        return
    keys = settings.rl
    unused_sandbox = object()  # only the schemas of the tools are read
    codec = Codec(load_tokenizer(model), tool_maker(settings.recipe, unused_sandbox)(keys.tools), keys.prompt_style)
    kept, overlong = split_overlong(settings.problems, codec, MAX_PROMPT_TOKENS)
    if overlong:
        message = overlong_message(settings.stage.name, overlong, len(kept) + len(overlong))
        if not kept:
            raise UserError(message)
        print(message, flush=True)
        with atomic_write(settings.overlong_file) as file:
            file.write(json.dumps([problem.problem_id for problem in overlong]).encode())
        del settings.__dict__["problems"]  # cached before the file was written


def train_stage(settings: Settings, profile: Profile, start: Path, extra: dict[str, Any]) -> None:
    """Run the rest of one stage in this process, on the Ray cluster that it joins or starts. start: the model before all stages."""
    check_architecture(model_before(settings, start))
    variables = environment(profile, settings.run_dir) | {WITHOUT_NOISE: "1"}
    os.environ.update(variables)
    import ray
    from omegaconf import open_dict
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    drop_overlong(settings, model_before(settings, start))
    write_placeholder_rows(settings.run_dir / PLACEHOLDER_ROWS, settings.rl.problems_per_step)
    config = compose(overrides(settings, profile, model_before(settings, start), extra))
    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
        """verl's runner; it registers our trainer in its process first. SIGTERM ends it as Ctrl-C does, also in its start."""

        def run(self, config: Any) -> None:
            from rstar_lab.rl.verl import trainer  # noqa: F401

            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with ExitStack() as stack:
                stack.push(lambda *error: self.trainer and self.trainer.writer.__exit__(*error))
                super().run(config)

    (settings.run_dir / STOP_FILE).unlink(missing_ok=True)  # of a driver that was killed while it stopped
    try:
        with secrets_file(profile, settings.run_dir) as secret:
            with open_dict(config):
                config.ray_kwargs.ray_init.runtime_env.env_vars = variables | secret
            run_ppo(config, task_runner_class=ray.remote(Runner))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise
    except (KeyboardInterrupt, SystemExit):  # Ray's handler of SIGTERM raises SystemExit
        # The trainer records that its runs are stopped; without this, Ray kills it.
        (settings.run_dir / STOP_FILE).touch()
        wait_until(lambda: not is_locked(settings.run_dir), 20.0, every_s=0.1)
        (settings.run_dir / STOP_FILE).unlink()
        raise


def run_part(name: str, command: list[str], attempts: int) -> None:
    """Run a part of the job in a separate process; a failed attempt continues from its last checkpoint.

    An error of the user would occur again, so it is not tried again.
    """
    for left in reversed(range(attempts)):
        code = run_child(command, capture=False).returncode
        if not code:
            return
        if code == USER_ERROR or not left:
            raise typer.Exit(code)
        print(f"{name} exited with code {code}; continuing from its last checkpoint", flush=True)


def require_sandbox_service(recipe: Recipe, profile: Profile) -> None:
    """Raise UserError if the profile has a sandbox service and the recipe's calls would not go there."""
    if profile.sandbox.redis and recipe.sandbox.url == "local":
        raise UserError(
            f"sandbox.url: local, but profile {profile.name} has sandbox.redis: true; submit the recipe with `rstar-lab jobs "
            "submit`, which starts the service, or set sandbox.url to the URL of `rstar-lab sandbox serve`"
        )


app = typer.Typer(add_completion=False)
USER_ERROR = 2  # exit code, also of Typer for a wrong option


@app.command()
def main(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    profile: Annotated[str, typer.Option(help="Hardware profile.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key=value; verl.KEY=VALUE sets a key of verl.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of runs, visible to every node.")] = Path("runs"),
    sft: Annotated[bool, typer.Option("--sft", help="Run only the SFT, in this process.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Only evaluate the model before SFT, in this process.")] = False,
    stage: Annotated[str | None, typer.Option(help="Run only this stage, in this process.")] = None,
    watchdog_s: Annotated[
        float, typer.Option(help="Seconds that a phase of a step may take before the run is stopped.")
    ] = 7200.0,
    retries: Annotated[
        int | None,
        typer.Option(
            envvar="RSTAR_LAB_RETRIES",
            help="How often a failed stage continues from its last checkpoint. Default: 2 on GPUs, else 0.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Run SFT, the evaluation of the model before it, and all stages from the last checkpoint, each in its own process."""
    ours, verls = split_overrides(parse_overrides(sets or []))
    chosen, folder = load_profile(profile), runs_dir.absolute()
    loaded = load_recipe(recipe, ours | {"runs": str(folder)}, chosen)
    if sft:
        from rstar_lab.rl.verl.sft import train_sft

        return train_sft(loaded, chosen)
    check(loaded)
    require_sandbox_service(loaded, chosen)
    start = starting_model(loaded, folder)

    def plan() -> list[Settings]:
        return stages_of(loaded, folder, watchdog_s)

    if base:
        before = base_folder(loaded, folder / f"{loaded.name}-sft")
        return train_stage(replace(plan()[0], base=True), chosen, before, verls)
    if stage is not None:
        settings = next((s for s in plan() if s.stage.name == stage), None)
        if settings is None:
            raise UserError(f"--stage {stage}: the recipe has {', '.join(known.name for known in loaded.stages)}")
        if has_steps_left(settings):  # of an earlier attempt that failed after its last step
            train_stage(settings, chosen, start, verls)
        return
    command = [sys.executable, "-m", "rstar_lab.rl.verl.train", *sys.argv[1:]]
    attempts = 1 + ((2 if chosen.hardware.gpus else 0) if retries is None else retries)
    if any(map(has_steps_left, plan())):
        with own_ray(chosen):
            if loaded.sft is not None and not (start / "config.json").exists():
                run_part("SFT", [*command, "--sft"], attempts)
            if loaded.sft is not None and not checkpointed(plan()[0].run_dir) and not is_evaluated(loaded, "base"):
                run_part("evaluation of the model before SFT", [*command, "--base"], attempts)
            for number in range(len(loaded.stages)):
                settings = plan()[number]  # its first step depends on the stages before it
                if attempts == 1 and settings.is_last and has_steps_left(settings):
                    train_stage(settings, chosen, start, verls)  # the last stage needs no second process
                elif has_steps_left(settings):
                    run_part(f"stage {settings.stage.name}", [*command, "--stage", settings.stage.name], attempts)
    if as_json:
        run_dir = plan()[0].run_dir
        print(json.dumps({"run": str(run_dir), "steps": checkpointed(run_dir)}))


if __name__ == "__main__":
    raise_open_files()
    end_like_ctrl_c()  # a Ray cluster of its own is stopped then
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except SystemExit as ended:
        if ended.code != 130:  # of Typer, after Ctrl-C
            raise
        print(f"error: {STOPPED}", file=sys.stderr)
        sys.exit(exit_code())
