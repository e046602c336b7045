"""Send a recipe away to train, and find it again: from this notebook, another, or after a restart."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from rstar_lab.errors import UserError
from rstar_lab.jobs import local
from rstar_lab.jobs.pack import pack, tree_root
from rstar_lab.jobs.secrets import refuse_secrets
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.jobs.supervisor import SECRETS_FILE
from rstar_lab.profiles import load_profile


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        return self in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED)


class Job:
    """A submitted job. It lives on its own: this object only looks at it, and may be made again by `attach`."""

    def __init__(self, folder: JobFolder):
        self.folder = folder
        self.spec = folder.spec()
        self.id = self.spec.id

    def __repr__(self) -> str:
        return f"Job({self.id!r}, recipe={self.spec.recipe!r}, backend={self.spec.backend!r}, status={self.status()!s})"

    def status(self) -> JobStatus:
        """Where the job stands; asks the backend while the job has not said how it ended."""
        if (ended := self._exit()) is None:
            state = _backend(self.spec.backend).state(self.folder, self.spec)
            # The job may have ended between the two looks.
            ended = self._exit()
            if ended is None:
                return JobStatus(state)
        if ended["stopped"]:
            return JobStatus.STOPPED
        return JobStatus.FINISHED if ended["code"] == 0 else JobStatus.FAILED

    @property
    def exit_code(self) -> int | None:
        return (self._exit() or {}).get("code")

    def logs(self, tail: int | None = None) -> str:
        """What the job printed so far, or its last `tail` lines."""
        try:
            text = self.folder.log.read_text(errors="replace")
        except FileNotFoundError:
            text = _backend(self.spec.backend).logs(self.folder, self.spec) or ""
        return text if tail is None else "".join(text.splitlines(keepends=True)[-tail:])

    def follow(self, *, every_s: float = 0.5, timeout_s: float | None = None) -> Iterator[str]:
        """Yield the job's lines as they come, from the first to the last.

        Raises TimeoutError after `timeout_s`; the job goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen = 0
        while True:
            ended = self.status().ended
            lines = self.logs().splitlines(keepends=True)
            whole = lines if ended or not lines or lines[-1].endswith("\n") else lines[:-1]
            yield from (line.rstrip("\n") for line in whole[seen:])
            seen = len(whole)
            if ended:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {self.id} is still {self.status()} after {timeout_s} s")
            time.sleep(every_s)

    def watch(self, *, timeout_s: float | None = None) -> JobStatus:
        """Print how far the job is until it ends; an interrupt ends the watching, not the job. `follow` has every line."""
        tenth = None
        try:
            for line in self.follow(timeout_s=timeout_s):
                event = _event(line)
                if event is None:
                    print(line, flush=True)
                elif "done" in event and tenth != (
                    tenth := (event["event"], 10 * event["done"] // (event["total"] or 1))
                ):
                    print(_progress(event), flush=True)
        except KeyboardInterrupt:
            print(f"\n{self.id} goes on: attach({self.id!r}) finds it again", flush=True)
        return self.status()

    def wait(self, *, timeout_s: float | None = None) -> JobStatus:
        """Wait for the end without a word. Raises TimeoutError; the job goes on."""
        for _ in self.follow(timeout_s=timeout_s):
            pass
        return self.status()

    def stop(self) -> JobStatus:
        """End the job and every process it started; does nothing to one that has ended.

        One whose supervisor was killed counts as failed, but its processes may live: they are ended too.
        """
        if self._exit() is None:
            _backend(self.spec.backend).stop(self.folder, self.spec)
            if self._exit() is None:
                self.folder.write("exit.json", {"code": None, "stopped": True, "ended": time.time()})
        return self.status()

    @property
    def run_dir(self) -> Path | None:
        """The run's folder in the run store, or None until the run has begun."""
        runs = Path(self.spec.runs_dir)
        found = [runs / name for name in (self.spec.run, (self.spec.run or "").replace("-rl", "-sft")) if name]
        return next((path for path in found if (path / "run.json").exists()), None)

    def _exit(self) -> dict[str, Any] | None:
        return self.folder.read("exit.json")


def _event(line: str) -> dict[str, Any] | None:
    """What a line for programs says; None where it is one for people."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _progress(event: Mapping[str, Any]) -> str:
    shares = {"reward": "pass", "error_rate": "tool errors"}
    said = [f"{name} {event[key]:.0%}" for key, name in shares.items() if event.get(key) is not None]
    if event.get("loss") is not None and not said:
        said = [f"loss {event['loss']:.3f}"]
    return f"{event['event']} {event['done']}/{event['total']}  {' · '.join(said)}".rstrip()


def submit(
    recipe: str | Path,
    profile: str = "laptop",
    overrides: Mapping[str, Any] | None = None,
    *,
    command: str | None = None,
    runs_dir: str | Path | None = None,
    name: str | None = None,
    backend: str | None = None,
    address: str | None = None,
    preflight: bool = True,
    say: Callable[[str], None] = print,
) -> Job:
    """Run `recipe` on the hardware of `profile`, detached.

    overrides: recipe keys ("rl.lr": 1e-5), as --set takes them. command: "run" (this package's trainer) or "verl";
    default what the profile says. backend: local, ray or slurm; default the profile's. address: of Ray's dashboard.
    runs_dir: default the profile's, which every node must see. name: of the recipe in this run, and so of the run's folder.
    say: is told what is sent.
    Raises UserError for an unknown profile, a secret among the overrides, or a failed preflight.
    """
    chosen = load_profile(profile)
    overrides = dict(overrides or {}) | ({"name": name} if name else {})
    refuse_secrets(overrides)
    runs = Path(runs_dir or chosen.storage.runs).absolute()
    where = backend or chosen.backend
    starter = _backend(where)
    root = tree_root()
    path = Path(recipe).absolute() if Path(recipe).is_file() else None
    run_name = _recipe_name(recipe, path, overrides)
    job_id = f"{run_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = JobFolder.of(runs, job_id)
    if preflight:
        run_preflight(str(path or recipe), profile, overrides, command or chosen.trainer, say)
    folder.path.mkdir(parents=True)
    # The recipe as it is now: the file may change before the job starts, and no node may see where it lies.
    asked = str(recipe)
    if path:
        asked = str(folder.path / path.name)
        shutil.copy2(path, asked)
    cwd = Path.cwd()
    if where != "local":
        cwd = folder.path / "code"
        say(f"{job_id}: sends {pack(root, cwd)} to {where}")
    handed_on = {variable: os.environ[variable] for variable in chosen.secrets if variable in os.environ}
    if where != "local" and handed_on:
        # By a file that only this user can read and that the job deletes: what Ray or Slurm are told, others can look up.
        folder.write(SECRETS_FILE, handed_on, mode=0o600)
        say(f"{job_id}: hands on {', '.join(handed_on)}, unseen")
    spec = JobSpec(
        id=job_id,
        recipe=str(recipe),
        profile=profile,
        backend=where,
        command=_command(command or _COMMANDS[chosen.trainer], asked, profile, overrides, runs),
        cwd=str(cwd),
        runs_dir=str(runs),
        overrides=overrides,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        run=f"{run_name}-rl",
        environment=dict(chosen.env),
        handle={"address": address, "token_path": os.environ.get("RAY_AUTH_TOKEN_PATH")} if where == "ray" else {},
    )
    folder.save(spec)
    handle = starter.start(folder, spec)
    folder.save(replace(spec, handle={**spec.handle, **handle}))
    return Job(folder)


_COMMANDS = {"local": "run", "verl": "verl"}


def run_preflight(
    recipe: str, profile: str, overrides: Mapping[str, Any], trainer: str, say: Callable[[str], None]
) -> None:
    """`rstar-lab preflight`, in a process of its own. Raises UserError with what failed."""
    sets = _sets(overrides)
    command = [sys.executable, "-m", "rstar_lab.cli", "preflight", recipe, "--profile", profile, *sets, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        if row.get("status") == "warn":
            say(f"preflight: {row['check']}: {row['message']}")
    if done.returncode:
        failed = [f"{row['check']}: {row['message']}" for row in rows if row.get("status") == "fail"]
        raise UserError("preflight failed: " + ("; ".join(failed) or done.stderr.strip()[-800:]))


def attach(job_id: str, *, runs_dir: str | Path = "runs") -> Job:
    """The job of that id, started by whomever. Raises UserError where there is none."""
    return Job(JobFolder.of(Path(runs_dir).absolute(), job_id))


def list_jobs(runs_dir: str | Path = "runs") -> list[Job]:
    """All jobs of a runs folder, oldest first."""
    folders = (path.parent for path in (Path(runs_dir).absolute() / ".jobs").glob("*/job.json"))
    return sorted((Job(JobFolder(path)) for path in folders), key=lambda job: (job.spec.created, job.id))


def _recipe_name(recipe: str | Path, path: Path | None, overrides: Mapping[str, Any]) -> str:
    """What the run's folder is named after: the recipe's `name`, else its file."""
    if "name" in overrides:
        return str(overrides["name"])
    content = yaml.safe_load(path.read_text()) if path else None
    return str((isinstance(content, dict) and content.get("name")) or Path(recipe).stem)


def _command(command: str, recipe: str, profile: str, overrides: Mapping[str, Any], runs: Path) -> list[str]:
    sets = _sets(overrides)
    if command == "verl":
        start = ["-m", "rstar_lab.rl.verl.train", recipe, "--profile", profile]
    else:
        start = ["-m", "rstar_lab.cli", command, recipe]
    return [sys.executable, *start, *sets, "--runs-dir", str(runs), "--json"]


def _sets(overrides: Mapping[str, Any]) -> list[str]:
    return [part for key, value in overrides.items() for part in ("--set", f"{key}={_literal(value)}")]


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _backend(name: str) -> ModuleType:
    if name == "local":
        return local
    if name == "ray":
        from rstar_lab.jobs import ray_jobs

        return ray_jobs
    if name == "slurm":
        from rstar_lab.jobs import slurm

        return slurm
    raise UserError(f"backend {name!r}: known are local, ray, slurm")
