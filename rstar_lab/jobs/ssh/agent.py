"""Answer requests from another machine about the jobs on this machine: `python -m rstar_lab.jobs.ssh.agent RUNS_DIR`.
Standard input has one JSON request per line, standard output one JSON answer per line. The agent ends when its input
ends.
"""

import base64
import fcntl
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, file_errors
from rstar_lab.jobs.job import Job, attach, describe, job_row, list_jobs, submit
from rstar_lab.jobs.progress import progress
from rstar_lab.jobs.ssh.connection import READY
from rstar_lab.jobs.store import check_name, state_folder
from rstar_lab.runs.reader import RunReader, run_folders
from rstar_lab.untrusted.files import open_bytes, read_bytes

LOG_BYTES = 1 << 20  # maximum bytes of a log in one answer


class Operations:
    """The requests that the agent answers. Arguments and results are JSON."""

    def __init__(self, runs: Path):
        self.runs = runs

    def submit(
        self,
        job_id: str,
        recipe: str,
        recipe_text: str | None,
        profile_text: str,
        secrets: dict[str, str],
        **options: Any,
    ) -> dict[str, Any]:
        """Submit a job here. A second request with the same id returns the job of the first.

        recipe_text: content of a recipe file; None for a shipped recipe. options: others of `submit`. Returns the job's row and the
        printed lines.
        """
        check_name(job_id, "id of the job")
        folder = state_folder() / f"received-{job_id}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (self.runs / ".jobs" / job_id / "job.json").exists():
                return {"row": job_row(attach(job_id, runs_dir=self.runs)), "messages": []}
            recipe, profile = _store(folder, recipe, recipe_text, profile_text)
            os.environ.update(secrets)
            messages: list[str] = []
            job = submit(recipe, profile, runs_dir=self.runs, log=messages.append, job_id=job_id, **options)
            return {"row": job_row(job), "messages": messages}

    def jobs(self, ids: list[str] | None = None) -> list[dict[str, Any]]:
        """Return one row per job: `job_row` and its progress."""
        jobs = list_jobs(self.runs) if ids is None else [attach(job_id, runs_dir=self.runs) for job_id in ids]
        return [job_row(job) | {"progress": progress(job.folder.log)} for job in jobs]

    def log(self, job_id: str, offset: int) -> dict[str, Any]:
        """Return up to 1 MiB of the job's log from byte `offset`, and whether the job had ended before it was read."""
        job = attach(job_id, runs_dir=self.runs)
        status = job.status_or_unknown()
        data = b""
        if job.folder.log.exists():
            with open_bytes(job.folder.log) as file:
                file.seek(offset)
                data = file.read(LOG_BYTES)
        return {"data": base64.b64encode(data).decode(), "status": str(status), "exit_code": job.exit_code}

    def stop(self, job_id: str) -> str:
        """End the job and all its processes; return its status."""
        return str(attach(job_id, runs_dir=self.runs).stop())

    def runs_of(self, job_id: str) -> dict[str, str]:
        """Return {run id: state of its files} for the runs that this job writes. The state changes whenever the files
        change."""
        job = attach(job_id, runs_dir=self.runs)
        found = {}
        for folder in run_folders(self.runs) if self.runs.is_dir() else []:
            if _writes(job, RunReader(folder)):
                names = ("run.json", "metrics.jsonl", "rollup.parquet", "tokens.json")
                status = [(folder / name).stat() for name in names if (folder / name).exists()]
                found[folder.name] = ",".join(f"{file.st_mtime_ns}-{file.st_size}" for file in status)
        return found

    def committed(self, run_id: str) -> dict[str, Any]:
        """Return the committed lines of a run's metrics, and its status."""
        folder = self.runs / run_id
        metrics = folder / "metrics.jsonl"
        data = read_bytes(metrics) if metrics.exists() else b""
        lines = base64.b64encode(data[: data.rfind(b"\n") + 1]).decode()
        return {"metrics": lines, "status": RunReader(folder).status}

    def describe(self, recipe: str, recipe_text: str | None, profile_text: str, **options: Any) -> dict[str, Any]:
        """Return the fields of the JobDescription of a job here. options: others of `describe`."""
        with tempfile.TemporaryDirectory() as folder:
            recipe, profile = _store(Path(folder), recipe, recipe_text, profile_text)
            return asdict(describe(recipe, profile, **options))


def _store(folder: Path, recipe: str, recipe_text: str | None, profile_text: str) -> tuple[str, str]:
    """Write the received files into a folder; return the recipe's name or path, and the profile's path."""
    profile = folder / "profile.yaml"
    profile.write_text(profile_text)
    if recipe_text is not None:
        recipe_file = folder / Path(recipe).name
        recipe_file.write_text(recipe_text)
        recipe = str(recipe_file)
    return recipe, str(profile)


def _writes(job: Job, run: RunReader) -> bool:
    """Return whether a run belongs to a job: its name begins with the job's, and it was written since the job began."""
    name = "evaluate" if job.spec.action == "evaluate" else (job.spec.run or "").removesuffix("-rl")
    if run.run_id in (f"{name}-rl", f"{name}-sft"):
        return True
    return bool(name) and run.run_id.startswith(f"{name}-") and str(run.info.get("started")) >= job.spec.created


def main(runs_dir: str) -> None:
    """Answer requests until the input ends."""
    # Redirect other output to stderr: standard output may contain only answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    operations = Operations(Path(runs_dir).expanduser().absolute())
    print(json.dumps({"ready": READY}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            with file_errors(operations.runs):
                answer = {"value": getattr(operations, request["operation"])(**request["arguments"])}
        except Exception as error:
            answer = {"error": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
