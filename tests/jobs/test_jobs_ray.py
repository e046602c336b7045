"""Jobs on a real Ray cluster of two raylets on this machine, with token authentication."""

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from helpers.jobs import job_spec, until

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.jobs import JobStatus, attach, ray_jobs
from rstar_lab.jobs.board import JobBoard
from rstar_lab.jobs.job import Job
from rstar_lab.jobs.store import JobFolder, write_exports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent.parent


# Runs a command without a container, in the environment that podman would give it. Ray calls podman first to find its
# worker in the image, then for each worker.
PODMAN = """#!{python}
import os, sys
words = sys.argv[1:]
if words[1] == "--rm":
    import ray._private.workers.default_worker as worker
    with open(words[3].split(":")[0] + "/worker_path.txt", "w") as file:
        file.write(worker.__file__)
    sys.exit()
with open({log!r}, "a") as file:
    print(*words, file=file)
for number, word in enumerate(words):
    if word == "--env":
        name, _, value = words[number + 1].partition("=")
        os.environ[name] = value
image = words.index("--entrypoint") + 2
os.environ["IMAGE"] = words[image]
os.execv({python!r}, [{python!r}, *words[image + 1 :]])
"""


@pytest.fixture(scope="module")
def podman_log(tmp_path_factory):
    """The file in which the program `podman` on the PATH of the cluster writes its arguments."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "podman").write_text(PODMAN.format(python=sys.executable, log=str(folder / "log.txt")))
    (folder / "podman").chmod(0o755)
    return folder / "log.txt"


@pytest.fixture(scope="module")
def cluster(podman_log):
    before = dict(os.environ)
    os.environ["PATH"] = f"{podman_log.parent}:{before['PATH']}"
    with LocalRay(nodes=2, cpus=1) as ray:
        yield ray
    for name in ("PATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None) if name not in before else os.environ.update({name: before[name]})


def start_job(cluster, tmp_path, code, *, job_id, secrets=None, profile="laptop") -> Job:
    folder = JobFolder.of(tmp_path, job_id)
    spec = job_spec(
        tmp_path, job_id, code=code, profile=profile, backend="ray", cwd=str(folder.path / "code"),
        environment={"COLOUR": "red", "PYTHONPATH": str(ROOT)},
        handle={"address": cluster.address, "token_path": cluster.environment["RAY_AUTH_TOKEN_PATH"]},
    )  # fmt: skip
    folder.save(spec)
    (folder.path / "code").mkdir()
    (folder.path / "code" / "sent.txt").write_text("sent along")
    if secrets:
        write_exports(folder.secrets, secrets)
    ray_jobs.Ray().start(folder, spec)
    return Job(folder)


def test_a_ray_job_gets_files_environment_and_secrets_and_leaks_none(cluster, tmp_path):
    code = """
        import os, ray
        print(open("sent.txt").read(), os.environ["COLOUR"], os.environ["WANDB_API_KEY"])
        ray.init(log_to_driver=False, runtime_env={"env_vars": {"COLOUR": "red"}})  # as the trainer does
        print("nodes", len([node for node in ray.nodes() if node["Alive"]]))
    """
    job = start_job(cluster, tmp_path, code, job_id="ray-1", secrets={"WANDB_API_KEY": "abc123secret"})
    assert job.wait(timeout_s=900) == JobStatus.FINISHED, job.logs()
    assert "sent along red ***" in job.logs()
    assert "nodes 2" in job.logs()
    client = ray_jobs._client(job.spec)
    visible = client.get_job_logs(job.id) + repr(client.get_job_info(job.id))
    visible += "".join(path.read_text() for path in job.folder.path.iterdir() if path.is_file())
    assert "abc123secret" not in visible
    assert not job.folder.secrets.exists(), "deleted when the job has ended"


def test_a_ray_job_is_found_again_and_stopped(cluster, tmp_path):
    start_job(cluster, tmp_path, "import time; print('begun', flush=True); time.sleep(600)", job_id="ray-2")
    job = attach("ray-2", runs_dir=tmp_path)
    until(lambda: "begun" in job.logs(), 600)
    assert job.status() == JobStatus.RUNNING
    assert job.stop() == JobStatus.STOPPED


def test_a_failing_ray_job_has_status_failed(cluster, tmp_path):
    job = start_job(cluster, tmp_path, "raise SystemExit(3)", job_id="ray-3")
    assert job.wait(timeout_s=900) == JobStatus.FAILED
    assert job.exit_code == 3


def test_a_board_reads_the_states_of_all_ray_jobs_with_one_request(cluster, tmp_path, monkeypatch):
    for number in (5, 6):
        start_job(cluster, tmp_path, "import time; time.sleep(600)", job_id=f"ray-{number}")
    clients = []
    connect = ray_jobs._client
    monkeypatch.setattr(ray_jobs, "_client", lambda spec: clients.append(spec.id) or connect(spec))
    monkeypatch.setattr(ray_jobs, "_states", {})
    assert {row.status for row in JobBoard(tmp_path).rows()} <= {"queued", "running"}
    assert len(clients) == 1
    for number in (5, 6):
        assert attach(f"ray-{number}", runs_dir=tmp_path).stop() == JobStatus.STOPPED


def test_a_ray_job_runs_in_the_container_of_the_profile(cluster, podman_log, tmp_path):
    profile = yaml.safe_load((ROOT / "cluster/profiles/laptop.yaml").read_text()) | {
        "container": "registry/rstar-lab:1"
    }
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    code = "import os; print(open('sent.txt').read(), 'in', os.environ['IMAGE'])"
    job = start_job(cluster, tmp_path, code, job_id="ray-4", profile=str(tmp_path / "profile.yaml"))
    assert job.wait(timeout_s=300) == JobStatus.FINISHED, job.logs()
    assert "sent along in registry/rstar-lab:1" in job.logs()
    assert f"--volume={tmp_path}:{tmp_path} " in podman_log.read_text()


def test_requests_without_the_token_are_rejected(cluster, tmp_path, monkeypatch):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{cluster.address}/api/jobs/", timeout=30)
    spec = job_spec(tmp_path, "x", backend="ray", handle={"address": "http://127.0.0.1:9"})
    with pytest.raises(UserError, match=r"no Ray job API at http://127\.0\.0\.1:9"):
        ray_jobs._client(spec)
