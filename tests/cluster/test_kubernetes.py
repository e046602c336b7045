"""The Kubernetes manifests: they follow the schemas of the API, fit together, and contain no secret."""

import re
from pathlib import Path

import pytest
import yaml
from helpers.kubernetes_schema import check_manifest

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import KubeRay, load_profile, profile_names
from rstar_lab.jobs.kuberay import MAX_NAME, resource_name
from rstar_lab.jobs.render import ray_cluster, ray_job, to_yaml
from rstar_lab.jobs.store import JobSpec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
DOCUMENTS = [
    document for name in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((FOLDER / name).read_text())
]
IDS = [f"{document['kind']}-{document['metadata']['name']}" for document in DOCUMENTS]


def find(kind, name):
    return next(item for item in DOCUMENTS if item["kind"] == kind and item["metadata"]["name"] == name)


def pods():
    return [item["spec"]["template"]["spec"] for item in DOCUMENTS if item["kind"] == "Deployment"]


def job(profile, runs="/shared/runs", **changes):
    folder = Path(runs) / ".jobs" / "job-1"
    command = ["python3", "-c", ""]
    spec = JobSpec("job-1", "paper", profile.name, "kuberay", command, str(folder / "code"), runs, {}, "now", **changes)
    return ray_job(profile, spec, folder, "job-1")


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_manifest_follows_the_schema(document):
    check_manifest(document)


@pytest.mark.parametrize("name", [name for name in profile_names() if load_profile(name).hardware.gpus])
def test_ray_job_and_ray_cluster_of_every_profile_follow_the_schema(name):
    profile = load_profile(name).model_copy(update={"container": "registry/rstar-lab:1"})
    document = job(profile)
    check_manifest(document)
    check_manifest(ray_cluster(profile))
    assert yaml.safe_load(to_yaml(document)) == document and "&id" not in to_yaml(document)
    with pytest.raises(ValueError, match="RayJob"):
        check_manifest(document | {"spec": document["spec"] | {"entrypont": "x"}})


def test_ray_job_uses_the_settings_of_the_profile():
    settings = KubeRay(claim="data", mount="/mnt/data", secret="mine")
    profile = load_profile("h100x8").model_copy(update={"kuberay": settings})
    spec = job(profile, "/mnt/data/runs")["spec"]
    assert spec["entrypoint"] == "python3 -m rstar_lab.jobs.supervisor /mnt/data/runs/.jobs/job-1"
    assert spec["shutdownAfterJobFinishes"] is True, "GPUs are free when the job ends"
    (worker,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert worker["replicas"] == 1
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "96", "memory": "1500Gi", "nvidia.com/gpu": "8"}
    for group in (spec["rayClusterSpec"]["headGroupSpec"], worker):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "rstar-lab:cuda" and pod["automountServiceAccountToken"] is False
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "data"
        assert {"name": "shared", "mountPath": "/mnt/data"} in container["volumeMounts"]
        assert {"name": "PYTHONPATH", "value": "/mnt/data/runs/.jobs/job-1/code"} in container["env"]
        secret = next(variable for variable in container["env"] if variable["name"] == "HF_TOKEN")
        assert secret["valueFrom"]["secretKeyRef"]["name"] == "mine"


def test_ray_of_the_image_has_the_version_of_the_kuberay_manifest():
    # KubeRay rejects token authentication without a version, and finds the dashboard by the name of its port.
    cluster = job(load_profile("h100x8"))["spec"]["rayClusterSpec"]
    assert f"\nray=={cluster['rayVersion']}\n" in (ROOT / "constraints" / "cuda.txt").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
    ports = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": "dashboard", "containerPort": 8265} in ports


def test_ray_job_requires_an_image_and_a_folder_that_the_pods_see():
    with pytest.raises(UserError, match="container: not set: backend kuberay requires an image"):
        job(load_profile("laptop"))
    with pytest.raises(
        UserError, match=r"container: /shared/images/rstar-lab-rocm\.sif: .* requires an image of a registry"
    ):
        job(load_profile("mi300x_8x8"))
    with pytest.raises(UserError, match=r"mount the claim rstar-lab-shared at /shared, .* --runs-dir under /shared"):
        job(load_profile("h100x8"), "/home/me/runs")


def test_names_of_ray_jobs_are_valid_and_differ():
    ids = ["tiny-20260101-120000-ab12", "tiny_fast-20260101-120000-ab12", "tiny-fast-20260101-120000-ab12", "7b",
           "x" * 80 + "-20260101-120000-ab12", "x" * 81 + "-20260101-120000-ab12", "Ä", "a.b", "a-b-"]  # fmt: skip
    names = [resource_name(job_id) for job_id in ids]
    assert names[0] == ids[0] and "20260101-120000-ab12" in names[4]
    assert len(set(names)) == len(ids)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= MAX_NAME for name in names), names


def test_manifests_refer_to_each_other_and_have_no_secret():
    services = {item["metadata"]["name"] for item in DOCUMENTS if item["kind"] == "Service"}
    labels = {
        item["spec"]["template"]["metadata"]["labels"]["app"] for item in DOCUMENTS if item["kind"] == "Deployment"
    }
    for item in DOCUMENTS:
        if item["kind"] == "Service":
            assert item["spec"]["selector"]["app"] in labels
        if item["kind"] == "NetworkPolicy":
            used = re.findall(r"'app': '([\w-]+)'", str(item["spec"]))
            assert used and set(used) <= labels
    defaults = KubeRay()
    assert defaults.sandbox_url == "http://rstar-lab-sandbox:8088" and "rstar-lab-sandbox" in services
    assert find("PersistentVolumeClaim", defaults.claim)
    for pod in pods():
        for variable in pod["containers"][0].get("env", ()):
            value = variable.get("value", "")
            assert value in ("", "redis://:$(REDIS_PASSWORD)@$(RSTAR_LAB_REDIS_SERVICE_HOST):6379/0"), variable
            assert variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name", "rstar-lab") == defaults.secret
    assert "Secret" not in {item["kind"] for item in DOCUMENTS}, "the user makes it with kubectl"


def test_calls_and_results_in_redis_are_signed():
    with_redis = [
        pod
        for pod in pods()
        if "rstar-lab" in str(pod["containers"][0].get("command")) and "RSTAR_LAB_REDIS_URL" in str(pod)
    ]
    assert len(with_redis) == 2 and all(
        "RSTAR_LAB_SANDBOX_KEY" in str(pod["containers"][0]["env"]) for pod in with_redis
    )


def test_pods_that_run_model_written_code_have_no_api_token_and_no_network():
    with_token = [pod for pod in pods() if pod.get("automountServiceAccountToken") is not False]
    assert [pod["containers"][0]["name"] for pod in with_token] == ["submitter"]
    policy = find("NetworkPolicy", "rstar-lab-sandbox-worker")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in policy
    (egress,) = policy["egress"]
    assert egress["to"] == [{"podSelector": {"matchLabels": {"app": "rstar-lab-redis"}}}]
    worker = find("Deployment", "rstar-lab-sandbox-worker")["spec"]["template"]["spec"]
    assert "--strict" in worker["containers"][0]["command"]
    assert worker["hostUsers"] is False, "Kubernetes rejects procMount: Unmasked without it"


def test_redis_has_the_settings_of_redis_conf():
    command = find("Deployment", "rstar-lab-redis")["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    for setting in ("appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction"):
        assert f"--{setting}" in command and f"\n{setting}\n" in (ROOT / "cluster" / "redis.conf").read_text()
