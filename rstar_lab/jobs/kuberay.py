"""Jobs on Kubernetes: a RayJob of the KubeRay operator. The submitter and the pods must see the runs folder."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.hardware.processes import wait_until
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.backend import Backend
from rstar_lab.jobs.render import ray_job, to_yaml
from rstar_lab.jobs.secrets import redact, secret_values
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.untrusted.files import error_message

TIMEOUT_S = (10, 30)  # seconds: connect, read
RAY_JOBS: dict[str, Any] = {"group": "ray.io", "version": "v1", "plural": "rayjobs", "_request_timeout": TIMEOUT_S}
MAX_NAME = 47  # KubeRay rejects longer names of RayJobs
STOP_TIMEOUT_S = 120
LOG_LINES = 5000
NO_SUCH_KIND = "page not found"  # in the 404 answer of an API server that does not know RayJobs
VERSION_HINT = "Check that KubeRay is 1.5.1 or newer, and the section kuberay of the profile"
REMEDIES = {  # by status of the API server's answer
    400: VERSION_HINT,
    401: "The credentials of the kubeconfig file are not valid: log in to the cluster again",
    403: "Ask for the rights of the Role in cluster/kubernetes/submitter.yaml, or set kuberay.namespace of the profile",
    404: "Check kuberay.namespace of the profile",
    409: "Submit with another --name, or delete the old one with `kubectl delete rayjob`",
    422: VERSION_HINT,
}
OTHER_REMEDY = "Try again; if it persists, ask the administrators of the cluster"
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubeRay(Backend):
    """Jobs as RayJobs on Kubernetes."""

    name = "kuberay"

    def start(self, folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
        """Write rayjob.yaml into the job's folder and create the RayJob."""
        profile = load_profile(spec.profile)
        name = resource_name(spec.id)
        manifest = ray_job(profile, spec, folder.path, name)
        namespace = _Namespace(profile.kuberay.context, profile.kuberay.namespace)
        manifest["metadata"]["namespace"] = namespace.name
        (folder.path / "rayjob.yaml").write_text(to_yaml(manifest))
        # Strict: an older KubeRay would otherwise ignore unknown fields, among them the token authentication.
        with namespace.explain(f"create RayJob {name}"):
            namespace.custom.create_namespaced_custom_object(
                **RAY_JOBS, namespace=namespace.name, body=manifest, field_validation="Strict"
            )
        return {"name": name, "namespace": namespace.name, "context": profile.kuberay.context}

    def rendered(self, machine: Profile, spec: JobSpec, folder: Path) -> str:
        """Return the manifest of the RayJob."""
        return to_yaml(ray_job(machine, spec, folder, resource_name(spec.id)))

    def state(self, folder: JobFolder, spec: JobSpec) -> str:
        """Return the state of a job that has no exit.json. Raises UserError if the API server does not answer."""
        if "name" not in spec.handle:
            return "failed"
        found = _namespace(spec).ray_job(spec.handle["name"])
        if found is None:
            return "stopped"  # the RayJob was deleted
        status = found.get("status") or {}
        deployment, job = status.get("jobDeploymentStatus"), status.get("jobStatus")
        if job == "STOPPED":
            return "stopped"
        # A job that ended without exit.json failed even if Ray reports success: the volume is not the runs folder of this machine.
        if deployment in ("Complete", "Failed", "ValidationFailed") or job in ("SUCCEEDED", "FAILED"):
            return "failed"
        return "running" if job == "RUNNING" else "queued"

    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """Delete the RayJob and wait until its pods are gone. Raises UserError if some remain after STOP_TIMEOUT_S."""
        if "name" not in spec.handle:
            return
        name, namespace = spec.handle["name"], _namespace(spec)
        selectors = _selectors(name, namespace.ray_job(name))
        with namespace.explain(f"delete RayJob {name}", missing_ok=True):
            # KubeRay stops the Ray job first. Kubernetes then deletes the cluster and its pods.
            namespace.custom.delete_namespaced_custom_object(**RAY_JOBS, namespace=namespace.name, name=name)
        if not wait_until(lambda: not namespace.pods(selectors) and namespace.ray_job(name) is None, STOP_TIMEOUT_S):
            left = [f"pod {pod.metadata.name}" for pod in namespace.pods(selectors)] or ["the RayJob itself"]
            raise UserError(
                f"RayJob {name} in namespace {namespace.name} was deleted {STOP_TIMEOUT_S} s ago, but these still exist: "
                f"{', '.join(left)}. Check the KubeRay operator and the nodes, then run `rstar-lab jobs stop` again"
            )

    def logs(self, folder: JobFolder, spec: JobSpec) -> str | None:
        """Return the reasons why the job's pods wait, and the output of its submitter pod, for a job without a log file.
        Secrets are hidden."""
        if "name" not in spec.handle:
            return None
        name, namespace = spec.handle["name"], _namespace(spec)
        found = namespace.ray_job(name)
        status = (found or {}).get("status") or {}
        lines = [f"{status.get('reason') or 'RayJob'}: {status['message']}"] if status.get("message") else []
        for pod in namespace.pods(_selectors(name, found)):
            lines += [f"pod {pod.metadata.name}: {reason}" for reason in _waiting_reasons(pod)]
            # The output of Ray's own pods is not part of the job's output.
            if "ray.io/cluster" not in pod.metadata.labels and pod.status.phase in ("Running", "Succeeded", "Failed"):
                lines += namespace.pod_log(pod.metadata.name)
        return redact("".join(f"{line}\n" for line in lines), secret_values(names=load_profile(spec.profile).secrets))


def resource_name(job_id: str) -> str:
    """Return a name for the RayJob of a job: a DNS label of at most 47 characters. Different ids have different names."""
    name = re.sub(r"[^a-z0-9]+", "-", job_id.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}"
    if name == job_id and len(name) <= MAX_NAME:
        return name
    # An id starts with the run's name and ends with its time: keep some of both.
    name = name if len(name) <= MAX_NAME - 7 else f"{name[:18].strip('-')}-{name[-21:].strip('-')}"
    return f"{name}-{hashlib.sha256(job_id.encode()).hexdigest()[:6]}"


class _Namespace:
    """A connection to one namespace, for a context of the kubeconfig file, or inside of a pod for its service account.

    name: default: the namespace of the context or the pod. Raises UserError if there is no usable configuration.
    """

    def __init__(self, context: str | None, name: str | None):
        self.context, self.name = context, name or ""
        if find_spec("kubernetes") is None:
            raise UserError(f"backend kuberay requires the Kubernetes client: {install_hint('kuberay')}")
        from kubernetes import client, config

        configuration = client.Configuration()
        # The client's own default is the value of KUBECONFIG when it was imported.
        files = os.environ.get("KUBECONFIG") or "~/.kube/config"
        is_file = any(Path(file).expanduser().is_file() for file in files.split(os.pathsep))
        with self.explain("read the kubeconfig file"):
            if "KUBERNETES_SERVICE_HOST" in os.environ and not is_file:  # in a pod
                config.load_incluster_config(client_configuration=configuration)
                self.name = self.name or POD_NAMESPACE.read_text().strip()
            else:
                config.load_kube_config(files, context, configuration)
                contexts, active = config.list_kube_config_contexts(files)
                chosen = next((entry for entry in contexts if entry["name"] == context), active)
                self.name = self.name or str(chosen["context"].get("namespace") or "default")
        configuration.retries = 1
        api = client.ApiClient(configuration)
        self.custom, self.core = client.CustomObjectsApi(api), client.CoreV1Api(api)

    def ray_job(self, name: str) -> dict[str, Any] | None:
        """Return a RayJob, or None if it does not exist."""
        found: dict[str, Any] | None = None
        with self.explain(f"read RayJob {name}", missing_ok=True):
            found = self.custom.get_namespaced_custom_object(**RAY_JOBS, namespace=self.name, name=name)
        return found

    def pods(self, selectors: list[str]) -> list[Any]:
        """Return the pods that match one of the label selectors, sorted by name."""
        found: dict[str, Any] = {}
        for selector in selectors:
            with self.explain("list the pods"):
                answer = self.core.list_namespaced_pod(self.name, label_selector=selector, _request_timeout=TIMEOUT_S)
                found |= {pod.metadata.name: pod for pod in answer.items}
        return [found[name] for name in sorted(found)]

    def pod_log(self, pod: str) -> list[str]:
        """Return the last lines that a pod printed; none if the pod is gone."""
        text = b""
        with self.explain(f"read the log of pod {pod}", missing_ok=True):
            # By default the client parses a JSON log and returns the repr of any other log.
            text = self.core.read_namespaced_pod_log(
                pod, self.name, tail_lines=LOG_LINES, _request_timeout=TIMEOUT_S, _preload_content=False
            ).data
        return text.decode(errors="replace").splitlines()

    @contextmanager
    def explain(self, action: str, *, missing_ok: bool = False) -> Iterator[None]:
        """Turn errors of the client into UserErrors with a remedy. missing_ok: ignore that the object does not exist."""
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        where = f"namespace {self.name}" + (f", context {self.context}" if self.context else "")
        try:
            yield
        except (ConfigException, ApiException, HTTPError, OSError) as error:
            if isinstance(error, ConfigException):
                problem = (
                    f"cannot {action}: {_one_line(error)}. Set KUBECONFIG to the file of the cluster; `kubectl config get-contexts` "
                    "lists the values that kuberay.context of the profile can have"
                )
            elif isinstance(error, ApiException):
                message, remedy = _message(error), REMEDIES.get(error.status, OTHER_REMEDY)
                if error.status == 404 and NO_SUCH_KIND in message:
                    remedy = "Install the KubeRay operator, 1.5.1 or newer, which defines RayJobs"
                elif error.status == 404 and missing_ok:
                    return
                problem = f"cannot {action} ({where}): {error.status} {message}. {remedy}"
            else:
                problem = (
                    f"cannot {action} ({where}): the API server does not answer ({_one_line(error)}). Check the network, the VPN or "
                    "proxy, and `kubectl cluster-info`"
                )
            raise UserError(problem) from error


def _namespace(spec: JobSpec) -> _Namespace:
    return _Namespace(spec.handle["context"], spec.handle["namespace"])


def _selectors(name: str, ray_job: dict[str, Any] | None) -> list[str]:
    """Return the label selectors of the job's pods: the submitter, and the Ray cluster once KubeRay has named it."""
    cluster = ((ray_job or {}).get("status") or {}).get("rayClusterName")
    return [f"ray.io/originated-from-cr-name={name}", *([f"ray.io/cluster={cluster}"] if cluster else [])]


def _waiting_reasons(pod: Any) -> list[str]:
    """Return the reasons why a pod does not run, such as no free node, or a missing image, volume or Secret."""
    waiting = [container.state.waiting for container in pod.status.container_statuses or [] if container.state]
    conditions = pod.status.conditions or []
    unscheduled = [found for found in conditions if (found.type, found.status) == ("PodScheduled", "False")]
    return [": ".join(filter(None, (item.reason, item.message))) for item in (*unscheduled, *waiting) if item]


def _message(error: Any) -> str:
    """Return the API server's message of an ApiException."""
    body = str(error.body or error.reason).encode()
    return _one_line(error_message(SimpleNamespace(content=body, url="API server", status_code=error.status)))


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:500].rstrip(".")
