"""Jobs on a real Slurm: munge, a controller and two nodes on this machine. Part of `make test-all`."""

import dataclasses
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers.slurm_cluster import slurm_cluster

from rstar_lab.jobs import JobStatus, slurm
from rstar_lab.jobs.job import Job
from rstar_lab.jobs.store import JobFolder, JobSpec, write_exports

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield folder


@pytest.fixture
def profile(tmp_path):
    """A profile with one node of one CPU."""
    import yaml

    content = yaml.safe_load((ROOT / "cluster/profiles/laptop.yaml").read_text())
    content |= {"name": "test", "backend": "slurm", "slurm": {"time": "00:20:00"}}
    content["hardware"] |= {"nodes": 1, "cpus_per_node": 1}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start_job(tmp_path, profile, code, **options):
    job = prepare_job(tmp_path, profile, code, **options)
    job.folder.save(dataclasses.replace(job.spec, handle=slurm.Slurm().start(job.folder, job.spec)))
    return Job(job.folder)


def prepare_job(tmp_path, profile, code, *, job_id, secrets=None, sandbox_workers=0, **environment):
    folder = JobFolder.of(tmp_path, job_id)
    spec = JobSpec(
        id=job_id, recipe="toy", profile=str(profile), backend="slurm",
        command=[sys.executable, "-c", textwrap.dedent(code)], cwd=str(folder.path / "code"), runs_dir=str(tmp_path),
        overrides={}, created="2026-01-01T00:00:00", environment=environment, sandbox_workers=sandbox_workers,
        handle={},
    )  # fmt: skip
    folder.save(spec)
    shutil.copytree(
        ROOT / "rstar_lab", folder.path / "code" / "rstar_lab", ignore=shutil.ignore_patterns("__pycache__")
    )
    if secrets:
        write_exports(folder.secrets, secrets)
    return Job(folder)


def test_a_slurm_job_gets_environment_and_secrets_and_leaks_none(cluster, tmp_path, profile):
    code = "import os; print(os.environ['COLOUR'], os.environ['WANDB_API_KEY'], os.environ['SLURM_JOB_ID'])"
    job = start_job(tmp_path, profile, code, job_id="s1", secrets={"WANDB_API_KEY": "abc123secret"}, COLOUR="red blue")
    assert job.wait(timeout_s=600) == JobStatus.FINISHED, job.logs() + str(slurm.Slurm().logs(job.folder, job.spec))
    assert "red blue *** " in job.logs()
    visible = "".join(path.read_text(errors="replace") for path in job.folder.path.iterdir() if path.is_file())
    visible += subprocess.run(
        ["scontrol", "show", "job", job.spec.handle["slurm_id"]], capture_output=True, text=True
    ).stdout
    assert "abc123secret" not in visible


def test_a_slurm_job_is_stopped_and_a_failing_one_has_status_failed(cluster, tmp_path, profile):
    job = start_job(tmp_path, profile, "import time; print('begun', flush=True); time.sleep(900)", job_id="s2")
    deadline = time.monotonic() + 300
    while "begun" not in job.logs():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert job.status() == JobStatus.RUNNING
    assert job.stop() == JobStatus.STOPPED
    failing = start_job(tmp_path, profile, "raise SystemExit(4)", job_id="s3")
    assert failing.wait(timeout_s=300) == JobStatus.FAILED
    assert failing.exit_code == 4


def test_the_script_starts_ray_on_the_allocation(cluster, tmp_path, profile):
    code = """
        import os, ray
        ray.init(log_to_driver=False)
        print('nodes', sum(n['Alive'] for n in ray.nodes()))
        there = ray.remote(lambda: len(os.environ.get('WANDB_API_KEY', ''))).remote()
        print('a worker sees a secret of', ray.get(there), 'letters')
    """
    job = start_job(
        tmp_path, profile, code, job_id="s4", secrets={"WANDB_API_KEY": "abc123secret"}, RSTAR_LAB_ALWAYS_RAY="1",
        RAY_raylet_start_wait_time_s="300", RAY_worker_niceness="0",
    )  # fmt: skip
    assert job.wait(timeout_s=1200) == JobStatus.FINISHED, job.logs() + str(slurm.Slurm().logs(job.folder, job.spec))
    assert "nodes 1" in job.logs()
    assert "a worker sees a secret of 12 letters" in job.logs()


def test_a_job_is_requeued_before_its_wall_time_and_continues(cluster, tmp_path, profile):
    import yaml

    content = yaml.safe_load(profile.read_text())
    # Slurm checks the remaining time every minute, so the signal comes within the first minute.
    content["slurm"] |= {"time": "00:02:00", "requeue_before_s": 110}
    profile.write_text(yaml.safe_dump(content))
    code = f"""
        import os, pathlib, time
        path = pathlib.Path({str(tmp_path)!r}) / "steps"
        first = int(path.read_text()) if path.exists() else 0
        print("starts at step", first, "with a secret of", len(os.environ["WANDB_API_KEY"]), flush=True)
        for step in range(first, first + 3 if first else 600):  # the first start lasts until the signal
            time.sleep(1)
            path.with_name("next").write_text(str(step + 1))
            path.with_name("next").replace(path)
        print("all steps done")
    """
    job = start_job(tmp_path, profile, code, job_id="s5", secrets={"WANDB_API_KEY": "abc123secret"})
    assert job.wait(timeout_s=1500) == JobStatus.FINISHED, job.logs() + str(slurm.Slurm().logs(job.folder, job.spec))
    starts = [int(line.split()[3]) for line in job.logs().splitlines() if line.startswith("starts at step")]
    assert len(starts) >= 2 and starts[0] == 0 < starts[1], "the second start continues"
    assert "with a secret of 12" in job.logs().splitlines()[-2]
    assert "requeueing job" in (slurm.Slurm().logs(job.folder, job.spec) or "")
    assert not job.folder.secrets.exists()


@pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed")
def test_a_slurm_job_runs_its_calls_on_workers_of_its_own_sandbox(cluster, tmp_path, profile):
    code = """
        import asyncio, sys
        from rstar_lab.sandbox import SandboxClient
        url = sys.argv[-1].removeprefix("sandbox.url=")
        async def main():
            async with SandboxClient(url, deadline_s=60) as sandbox:
                print("answer", (await sandbox.run("print(6 * 7)")).stdout.strip())
        asyncio.run(main())
    """
    job = start_job(tmp_path, profile, code, job_id="s6", sandbox_workers=1)
    assert job.wait(timeout_s=600) == JobStatus.FINISHED, job.logs() + str(slurm.Slurm().logs(job.folder, job.spec))
    assert "answer 42" in job.logs()
    deadline = time.monotonic() + 60  # the batch script ends the service after the run
    while (job.folder.path / "sandbox.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.5)
