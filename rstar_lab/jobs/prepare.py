"""Write the folder of a job: recipe, profile, code, secrets and command."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rstar_lab.common.errors import UserError, file_errors
from rstar_lab.hardware.profiles import EXPECTED_GPUS, Profile, resolve_recipe_paths
from rstar_lab.jobs.pack import pack, tree_root
from rstar_lab.jobs.preflight import run_preflight, set_options
from rstar_lab.jobs.store import JobFolder, JobSpec, user_name, write_exports
from rstar_lab.untrusted.files import parse_yaml, read_text

RECIPES = Path(__file__).parent.parent / "recipes"
# The module and arguments of each command, for both trainers.
COMMANDS = {
    **{("local", action): ["rstar_lab.cli", action] for action in ("run", "train", "sft", "evaluate")},
    ("verl", "run"): ["rstar_lab.rl.verl.train"],
    ("verl", "train"): ["rstar_lab.rl.verl.train"],
    ("verl", "sft"): ["rstar_lab.rl.verl.train", "--sft"],
}


@dataclass(frozen=True)
class Submission:
    """What `submit` was asked for; see there. profile: None for the default of the backend. machine: the profile's content."""

    recipe: str | Path
    profile: str | None
    machine: Profile
    overrides: dict[str, Any]
    run_name: str
    job_id: str
    command: str | None = None
    runs_dir: str | Path | None = None
    address: str | None = None
    host: str | None = None
    preflight: bool = True
    log: Callable[[str], None] = print
    grid: str | None = None
    arguments: Sequence[str] = ()

    @property
    def node_profile(self) -> Profile:
        """The profile, with one node for an evaluation, which uses the engines of one node."""
        if self.command != "evaluate":
            return self.machine
        return self.machine.model_copy(update={"hardware": self.machine.hardware.model_copy(update={"nodes": 1})})

    def trainer_and_action(self) -> tuple[str, str]:
        """Return (trainer, action) for the command. Raises UserError for an unknown or incomplete one."""
        trainer, action = ("verl", "run") if self.command == "verl" else (self.machine.trainer, self.command or "run")
        if action == "evaluate":
            trainer = "local"  # with the engines of the node, whatever trains
            if "--problems" not in self.arguments or self.arguments[0].startswith("-"):
                raise UserError(
                    "command evaluate: give models and --problems, as in `rstar-lab jobs evaluate MODEL --problems SET`"
                )
        if trainer == "verl" and action == "run" and self.overrides.get("stages") == []:
            action = "sft"  # verl has one entry point per phase, and this run has no other phase
        if (trainer, action) not in COMMANDS:
            raise UserError(f"command {self.command!r} is unknown; choose run, train, sft or verl, or evaluate")
        return trainer, action


def plan_job(job: Submission, backend: str) -> tuple[JobSpec, dict[str, str]]:
    """Return what the job runs, and the files of its folder by name. Writes nothing. Raises UserError for an unknown command."""
    overrides, machine = job.overrides, job.node_profile
    trainer, action = job.trainer_and_action()
    runs = Path(job.runs_dir or machine.storage.runs).absolute()
    folder, root, cwd = JobFolder.of(runs, job.job_id).path, tree_root(), Path.cwd()
    files: dict[str, str] = {}

    def stored(name: str, text: str) -> str:
        files[name] = text
        return str(folder / name)

    content = read_recipe(job.recipe)
    recipe_argument = str(job.recipe)
    # A copy is needed because the file may change before the job starts, and because nodes may not see its folder. A shipped
    # recipe that needs no change is passed by name.
    if isinstance(content, dict) and (resolved := resolve_recipe_paths(content, machine)) != content:
        text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
        recipe_argument = stored(f"{Path(job.recipe).stem}.yaml", text)
    elif Path(job.recipe).is_file():
        recipe_argument = stored(f"{Path(job.recipe).stem}.yaml", Path(job.recipe).read_text())
    profile = job.profile or "laptop"
    if machine != job.machine:
        text = yaml.safe_dump(machine.model_dump(mode="json"), sort_keys=False)
        profile = stored("profile-one-node.yaml", text)
    elif Path(profile).is_file():
        profile = stored(f"profile-{Path(profile).name}", Path(profile).read_text())
    environment = dict(machine.env)
    if trainer == "local" and machine.hardware.gpus_per_node:
        environment[EXPECTED_GPUS] = str(machine.hardware.gpus_per_node)
    if backend != "local":
        # The same folder of the tree, in which a recipe's own modules are.
        cwd = folder / "code" / (cwd.relative_to(root) if cwd.is_relative_to(root) else Path())
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{folder}/code", environment.get("PYTHONPATH"))))
    keys = resolve_recipe_paths(overrides, machine)
    sandbox_workers = _sandbox_workers(content, overrides, machine)
    if backend == "kuberay" and sandbox_workers:
        # Pods with GPUs lack the rights that the sandbox requires, so the sandbox runs in a separate Deployment.
        sandbox_workers, keys["sandbox.url"] = 0, machine.kuberay.sandbox_url
    in_image = backend != "local" and machine.container is not None
    module, *arguments = COMMANDS[trainer, action]
    arguments += [*job.arguments, "--recipe", recipe_argument] if action == "evaluate" else [recipe_argument]
    arguments += ["--profile", profile] if trainer == "verl" else []
    arguments += [*set_options(keys), "--runs-dir", str(runs), "--json"]
    handle = {"address": job.address, "token_path": os.environ.get("RAY_AUTH_TOKEN_PATH")} if backend == "ray" else {}
    spec = JobSpec(
        id=job.job_id, recipe=str(job.recipe), profile=profile, backend=backend,
        command=["python3" if in_image else sys.executable, "-m", module, *arguments], cwd=str(cwd), runs_dir=str(runs),
        overrides=overrides, run=None if action == "evaluate" else f"{job.run_name}-rl", environment=environment, handle=handle,
        sandbox_workers=sandbox_workers, action=job.command, grid=job.grid,
    )  # fmt: skip
    return spec, files


def write_job(job: Submission, backend: str, start: Callable[[JobFolder, JobSpec], dict[str, Any]]) -> JobFolder:
    """Check a job, write its folder, and start it with `start`, which returns its handle. Raises UserError, and leaves no folder,
    if a check or the start fails."""
    spec, files = plan_job(job, backend)
    trainer, action = job.trainer_and_action()
    if job.preflight and action != "evaluate":  # its recipe has no model
        run_preflight(
            job.recipe, job.profile or "laptop", job.overrides, trainer, job.log, runs_here=backend == "local"
        )
    folder = JobFolder.of(Path(spec.runs_dir), spec.id)
    folder.create()
    with file_errors(folder.path), contextlib.ExitStack() as stack:
        stack.callback(folder.delete)  # if the job does not start
        _check_owner(folder, job.run_name)
        for name, text in files.items():
            (folder.path / name).write_text(text)
        if backend != "local":
            job.log(f"{spec.id}: sends {pack(tree_root(), folder.path / 'code')} to {backend}")
            Path(spec.cwd).mkdir(parents=True, exist_ok=True)  # a folder without files that git tracks
        _store_secrets(folder, job.machine, backend, job.log)
        folder.save(spec)
        handle = start(folder, spec)
        stack.pop_all()
    folder.save(replace(spec, handle={**spec.handle, **handle}))
    return folder


def override_pairs(items: Iterable[str], option: str) -> dict[str, str]:
    """Return texts KEY=VALUE by key. option: where they were given, for the error. Raises UserError for another text."""
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"{option} {item}: expected key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def read_recipe(recipe: str | Path) -> Any:
    """Return the YAML content of a recipe file or of a shipped recipe; None if there is no such file."""
    path = Path(recipe)
    if not path.is_file():
        path = RECIPES / f"{recipe}.yaml"
    return parse_yaml(read_text(path), path) if path.is_file() else None


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
        write_exports(folder.secrets, forwarded)
        log(f"{folder.path.name}: forwards the secrets {', '.join(forwarded)}")


def _sandbox_workers(content: Any, overrides: Mapping[str, Any], profile: Profile) -> int:
    """Return the sandbox workers to start on each node; 0 if the recipe names a service, or the profile has none."""
    section = (content.get("sandbox") or {}) if isinstance(content, dict) else {}
    url = overrides.get("sandbox.url") or section.get("url") or "local"
    if not profile.sandbox.redis or url != "local":
        return 0
    return profile.sandbox.workers_per_node or profile.hardware.cpus_per_node
