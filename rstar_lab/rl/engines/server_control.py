"""Requests to a vLLM server that control it: health, metrics, new weights, tokenization."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.scheduling.scheduler import ServerReport

VERSION_PATH = "/weight_version"  # served by `rstar-lab serve --updatable` (rl/serving/weight_version.py)
HEALTH_TIMEOUT_S = 10.0


class ServerUnreachable(EngineError):
    """The server closed the connection or did not answer in time."""


class ServerControl:
    """Sends control requests to one server. timeout_s: time limit of a request."""

    def __init__(self, url: str, http: httpx.AsyncClient, timeout_s: float):
        self.url, self.http, self.timeout_s = url, http, timeout_s
        self._updating = asyncio.Lock()

    async def load_weights(self, path: Path, version: int) -> None:
        """Load a safetensors file of the whole model into the server and reset its prefix cache.

        Requests in flight are paused and continue with the new weights. After ServerUnreachable the server may still be
        paused; the next call resumes it. Raises UserError or EngineError.
        """
        async with self._updating:
            await self.request("/pause", params={"mode": "keep"})
            try:
                load = {"method": "reload_weights", "kwargs": {"weights_path": str(path.parent.resolve())}}
                await self.request("/collective_rpc", json=load)
                # Cached blocks hold keys and values of the old weights.
                reset = await self.request("/reset_prefix_cache", params={"reset_running_requests": True})
                if reset.content and not reset.json()["success"]:  # vLLM 0.24 answers with an empty body
                    raise EngineError(f"{self.url}: the server did not reset its prefix cache")
                await self.request(VERSION_PATH, json={"version": version})
            except ServerUnreachable:
                raise
            except BaseException:
                with suppress(EngineError, UserError):  # the first error is the one to report
                    await self.request("/resume")
                raise
            await self.request("/resume")

    async def served_version(self) -> int | None:
        """Return the weight version that was sent last, or None if none was sent since the server started."""
        return (await self.request(VERSION_PATH, "GET")).json()["version"]

    async def is_healthy(self) -> bool:
        """Return whether the server answers and its engine is alive."""
        try:
            return (await self.send("GET", "/health", timeout=HEALTH_TIMEOUT_S)).status_code == 200
        except httpx.TransportError:
            return False

    async def request(self, path: str, method: str = "POST", **arguments: Any) -> httpx.Response:
        """Send an idempotent request. Raises EngineError, or UserError if the server does not have this path."""
        try:
            answer = await self.send(method, path, timeout=self.timeout_s, **arguments)
        except httpx.TransportError as error:
            raise ServerUnreachable(f"{self.url}: {path}: {error_text(error)}") from None
        if answer.status_code == 404:
            raise UserError(
                f"{self.url} does not accept new weights: start it with `rstar-lab serve MODEL --updatable`"
            )
        if answer.status_code != 200:
            raise EngineError(f"{self.url}: {path}: {answer.status_code} {error_message(answer)}")
        return answer

    async def send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send an idempotent request. It is sent again if the connection breaks: vLLM 0.24 closes a connection after an error
        response, and this client may send its next request on that connection."""
        try:
            return await self.http.request(method, path, **arguments)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return await self.http.request(method, path, **arguments)


def error_text(error: Exception) -> str:
    """Return the text of an exception, or its type if it has none."""
    return str(error) or type(error).__name__


def error_message(answer: httpx.Response) -> str:
    """Return the error message of an answer in OpenAI's format, else its text; at most 500 characters."""
    try:
        return str(answer.json()["error"]["message"])[:500]
    except (ValueError, LookupError, TypeError):
        return answer.text[:500]


def parse_metrics(text: str) -> ServerReport | None:
    """Parse Prometheus text. Returns None if it does not come from vLLM."""
    sums: dict[str, float] = {}
    kv_tokens = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == "vllm:cache_config_info":
                kv_tokens += _number(sample.labels, "num_gpu_blocks") * _number(sample.labels, "block_size")
    if "vllm:num_requests_running" not in sums:
        return None
    return ServerReport(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums.get("vllm:num_requests_waiting", 0)),
        kv_use=sums.get("vllm:kv_cache_usage_perc", 0.0),
        preemptions=int(sums.get("vllm:num_preemptions_total", 0)),
        prompt_tokens=int(sums.get("vllm:prompt_tokens_total", 0)),
        generated_tokens=int(sums.get("vllm:generation_tokens_total", 0)),
        kv_tokens=kv_tokens,
    )


def _number(labels: dict[str, str], name: str) -> int:
    value = labels.get(name, "")
    return int(value) if value.isdigit() else 0
