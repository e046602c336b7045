"""An HTTP server with the part of the Kubernetes API that jobs use, and a KubeRay operator that runs the entry point here."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

from helpers.kubernetes_schema import check_manifest

TOKEN = "token-of-the-cluster"
NAMESPACES = ("research", "locked")  # in `locked` the user has no rights


class KubernetesApi:
    """The API server. secrets: content of the Secret `rstar-lab`. run: whether the operator starts the jobs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ray_jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.secrets: dict[str, str] = {}
        self.requests: list[str] = []
        self.run, self.has_operator, self.pods_stay_s = False, True, 0.0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def kubeconfig(self, *, token: str = TOKEN, namespace: str | None = "research", url: str | None = None) -> str:
        """Write a kubeconfig file with the contexts `lab` (the current one) and `locked`, and return its path."""
        context = {"cluster": "lab", "user": "me"}
        contexts = [
            {"name": "lab", "context": context | ({"namespace": namespace} if namespace else {})},
            {"name": "locked", "context": context | {"namespace": "locked"}},
        ]
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "lab", "contexts": contexts,
            "clusters": [{"name": "lab", "cluster": {"server": url or self.url}}],
            "users": [{"name": "me", "user": {"token": token}}],
        }  # fmt: skip
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    def create(self, document: dict[str, Any]) -> None:
        """Store a RayJob with the pods that KubeRay makes for it, and run its entry point as Ray does on the head."""
        name = document["metadata"]["name"]
        document["metadata"]["uid"] = f"uid-{name}"
        self.ray_jobs[name] = document
        cluster = f"{name}-x7k2p"
        document["status"] = {"jobDeploymentStatus": "Initializing", "rayClusterName": cluster}
        self.add_pod(f"{cluster}-head", {"ray.io/cluster": cluster})
        self.add_pod(f"{cluster}-gpu-worker-1", {"ray.io/cluster": cluster})
        if self.run:
            head = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
            variables = {item["name"]: self.value_of(item) for item in head["env"]}
            environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": os.environ["HOME"]}
            environment |= {key: value for key, value in variables.items() if value is not None}
            self.submit(name)
            with (self.folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    ["bash", "-ec", document["spec"]["entrypoint"]], cwd="/", env=environment, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip

    def submit(self, name: str) -> None:
        """Make the submitter pod of a RayJob and set its status to running."""
        self.ray_jobs[name]["status"] |= {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
        self.add_pod(f"{name}-submitter", {"ray.io/originated-from-cr-name": name, "job-name": name})

    def value_of(self, variable: dict[str, Any]) -> str | None:
        if "valueFrom" in variable:
            return self.secrets.get(variable["valueFrom"]["secretKeyRef"]["key"])
        return str(variable["value"])

    def add_pod(self, name: str, labels: dict[str, str], **status: Any) -> None:
        metadata = {"name": name, "namespace": "research", "labels": labels}
        self.pods[name] = {"metadata": metadata, "status": {"phase": "Running"} | status}

    def delete(self, name: str) -> None:
        """Stop the Ray job, then remove the RayJob at once and its pods after `pods_stay_s`."""
        document = self.ray_jobs.pop(name)
        process = self.processes.get(name)
        if process and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        cluster = document["status"]["rayClusterName"]

        def remove() -> None:
            time.sleep(self.pods_stay_s)
            if process:
                process.wait(30)
            for pod in [pod for pod in self.pods if pod.startswith((cluster, f"{name}-submitter"))]:
                del self.pods[pod]

        threading.Thread(target=remove, daemon=True).start()

    def log_of(self, pod: str) -> str:
        log = self.folder / f"{pod.removesuffix('-submitter')}.log"
        return self.logs.get(pod) or (log.read_text() if log.exists() else "")


class _Handler(BaseHTTPRequestHandler):
    api: KubernetesApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer("get")

    def do_POST(self) -> None:
        self.answer("create")

    def do_DELETE(self) -> None:
        self.answer("delete")

    def answer(self, verb: str) -> None:
        url = urlparse(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.api.requests.append(f"{verb} {self.path} {text.decode()}")
        parts = url.path.strip("/").split("/")
        namespace = parts[parts.index("namespaces") + 1]
        kind, *rest = parts[parts.index("namespaces") + 2 :]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(401, "Unauthorized")
        if namespace == "locked":
            resource = f'"{kind}" in API group "{"ray.io" if kind == "rayjobs" else ""}"'
            return self.fail(
                403, f'{kind} is forbidden: User "me" cannot {verb} resource {resource} in the namespace "locked"'
            )
        if kind == "pods":
            return self.pods(namespace, rest, query)
        if not self.api.has_operator:
            return self.send(404, "text/plain", "404 page not found\n")
        if verb == "create":
            return self.create(namespace, query, json.loads(text))
        return self.one_ray_job(verb, rest[0])

    def create(self, namespace: str, query: dict[str, str], document: dict[str, Any]) -> None:
        name = document["metadata"]["name"]
        if namespace not in NAMESPACES:
            return self.fail(404, f'namespaces "{namespace}" not found')
        if name in self.api.ray_jobs:
            return self.fail(409, f'rayjobs.ray.io "{name}" already exists')
        try:
            check_manifest(document)
            assert query["fieldValidation"] == "Strict" and document["metadata"]["namespace"] == namespace
        except ValueError as error:
            return self.fail(
                400, f'RayJob in version "v1" cannot be handled as a RayJob: strict decoding error: {error}'
            )
        self.api.create(document)
        self.send_json(201, document)

    def one_ray_job(self, verb: str, name: str) -> None:
        document = self.api.ray_jobs.get(name)
        if document is None:
            return self.fail(404, f'rayjobs.ray.io "{name}" not found')
        if verb == "delete":
            self.api.delete(name)
        self.send_json(200, document)

    def pods(self, namespace: str, rest: list[str], query: dict[str, str]) -> None:
        if len(rest) == 2 and rest[1] == "log":
            if rest[0] not in self.api.pods:
                return self.fail(404, f'pods "{rest[0]}" not found')
            return self.send(200, "text/plain", self.api.log_of(rest[0]))
        key, _, value = query["labelSelector"].partition("=")
        found = [pod for pod in self.api.pods.values() if pod["metadata"]["labels"].get(key) == value]
        self.send_json(200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})

    def fail(self, code: int, message: str) -> None:
        self.send_json(
            code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
        )

    def send_json(self, code: int, content: dict[str, Any]) -> None:
        self.send(code, "application/json", json.dumps(content))

    def send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
