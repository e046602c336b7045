"""Jobs on Kubernetes: the real client, an API server in this process, and the real supervisor as entry point."""

import json
import socket
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.kubernetes_api import KubernetesApi
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.jobs import JobStatus, attach, kuberay, list_jobs, submit
from rstar_lab.jobs.store import JobSpec

ROOT = Path(__file__).parents[2]
SECRET = "abc123-secret-of-the-test"


@pytest.fixture
def api(tmp_path, monkeypatch):
    (tmp_path / "api").mkdir()
    api = KubernetesApi(tmp_path / "api")
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig())
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield api
    api.close()


@pytest.fixture
def profile(tmp_path):
    """A profile whose volume is `tmp_path/shared`."""

    def write(**settings):
        content = yaml.safe_load((ROOT / "cluster/profiles/h100x8.yaml").read_text())
        content["storage"] = {name: str(tmp_path / "shared" / name) for name in ("runs", "models", "data")}
        content |= {"backend": "kuberay", "kuberay": {"mount": str(tmp_path / "shared")} | settings}
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


@pytest.fixture
def sent(profile, tmp_path, monkeypatch):
    """Submit a recipe from a small working tree; returns the job."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "code.py").touch()
    monkeypatch.chdir(tmp_path / "tree")

    def run(**keywords):
        return submit("tiny", profile(**keywords), preflight=False, log=lambda line: None)

    return run


def run_code(api, profile, monkeypatch, code):
    """Submit a job that runs `code` under the supervisor of this tree."""
    monkeypatch.chdir(ROOT)
    api.run = True
    with monkeypatch.context() as patch:
        patch.setattr(kuberay.KubeRay, "start", lambda self, folder, spec: {})
        job = submit("tiny", profile(), preflight=False, log=lambda line: None)
    spec = replace(job.spec, command=["python3", "-c", textwrap.dedent(code)])
    job.folder.save(spec)
    job.folder.save(replace(spec, handle=kuberay.KubeRay().start(job.folder, spec)))
    return attach(job.id, runs_dir=spec.runs_dir)


def until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.1)


def cli(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["jobs", *arguments])


@pytest.mark.slow
def test_a_job_runs_with_files_environment_and_secret_and_leaks_nothing(api, profile, monkeypatch):
    api.secrets = {"WANDB_API_KEY": SECRET, "RAY_AUTH_TOKEN": "t"}
    monkeypatch.setenv("WANDB_API_KEY", SECRET)  # the submitter has it too
    code = """
        import os, pathlib
        print(pathlib.Path("pyproject.toml").exists(), os.environ["NCCL_DEBUG"], os.environ["WANDB_API_KEY"], flush=True)
    """
    job = run_code(api, profile, monkeypatch, code)
    assert job.wait(timeout_s=60) == JobStatus.FINISHED, job.logs()
    assert "True WARN ***" in job.logs()
    visible = "".join(api.requests) + api.log_of(f"{job.spec.handle['name']}-submitter")
    visible += "".join(path.read_text() for path in job.folder.path.iterdir() if path.is_file())
    assert "WANDB_API_KEY" in visible and SECRET not in visible
    assert not job.folder.secrets.exists()


@pytest.mark.slow
def test_stop_ends_the_job_and_waits_for_its_pods(api, profile, monkeypatch):
    job = run_code(api, profile, monkeypatch, "import time; print('begun', flush=True); time.sleep(600)")
    until(lambda: "begun" in job.logs())
    assert job.status() == JobStatus.RUNNING
    api.pods_stay_s = 1
    assert job.stop() == JobStatus.STOPPED
    assert api.ray_jobs == {} and api.pods == {}
    assert api.processes[job.spec.handle["name"]].poll() is not None
    assert job.stop() == JobStatus.STOPPED, "a second stop does nothing"


@pytest.mark.slow
def test_the_commands_work_with_kubernetes(api, profile, tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path / "tree")
    path = profile()
    runs = str(tmp_path / "shared" / "runs")
    done = cli("submit", "tiny", "--profile", path, "--backend", "kuberay", "--no-preflight", "--name", "My_run")
    assert done.exit_code == 0, done.output
    assert "reads WANDB_API_KEY, HF_TOKEN" in done.output and "from the Secret rstar-lab" in done.output
    job_id = done.stdout.strip().splitlines()[-1]
    (name,) = api.ray_jobs
    manifest = yaml.safe_load((Path(runs) / ".jobs" / job_id / "rayjob.yaml").read_text())
    assert manifest["spec"] == api.ray_jobs[name]["spec"] and manifest["metadata"]["namespace"] == "research"
    assert manifest["metadata"]["annotations"]["rstar-lab/job"] == job_id

    (row,) = [json.loads(line) for line in cli("list", "--runs-dir", runs, "--json").stdout.splitlines()]
    assert (row["id"], row["backend"], row["status"]) == (job_id, "kuberay", "queued")
    api.submit(name)
    api.logs[f"{name}-submitter"] = '{"event": "step"}\nhello from the head é\n'
    assert "running" in cli("status", job_id, "--runs-dir", runs).stdout
    assert cli("logs", job_id, "--runs-dir", runs).stdout == '{"event": "step"}\nhello from the head é\n'
    done = cli("stop", job_id, "--runs-dir", runs)
    assert f"{job_id}: stopped" in done.stdout and api.ray_jobs == {}
    assert "stopped" in cli("list", "--runs-dir", runs).stdout


def test_a_recipe_without_a_sandbox_service_uses_the_deployment(sent, api):
    job = sent()
    assert job.spec.sandbox_workers == 0
    assert "sandbox.url=http://rstar-lab-sandbox:8088" in job.spec.command
    assert job.spec.command[0] == "python3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, "queued"),
        ({"jobDeploymentStatus": "Suspended"}, "queued"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}, "queued"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "running"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "stopped"),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed"}, "failed"),
        ({"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed"}, "failed"),
        # No exit.json: the pods wrote to another volume.
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "failed"),
    ],
)
def test_states_of_a_ray_job(sent, api, status, expected):
    job = sent()
    api.ray_jobs[job.spec.handle["name"]]["status"] = status
    assert job.status() == expected


def test_a_ray_job_that_somebody_deleted_is_stopped(sent, api):
    job = sent()
    api.ray_jobs.clear()
    assert job.status() == JobStatus.STOPPED


def test_logs_contain_the_reason_why_pods_wait_and_hide_secrets(sent, api, monkeypatch):
    job = sent()
    name = job.spec.handle["name"]
    cluster = api.ray_jobs[name]["status"]["rayClusterName"]
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                   "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."}  # fmt: skip
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "rstar-lab:cuda"'}
    container = {
        "name": "ray",
        "image": "i",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    api.add_pod(f"{cluster}-a", {"ray.io/cluster": cluster}, phase="Pending", conditions=[unscheduled])
    api.add_pod(f"{cluster}-b", {"ray.io/cluster": cluster}, phase="Pending", containerStatuses=[container])
    api.ray_jobs[name]["status"]["message"] = "the cluster is not ready"
    text = job.logs()
    assert f"pod {cluster}-a: Unschedulable: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu." in text
    assert f"pod {cluster}-b: ImagePullBackOff: Back-off pulling" in text
    assert "RayJob: the cluster is not ready" in text
    monkeypatch.setenv("HF_TOKEN", SECRET)
    api.submit(name)
    api.logs[f"{name}-submitter"] = f"token {SECRET}\n"
    assert "token ***" in job.logs() and SECRET not in job.logs()
    assert kuberay._Namespace(None, None).pod_log("a-pod-that-is-gone") == []


def test_follow_prints_the_complete_log_after_the_output_of_the_backend(sent, api):
    job = sent()
    name = job.spec.handle["name"]
    api.submit(name)
    api.logs[f"{name}-submitter"] = "one\ntwo\nthree\n"
    lines = job.follow(every_s=0.01)
    assert [next(lines) for _ in range(3)] == ["one", "two", "three"]
    job.folder.log.write_text("first\nsecond\n")
    job.folder.write("exit.json", {"code": 0, "stopped": False, "ended": 0})
    assert list(lines) == ["first", "second"]


def test_namespace_and_context_come_from_the_profile_or_the_kubeconfig(sent, api, monkeypatch):
    assert sent().spec.handle["namespace"] == "research"
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig(namespace=None))
    with pytest.raises(UserError, match=r"404 namespaces \"default\" not found\. Check kuberay\.namespace"):
        sent()
    assert sent(namespace="research").spec.handle["namespace"] == "research"
    with pytest.raises(
        UserError, match=r"namespace locked, context locked\): 403 .*Role in cluster/kubernetes/submitter"
    ):
        sent(context="locked")
    with pytest.raises(UserError, match=r"kubeconfig file: .*nowhere.*`kubectl config get-contexts`"):
        sent(context="nowhere")


def test_a_pod_uses_its_service_account(sent, api, tmp_path, monkeypatch):
    from kubernetes.config import incluster_config

    folder = tmp_path / "account"
    folder.mkdir()
    for name, text in (("token", "token-of-the-cluster"), ("namespace", "research"), ("ca.crt", "certificate")):
        (folder / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(folder / "ca.crt"))
    monkeypatch.setattr(kuberay, "POD_NAMESPACE", folder / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-such-file"))
    # The address of a service account is https, which the server of this test does not speak.
    with pytest.raises(UserError, match=r"create RayJob .* \(namespace research\)"):
        sent()


def test_errors_name_the_remedy_and_leave_no_job(sent, api, tmp_path, monkeypatch):
    runs = tmp_path / "shared" / "runs"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"cannot read the kubeconfig file: .*Set KUBECONFIG"):
        sent()
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig(token="expired"))
    with pytest.raises(UserError, match=r"401 Unauthorized\. .*log in to the cluster again"):
        sent()
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig())
    api.has_operator = False
    with pytest.raises(UserError, match=r"404 404 page not found\. Install the KubeRay operator, 1\.5\.1 or newer"):
        sent()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("KUBECONFIG", api.kubeconfig(url=url))
    started = time.monotonic()
    with pytest.raises(UserError, match=r"the API server does not answer .*`kubectl cluster-info`"):
        sent()
    assert time.monotonic() - started < 20
    assert list_jobs(runs) == []


def test_an_existing_name_and_an_unknown_field_are_errors(sent, api, tmp_path, monkeypatch):
    job = sent()
    with pytest.raises(UserError, match=r"409 rayjobs\.ray\.io .* already exists\. Submit with another --name"):
        kuberay.KubeRay().start(job.folder, job.spec)
    api.ray_jobs.clear()
    monkeypatch.setattr(kuberay, "ray_job", lambda *arguments: {
        "apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": {"entrypont": "x"},
    })  # fmt: skip
    with pytest.raises(UserError, match=r"400 .*strict decoding error: .*entrypont.*Check that KubeRay is 1\.5\.1"):
        kuberay.KubeRay().start(job.folder, job.spec)


def test_status_of_an_unreachable_cluster_is_unknown(sent, api, monkeypatch, tmp_path):
    job = sent()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert job.status_or_unknown() == JobStatus.UNKNOWN
    rows = cli("list", "--runs-dir", job.spec.runs_dir)
    assert "unknown" in rows.stdout and "Set KUBECONFIG" in rows.stderr
    with pytest.raises(UserError, match="Set KUBECONFIG"):
        job.stop()


@pytest.mark.slow
def test_stop_reports_pods_that_remain(sent, api, monkeypatch):
    job = sent()
    api.pods_stay_s = 600
    monkeypatch.setattr(kuberay, "STOP_TIMEOUT_S", 0.1)
    with pytest.raises(UserError, match=r"still exist: pod .*-gpu-worker-1, pod .*-head\. Check the KubeRay operator"):
        job.stop()
    assert not (job.folder.path / "exit.json").exists(), "stop can be tried again"


def test_the_client_is_an_extra(sent, api, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(UserError, match=r"pip install '\.\[kuberay\]'"):
        sent()


def test_a_runs_folder_that_cannot_be_made_is_an_error(profile, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(UserError, match="storage that this machine shares with the nodes"):
        submit("tiny", profile(), preflight=False, log=lambda line: None)


def test_a_job_without_a_ray_job_has_no_logs(tmp_path):
    spec = JobSpec("a", "tiny", "h100x8", "kuberay", ["python3"], ".", str(tmp_path), {}, "now")
    assert kuberay.KubeRay().logs(None, spec) is None and kuberay.KubeRay().state(None, spec) == "failed"
    kuberay.KubeRay().stop(None, spec)
