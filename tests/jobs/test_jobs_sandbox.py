"""The sandbox service that a job starts: real Redis, real workers; the run's calls go there."""

import shutil
import stat
import textwrap

import pytest
from helpers.jobs import job_spec

from rstar_lab.jobs import JobStatus
from rstar_lab.jobs.job import Job
from rstar_lab.jobs.local import Local
from rstar_lab.jobs.sandbox_service import ADDRESS_FILE
from rstar_lab.jobs.store import JobFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed"),
]
CALL = """
    import asyncio, os, sys
    from rstar_lab.sandbox import SandboxClient
    option, url = sys.argv[1:]
    assert option == "--set" and url.startswith("sandbox.url=http://"), sys.argv
    async def main():
        async with SandboxClient(url.removeprefix("sandbox.url="), deadline_s=60) as sandbox:
            print("answer", (await sandbox.run("print(6 * 7)")).stdout.strip())
    asyncio.run(main())
"""


def start_job(tmp_path, code: str, **environment: str) -> Job:
    folder = JobFolder.of(tmp_path, "box-1")
    spec = job_spec(tmp_path, "box-1", code=code, environment=environment, sandbox_workers=1)
    folder.save(spec)
    Local().start(folder, spec)
    return Job(folder)


def test_calls_of_the_run_go_to_the_jobs_own_service(tmp_path):
    look = """
    import stat, pathlib
    path = pathlib.Path(".jobs/box-1/sandbox.json")
    print("mode", oct(stat.S_IMODE(path.stat().st_mode)))
    """
    job = start_job(tmp_path, textwrap.dedent(CALL) + textwrap.dedent(look))
    assert job.wait(timeout_s=300) == JobStatus.FINISHED, job.logs()
    assert "answer 42" in job.logs()
    assert f"mode {stat.S_IRUSR | stat.S_IWUSR:#o}".replace("0o", "0o") in job.logs()
    assert not (job.folder.path / ADDRESS_FILE).exists(), "it holds the password of Redis"
    assert "redis://" not in job.logs() or "***" in job.logs()


def test_a_job_fails_if_its_sandbox_service_cannot_start(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    job = start_job(tmp_path, "print('the run started')", PATH=str(empty))
    assert job.wait(timeout_s=300) == JobStatus.FAILED
    assert "redis-server is not installed" in job.logs()
    assert "the run started" not in job.logs()
