"""The job of a rehearsal. It is submitted through the command line and watched through the run store, as a user would do."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import processes_of, run_child
from rstar_lab.jobs.store import JobFolder
from rstar_lab.runs.reader import RunReader

PHASE_TIMEOUT_S = 900.0


class RehearsalJob:
    """Submits the job of a rehearsal, watches its runs, and kills its processes."""

    def __init__(
        self,
        recipe: Path,
        profile: Path,
        runs_dir: Path,
        name: str,
        environment: Mapping[str, str],
        overrides: Mapping[str, Any] | None = None,
    ):
        """environment: additional environment variables of the command that submits the job. overrides: its values of `--set`."""
        self.recipe, self.profile, self.runs_dir, self.name = recipe, profile, runs_dir, name
        self.environment, self.overrides = environment, dict(overrides or {})
        self.id = ""

    @property
    def folder(self) -> Path:
        return self.runs_dir / ".jobs" / self.id

    def submit(self) -> str:
        """Submit the job; submitting it again resumes its run. Returns the job's id."""
        command = [
            sys.executable, "-m", "rstar_lab.cli", "jobs", "submit", str(self.recipe), "--profile", str(self.profile),
            "--runs-dir", str(self.runs_dir), "--no-preflight", "--json",
        ]  # fmt: skip
        for key, value in self.overrides.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        done = run_child(command, env={**os.environ, **self.environment})
        if done.returncode:
            raise UserError(f"jobs submit failed: {done.stderr.strip()[-800:]}")
        self.id = json.loads(done.stdout.splitlines()[-1])["id"]
        return self.id

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the first true value of `condition`. Raises UserError if the job ends first, or at the time limit."""
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        while True:
            # Read before the condition: the condition then sees everything that an ended job did.
            ended = (self.folder / "exit.json").exists()
            if value := condition():
                return value
            if ended:
                raise UserError(f"the job ended before {what}; the end of its log: {self.log_tail()}")
            if time.monotonic() > deadline:
                raise UserError(f"no {what} after {PHASE_TIMEOUT_S:.0f} s; the end of the log: {self.log_tail()}")
            time.sleep(0.3)

    def wait_for_end(self) -> None:
        """Wait until the job has ended. Raises UserError if it failed."""
        self.wait_for((self.folder / "exit.json").exists, "its end")
        code = json.loads((self.folder / "exit.json").read_text())["code"]
        if code != 0:
            raise UserError(f"the job ended with {code}; the end of its log: {self.log_tail()}")

    def log_tail(self) -> str:
        """Return the end of the job's log on one line."""
        path = self.folder / "log.txt"
        text = path.read_text(errors="replace") if path.exists() else "(no log)"
        return " | ".join(text.strip().splitlines()[-12:])[-1500:]

    def stop(self) -> None:
        """Stop the job if it is queued or running."""
        if not self.id or (self.folder / "exit.json").exists():
            return
        command = [sys.executable, "-m", "rstar_lab.cli", "jobs", "stop", self.id, "--runs-dir", str(self.runs_dir)]
        done = run_child(command)
        if done.returncode:
            raise UserError(f"jobs stop {self.id} failed: {done.stderr.strip()[-800:]}")

    # Run store

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / f"{self.name}-rl"

    def status(self, run: str) -> str | None:
        """Return the status of a run, or None before it exists."""
        with contextlib.suppress(Exception):  # the file may be replaced at this moment
            return str(RunReader(self.runs_dir / run).status)
        return None

    def lines(self, stage: str) -> list[dict[str, Any]]:
        """Return the metrics of the steps of a stage."""
        if not (self.run_dir / "metrics.jsonl").exists():
            return []
        with contextlib.suppress(Exception):
            return [line for line in RunReader(self.run_dir).metrics() if line["stage"] == stage]
        return []

    def last_checkpoint(self) -> int:
        """Return the step of the newest checkpoint, or 0 if there is none."""
        with contextlib.suppress(Exception):
            return max(RunReader(self.run_dir).checkpoints(), default=0)
        return 0

    @property
    def attempts(self) -> int:
        return int(RunReader(self.run_dir).info.get("attempts") or 1)

    # Kills

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor of the job and all processes that it started."""
        supervisor = JobFolder(self.folder).spec().handle["pid"]
        return [psutil.Process(supervisor), *processes_of(self.id, root=supervisor)]

    def kill_worker(self, pattern: str, candidates: Callable[[], list[psutil.Process]]) -> str:
        """Kill one of the candidates whose command line matches `pattern` with SIGKILL. Returns its command line."""

        def find() -> list[psutil.Process]:
            matches = []
            for process in candidates():
                with contextlib.suppress(psutil.Error):
                    if re.search(pattern, " ".join(process.cmdline())):
                        matches.append(process)
            return matches

        victim = self.wait_for(find, f"process {pattern}")[0]
        title = " ".join(victim.cmdline()).strip()[:80]
        victim.send_signal(signal.SIGKILL)
        return title

    def kill(self) -> int:
        """Kill the supervisor and all processes of the job at once with SIGKILL. Returns their number."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        return len(processes)
