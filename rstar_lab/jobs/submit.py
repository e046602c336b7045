"""Submit a recipe as a job on the hardware of a profile."""

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rstar_lab.errors import UserError, os_error_message
from rstar_lab.hardware.profiles import EXPECTED_GPUS, Profile, load_profile
from rstar_lab.hardware.storage_paths import resolve_recipe_paths
from rstar_lab.jobs.describe import preflight_rows, set_options
from rstar_lab.jobs.job import Job, backend_module
from rstar_lab.jobs.pack import pack, tree_root
from rstar_lab.jobs.secrets import refuse_secrets
from rstar_lab.jobs.store import SECRETS_FILE, JobFolder, JobSpec, check_name, user_name
from rstar_lab.runs.locate import find_runs_dir

RECIPES = Path(__file__).parent.parent / "recipes"
# The module and arguments of each command, for both trainers.
COMMANDS = {
    ("local", "run"): ["rstar_lab.cli", "run"],
    ("local", "train"): ["rstar_lab.cli", "train"],
    ("local", "sft"): ["rstar_lab.cli", "sft"],
    ("verl", "run"): ["rstar_lab.rl.verl.train"],
    ("verl", "train"): ["rstar_lab.rl.verl.train"],
    ("verl", "sft"): ["rstar_lab.rl.verl.sft"],
}


def submit(
    recipe: str | Path,
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    command: str | None = None,
    runs_dir: str | Path | None = None,
    name: str | None = None,
    backend: str | None = None,
    address: str | None = None,
    host: str | None = None,
    preflight: bool = True,
    log: Callable[[str], None] = print,
    job_id: str | None = None,
    grid: str | None = None,
    start: bool = True,
) -> Job:
    """Run `recipe` on the hardware of `profile`, detached from this process.

    profile: name of a hardware profile, or a file. Default: `laptop`; with `host` the host's `rstar-lab/profile.yaml`, and if the
        host has no such file, `laptop` on Slurm or as a process of the host.
    overrides: recipe keys such as {"rl.lr": 1e-5}, as `--set` takes them.
    command: `run` (everything the recipe describes, the default), `train`, `sft`; with the trainer of the profile. `verl`: `run`
        with the verl trainer, whatever the profile says.
    runs_dir: default: `storage.runs` of the profile. Every node must see it under this path.
    name: name of the run, whose folders are NAME-sft and NAME-rl. Default: the recipe's name.
    backend: local, ray, slurm, ssh or kuberay; default: that of the profile. address: URL of Ray's dashboard.
    host: run the job on this host, reached with ssh (HOST, USER@HOST or an alias of ~/.ssh/config); its runs are copied to
        `runs_dir` while they are written. Default: `ssh.host` of a profile with `backend: ssh`.
    job_id: id of the new job; default: the run's name and the time. grid: name of the grid to which the job belongs.
    start: False prepares the job's folder and leaves it to the caller to start it (for a Slurm array).
    log: called with one line for each item that is sent.
    Raises UserError for an unknown profile, a secret among the overrides, or a failed preflight.
    """
    machine = find_profile(profile, host)
    trainer, action = trainer_and_action(command, machine, overrides or {})
    overrides = dict(overrides or {}) | ({"name": name} if name else {})
    refuse_secrets(overrides)
    run_name = check_name(recipe_name(recipe, overrides), "name of the run")
    job_id = check_name(
        job_id or f"{run_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}", "id of the job"
    )
    backend = "ssh" if host else backend or machine.backend
    if backend == "ssh":
        from rstar_lab.jobs.ssh.submit import submit_over_ssh

        return submit_over_ssh(
            recipe, profile, machine, overrides, host=host, command=command, runs_dir=Path(runs_dir or "runs").absolute(),
            run_name=run_name, preflight=preflight, log=log, job_id=job_id,
        )  # fmt: skip
    profile = profile or "laptop"
    runs = Path(runs_dir or machine.storage.runs).absolute()
    backend_api = backend_module(backend)
    folder = JobFolder.of(runs, job_id)
    if preflight:
        run_preflight(recipe, profile, overrides, trainer, log, runs_here=backend == "local")
    root = tree_root()
    folder.create()
    try:
        _check_owner(folder, run_name)
        recipe_argument = _store_recipe(recipe, machine, folder.path)
        profile_argument = _store_profile(profile, folder.path)
        cwd = Path.cwd()
        if backend != "local":
            cwd = folder.path / "code"
            log(f"{job_id}: sends {pack(root, cwd)} to {backend}")
        _store_secrets(folder, machine, backend, log)
        resolved = resolve_recipe_paths(overrides, machine)
        sandbox_workers = _sandbox_workers(recipe, overrides, machine)
        if backend == "kuberay" and sandbox_workers:
            # Pods with GPUs lack the rights that the sandbox requires, so the sandbox runs in a separate Deployment.
            sandbox_workers, resolved["sandbox.url"] = 0, machine.kuberay.sandbox_url
        arguments = _command(trainer, action, recipe_argument, profile_argument, resolved, runs)
        in_image = backend != "local" and machine.container is not None
        python = "python3" if in_image else sys.executable
        spec = JobSpec(
            id=job_id,
            recipe=str(recipe),
            profile=profile_argument,
            backend=backend,
            command=[python, *arguments],
            cwd=str(cwd),
            runs_dir=str(runs),
            overrides=overrides,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            run=f"{run_name}-rl",
            environment=dict(machine.env) | _expected_gpus(machine, trainer),
            handle={"address": address, "token_path": os.environ.get("RAY_AUTH_TOKEN_PATH")}
            if backend == "ray"
            else {},
            sandbox_workers=sandbox_workers,
            action=command,
            grid=grid,
        )
        folder.save(spec)
        handle = backend_api.start(folder, spec) if start else {}
    except BaseException as error:
        # The job did not start: remove its folder.
        shutil.rmtree(folder.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(os_error_message(error, folder.path)) from error
        raise
    folder.save(replace(spec, handle={**spec.handle, **handle}))
    return Job(folder)


def find_job_runs_dir(profile: str | None, runs_dir: str | Path = "", *, host: str = "") -> Path:
    """Return the folder of runs for the jobs of a notebook.

    `runs_dir` if it is given; else `storage.runs` of a profile whose nodes share it (an absolute path); else that of
    `find_runs_dir`, also for jobs sent with ssh, whose runs are copied to this machine.
    """
    machine = load_profile(profile or "laptop")
    shared = Path(machine.storage.runs)
    if runs_dir or host or machine.backend == "ssh" or not shared.is_absolute():
        return find_runs_dir(runs_dir)
    return shared


def find_profile(profile: str | None, host: str | None) -> Profile:
    """Return the profile of a job; see `submit`. Raises UserError for an unknown profile or an unreachable host."""
    if profile is None and host:
        from rstar_lab.jobs.ssh.submit import profile_of_host

        return profile_of_host(host)
    return load_profile(profile or "laptop")


def run_preflight(
    recipe: str | Path,
    profile: str,
    overrides: Mapping[str, Any],
    trainer: str,
    log: Callable[[str], None] = print,
    *,
    runs_here: bool = False,
) -> None:
    """Run `rstar-lab preflight` for the trainer that will run. Raises UserError with the failed checks.

    runs_here: the job runs on this machine, so that missing GPUs are a failure.
    """
    rows = preflight_rows(recipe, profile, overrides, trainer)
    for row in rows:
        if row.get("status") == "warn":
            log(f"preflight: {row['check']}: {row['message']}")
    failed = [
        f"{row['check']}: {row['message']}"
        for row in rows
        if row.get("status") == "fail" or (runs_here and row.get("check") == "devices" and row.get("status") == "skip")
    ]
    if failed:
        raise UserError("preflight failed: " + "; ".join(failed))


def _expected_gpus(profile: Profile, trainer: str) -> dict[str, str]:
    """Return the variable that keeps the local trainer from training on a CPU where the profile has GPUs."""
    gpus = profile.hardware.gpus_per_node
    return {EXPECTED_GPUS: str(gpus)} if trainer == "local" and gpus else {}


def trainer_and_action(command: str | None, profile: Profile, overrides: Mapping[str, Any]) -> tuple[str, str]:
    """Return (trainer, action) for a command of `submit`. Raises UserError for an unknown command."""
    trainer, action = ("verl", "run") if command == "verl" else (profile.trainer, command or "run")
    if trainer == "verl" and action == "run" and overrides.get("stages") == []:
        action = "sft"  # verl has one entry point per phase, and this run has no other phase
    if (trainer, action) not in COMMANDS:
        raise UserError(f"command {command!r} is unknown; choose run, train, sft or verl")
    return trainer, action


def read_recipe(recipe: str | Path) -> Any:
    """Return the YAML content of a recipe file or of a shipped recipe; None if there is no such file."""
    path = Path(recipe)
    if not path.is_file():
        path = RECIPES / f"{recipe}.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else None


def recipe_name(recipe: str | Path, overrides: Mapping[str, Any]) -> str:
    """Return the name of the run: the recipe's `name`, else that of its file."""
    if "name" in overrides:
        return str(overrides["name"])
    content = read_recipe(recipe)
    return str((isinstance(content, dict) and content.get("name")) or Path(recipe).stem)


def _check_owner(folder: JobFolder, run_name: str) -> None:
    """Reject a job that would continue a run of another user of a shared runs folder. Raises UserError."""
    runs = folder.path.parent.parent
    # Not the user id: a shared file system may map it.
    own = folder.path.stat().st_uid
    for run_id in (f"{run_name}-sft", f"{run_name}-rl"):
        if (runs / run_id).exists() and (runs / run_id).stat().st_uid != own:
            raise UserError(
                f"run {run_id} in {runs} belongs to {user_name(runs / run_id)}: submit with another --name or --runs-dir"
            )


def _store_recipe(recipe: str | Path, profile: Profile, folder: Path) -> str:
    """Write the recipe with resolved paths into the job's folder; return the path or name for the job's command. A copy
    is needed because the file may change before the job starts, and because nodes may not see its folder. A shipped
    recipe that needs no change is passed by name.
    """
    content = read_recipe(recipe)
    if not isinstance(content, dict):
        return str(recipe)
    resolved = resolve_recipe_paths(content, profile)
    target = folder / f"{Path(recipe).stem}.yaml"
    if resolved != content:
        target.write_text(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
        return str(target)
    if Path(recipe).is_file():
        shutil.copy2(recipe, target)
        return str(target)
    return str(recipe)


def _store_profile(profile: str, folder: Path) -> str:
    if not Path(profile).is_file():
        return profile
    return str(shutil.copy2(profile, folder / f"profile-{Path(profile).name}"))


def _store_secrets(folder: JobFolder, profile: Profile, backend: str, log: Callable[[str], None]) -> None:
    """Write the profile's secret variables to a file that only this user can read.

    Secrets are not passed to Ray or Slurm, where other users could read them. On Kubernetes the pods read a Secret.
    """
    if backend == "kuberay":
        if profile.secrets:
            log(f"{folder.path.name}: reads {', '.join(profile.secrets)} from the Secret {profile.kuberay.secret}")
        return
    forwarded = {variable: os.environ[variable] for variable in profile.secrets if variable in os.environ}
    if backend != "local" and forwarded:
        folder.write(SECRETS_FILE, forwarded, mode=0o600)
        log(f"{folder.path.name}: forwards the secrets {', '.join(forwarded)}")


def _sandbox_workers(recipe: str | Path, overrides: Mapping[str, Any], profile: Profile) -> int:
    """Return the sandbox workers to start on each node; 0 if the recipe names a service, or the profile has none."""
    content = read_recipe(recipe)
    section = (content.get("sandbox") or {}) if isinstance(content, dict) else {}
    url = overrides.get("sandbox.url") or section.get("url") or "local"
    if not profile.sandbox.redis or url != "local":
        return 0
    return profile.sandbox.workers_per_node or profile.hardware.cpus_per_node


def _command(
    trainer: str, action: str, recipe: str, profile: str, overrides: Mapping[str, Any], runs: Path
) -> list[str]:
    module, *arguments = COMMANDS[trainer, action]
    selected = ["--profile", profile] if trainer == "verl" else []
    as_json = [] if module.endswith("verl.sft") else ["--json"]  # verl's SFT prints no progress events
    return ["-m", module, *arguments, recipe, *selected, *set_options(overrides), "--runs-dir", str(runs), *as_json]
