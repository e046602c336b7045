"""A vLLM server as an engine: sends token ids to /v1/completions and receives token ids and log-probs.

Requires vLLM 0.10.2 or later (`return_token_ids`). With `--logprobs-mode processed_logprobs`, which `rstar-lab serve` sets,
log-probs refer to the distribution that tokens are sampled from. By default, vLLM returns them before temperature and top-p.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired

import httpx
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import TypedDict

from rstar_lab.common.errors import UserError, first_line
from rstar_lab.common.http_answers import limit_answers
from rstar_lab.common.service_tokens import find_token
from rstar_lab.rl.engine import Completion, EngineError, FinishReason, RequestRefused, Sampling
from rstar_lab.rl.scheduling.scheduler import ServerReport
from rstar_lab.untrusted.files import answer_json, error_message, parse_json, reading

VERSION_PATH = "/weight_version"  # served by `rstar-lab serve --updatable` (rl/serving/middleware.py)
HEALTH_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 2**20  # the log-probs of all tokens of a long context
LOG = logging.getLogger(__name__)
API_KEY = "RSTAR_LAB_API_KEY"
RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
BUSY = (429, 500, 502, 503, 504)  # retried; with any other error status the request itself is invalid


class ServerUnreachable(EngineError):
    """The server closed the connection or did not answer in time."""


@contextmanager
def reachable(name: str, error: type[EngineError] = EngineError) -> Iterator[None]:
    """Convert an error of the connection to `error`. name: of the server."""
    try:
        yield
    except httpx.TransportError as failure:
        raise error(f"{name}: {first_line(failure)}") from None


def readable_answer(name: str) -> AbstractContextManager[None]:
    """Raise RequestRefused if the code in the block finds another form of answer than it expects. name: of the server."""
    return reading(f"{name}: its answer is not that of a vLLM server", error=RequestRefused)


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
        preemptions=int(sums.get("vllm:num_preemptions_total", 0)),
        prompt_tokens=int(sums.get("vllm:prompt_tokens_total", 0)),
        generated_tokens=int(sums.get("vllm:generation_tokens_total", 0)),
        kv_tokens=kv_tokens,
    )


def _number(labels: dict[str, str], name: str) -> int:
    value = labels.get(name, "")
    return int(value) if value.isdigit() else 0


class ServerEngine:
    """One vLLM server.

    A request whose connection breaks is sent again after a pause. A server is marked as lost if retries fail, if its
    token counters do not change for `stall_s` while it has requests of this engine, or if it dies or stops answering
    during a weight update. The requests of a lost server raise EngineError, so that the dispatcher sends them to other
    servers with the same seeds. If all servers of the group are lost, requests wait up to `PATIENCE_S` for one of them.
    A lost server is polled; it receives the newest weights before it is used again.

    deadline_s: time limit of one request. connections: maximum number of open requests. The token of the server is that of the
    environment variable RSTAR_LAB_API_KEY, else of the token file of a server that this user has started.
    """

    PATIENCE_S = 300.0

    def __init__(self, url: str, *, stall_s: float = 300.0, deadline_s: float = 3600.0, connections: int = 256):
        self.url = self.name = url.rstrip("/").removesuffix("/v1")
        self.stall_s, self.deadline_s = stall_s, deadline_s
        self.version = 0
        self.lost = self._closed = False
        self.group: Sequence[ServerEngine] = (self,)
        self.on_recovered: Callable[[], None] = lambda: None
        self.on_metrics: Callable[[ServerReport], None] = lambda metrics: None
        key = os.environ.get(API_KEY) or find_token(self.url)
        http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(10.0, read=None, pool=None),
            # uvicorn closes idle connections after 5 s. A request sent on a connection that is being closed would be lost.
            limits=httpx.Limits(max_connections=connections + 4, keepalive_expiry=2.0),
            trust_env=False,
        )
        self._http = limit_answers(http, MAX_ANSWER_BYTES)
        self._updating = asyncio.Lock()
        self._slots = asyncio.Semaphore(connections)
        self._in_flight: set[asyncio.Task[Completion]] = set()
        self._last_progress = 0.0
        self._weights: tuple[Path, int] | None = None  # those of the last call of `load_weights`
        self._loaded: tuple[Path, int] | None = None  # the last ones that the server has loaded completely
        self._loss = ""  # why the server was last marked as lost
        self._watchdog: asyncio.Task[None] | None = None

    # Start and health

    async def start(self, model: Path | str | None = None, options: dict[str, Any] | None = None) -> None:
        """Connect: read the name and context length of the server's model and generate one token.

        model and options are ignored, because the server has its own. Raises UserError if the server cannot be used.
        """
        card = await read_model_card(self._http, self.url)
        if (context := card.get("max_model_len")) is None:
            raise UserError(
                f"{self.url} is not a vLLM server (/v1/models has no max_model_len): other servers do not accept token ids"
            )
        self.model, self.root, self.context = card["id"], card.get("root") or card["id"], context
        try:
            metrics = await self.scrape()
            self.kv_tokens: int = (metrics.kv_tokens if metrics else 0) or 10**9
            await self._complete(self._body([0], Sampling(1, seed=0)))
        except EngineError as error:
            raise UserError(f"{self.url} cannot be used: {error}") from None
        self._watchdog = asyncio.create_task(self._watch())

    @property
    def folder(self) -> Path | None:
        """Folder of the server's model, if it is on this machine."""
        return Path(self.root) if (Path(self.root) / "config.json").is_file() else None

    async def aclose(self) -> None:
        """Cancel all requests and disconnect. The server keeps running. Safe to call twice."""
        self._closed = True
        if self._watchdog:
            self._watchdog.cancel()
        for task in self._in_flight:
            task.cancel()
        await self._http.aclose()

    async def scrape(self) -> ServerReport | None:
        """Return the metrics of /metrics, or None if the server has no such page. Raises EngineError if it does not respond."""
        with reachable(self.name):
            answer = await self._send("GET", "/metrics", timeout=max(1.0, min(10.0, self.stall_s / 4)))
        with readable_answer(self.name):
            return parse_metrics(answer.text) if answer.status_code == 200 else None

    async def _watch(self) -> None:
        progress = None
        while True:
            await asyncio.sleep(min(5.0, self.stall_s / 4))
            metrics, answers = None, False
            with suppress(EngineError):
                metrics, answers = await self.scrape(), True
            if metrics:
                self.on_metrics(metrics)
            if self.lost:
                if answers and await self._recover():
                    self.lost, self._last_progress = False, time.monotonic()
                    LOG.warning("%s is used again", self.name)
                    self.on_recovered()
                continue
            # A server without counters counts as working while it responds.
            moved = answers and (metrics is None or metrics.progress != progress)
            progress = metrics.progress if metrics else progress
            if moved or not self._in_flight:
                self._last_progress = time.monotonic()
            elif time.monotonic() - self._last_progress > self.stall_s:
                self._mark_lost(f"no progress for {self.stall_s:.0f} s")
                self._end_requests()

    def _mark_lost(self, why: str) -> None:
        """Mark the server as lost. Logs the reason, but not those of requests that fail after the first one."""
        if not self.lost:
            LOG.warning("%s is lost: %s", self.name, why)
            self.lost, self._loss = True, why

    def _end_requests(self) -> None:
        """End the requests of a lost server, which may wait for an answer that never comes."""
        for task in self._in_flight:
            task.cancel()

    async def _recover(self) -> bool:
        """Send the newest weights to a lost server that does not have them; return whether it generates with them."""
        newest = self._weights
        try:
            if newest and (self._loaded is not newest or await self._served_version() != newest[1]):
                await self._push(newest)
            async with asyncio.timeout(self.stall_s):
                await self._complete(self._body([0], Sampling(1, seed=0)), pauses=())
        except (EngineError, UserError, TimeoutError) as error:
            late = f"no response within {self.stall_s:.0f} s"
            why = late if isinstance(error, TimeoutError) else str(error).removeprefix(f"{self.name}: ")
            if why != self._loss:
                LOG.warning("%s is still lost: %s", self.name, why)
                self._loss = why
            return False
        return self._weights is newest  # else `load_weights` was called in the meantime

    # Requests

    def _body(self, prompt_ids: list[int], sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": min(sampling.max_tokens, self.context - len(prompt_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Set explicitly, because the model folder may contain other defaults (generation_config.json).
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, on_tokens: Callable[[list[int]], None] | None = None
    ) -> Completion:
        """Sample one completion. A cancelled call is aborted in the server. Raises EngineError.

        A prompt that fills the model's context returns an empty completion. on_tokens: called with new tokens as they arrive.
        """
        if len(prompt_ids) >= self.context:
            return Completion([], [], FinishReason.LENGTH, self.name, self.version)
        body = self._body(prompt_ids, sampling)
        async with self._slots:
            while True:
                await self._wait_until_usable()
                work = self._stream(body, on_tokens) if on_tokens else self._complete(body)
                task = asyncio.create_task(work)
                self._in_flight.add(task)
                try:
                    await asyncio.wait({task}, timeout=self.deadline_s)
                    if not task.done():
                        self._mark_lost(f"no response within {self.deadline_s:.0f} s")
                    elif not task.cancelled():
                        self._last_progress = time.monotonic()
                        return task.result()
                    failure = EngineError(f"{self.name}: {self._loss}")
                except EngineError as error:
                    if isinstance(error, RequestRefused):
                        raise
                    failure = error
                finally:
                    self._in_flight.discard(task)
                    task.cancel()
                if self._closed or on_tokens or self._other_server_works():
                    raise failure

    def _other_server_works(self) -> bool:
        return any(not other.lost for other in self.group if other is not self)

    async def _wait_until_usable(self) -> None:
        """Return when this server is not lost. Raises EngineError if another server works, or after `PATIENCE_S`."""
        deadline = time.monotonic() + self.PATIENCE_S
        while self.lost:
            if self._other_server_works() or time.monotonic() > deadline:
                raise EngineError(f"{self.name} is lost")
            await asyncio.sleep(0.25)

    async def score(self, prompt_ids: list[int], response_ids: list[int]) -> list[float]:
        """Return the log-probs of the tokens of a response, at temperature 1. Raises EngineError.

        The server must generate one token after the tokens that it scores. Tokens beyond its context minus one are NaN.
        """
        scored = response_ids[: max(0, self.context - 1 - len(prompt_ids))]
        if not scored:
            return [math.nan] * len(response_ids)
        body = self._body([*prompt_ids, *scored], Sampling(1, seed=0)) | {"max_tokens": 1, "prompt_logprobs": 0}
        async with self._slots:
            choice = await self._request(body)
        with readable_answer(self.name):
            entries = choice["prompt_logprobs"][len(prompt_ids) :]
            log_probs = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, scored, strict=True)]
        return log_probs + [math.nan] * (len(response_ids) - len(scored))

    async def alternatives(self, before: list[int], token: int, k: int) -> tuple[dict[int, float], int]:
        """Return the log-probs of the `k` most likely tokens after `before` and of `token`, and its rank. Raises EngineError."""
        body = self._body([*before, token], Sampling(1, seed=0)) | {"max_tokens": 1, "prompt_logprobs": k}
        choice = await self._request(body)
        with readable_answer(self.name):
            entries = {int(key): entry for key, entry in choice["prompt_logprobs"][-1].items()}
            best = sorted(entries, key=lambda key: (key == token and entries[key]["rank"] > k, entries[key]["rank"]))
            return {key: float(entries[key]["logprob"]) for key in best}, int(entries[token]["rank"])

    async def _complete(self, body: dict[str, Any], pauses: Sequence[float] = RETRY_PAUSES_S) -> Completion:
        choice = await self._request(body, pauses)
        with readable_answer(self.name):
            return self._completion(choice["token_ids"], choice["logprobs"], choice["finish_reason"])

    async def _request(self, body: dict[str, Any], pauses: Sequence[float] = RETRY_PAUSES_S) -> dict[str, Any]:
        """Return the choice of a completion, after retries. Raises EngineError."""
        for pause in (*pauses, None):
            try:
                answer = await self._http.post("/v1/completions", json=body)
            except httpx.TransportError as error:
                failure = first_line(error)
            else:
                if answer.status_code == 200:
                    with readable_answer(self.name):
                        choice: dict[str, Any] = answer_json(answer)["choices"][0]
                        reason = choice["finish_reason"]
                    if reason in ("stop", "length"):
                        return choice
                    failure = f"a request ended with finish_reason {reason}"
                elif answer.status_code not in BUSY:
                    raise RequestRefused(f"{self.name} rejected a request: {error_message(answer)}")
                else:
                    failure = f"{answer.status_code} {error_message(answer)}"
            if pause is None:
                break
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        self._mark_lost(failure)
        raise EngineError(f"{self.name}: {failure}")

    async def _stream(self, body: dict[str, Any], on_tokens: Callable[[list[int]], None]) -> Completion:
        token_ids: list[int] = []
        log_probs: list[float] = []
        reason = None
        with reachable(self.name):
            async with self._http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise RequestRefused(f"{self.name} rejected a request: {error_message(answer)}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    with readable_answer(self.name):
                        event = parse_json(line.removeprefix("data: "), self.name, dict)
                        if "error" in event:
                            raise EngineError(f"{self.name}: {event['error'].get('message', event['error'])}")
                        for choice in event["choices"]:
                            part = self._completion(choice["token_ids"], choice["logprobs"], choice["finish_reason"])
                            token_ids += part.token_ids
                            log_probs += part.log_probs
                            reason = choice["finish_reason"] or reason
                            on_tokens(part.token_ids)
        with readable_answer(self.name):
            if reason is None:
                raise ValueError("it ends without a finish_reason")
            return self._completion(token_ids, {"token_logprobs": log_probs}, reason)

    def _completion(self, token_ids: list[int] | None, logprobs: dict[str, Any], reason: str | None) -> Completion:
        if token_ids is None:
            raise EngineError(f"{self.name} returns no token ids: upgrade the server to vLLM 0.10.2 or later")
        finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
        log_probs = [*map(float, logprobs["token_logprobs"])]
        if not all(type(token) is int and token >= 0 for token in token_ids) or len(log_probs) != len(token_ids):
            raise ValueError("the tokens are not numbers, or do not fit their log-probs")
        return Completion(list(token_ids), log_probs, finish, self.name, self.version)

    def submit(self, requests: Iterable[tuple[list[int], Sampling]]) -> list[asyncio.Future[Completion]]:
        """Send several requests; each is retried or fails independently."""
        return [asyncio.ensure_future(self.generate(prompt_ids, sampling)) for prompt_ids, sampling in requests]

    # Weights

    async def load_weights(self, path: Path | str, version: int) -> None:
        """Load a safetensors file of the whole model into the server and reset its prefix cache.

        The server must be started with `rstar-lab serve --updatable` and be able to read the file. Requests in flight are
        paused and continue with the new weights. If this server is lost and another one works, returns at once: the
        server gets the weights when it answers again. Raises UserError or EngineError. After EngineError the server is
        lost if it does not answer or its engine is dead.
        """
        self._weights = (Path(path), version)
        if self.lost and self._other_server_works():
            return
        try:
            await self._push(self._weights)
        except EngineError as error:
            if isinstance(error, ServerUnreachable) or not await self._is_healthy():
                self._mark_lost(f"a weight update failed: {str(error).removeprefix(f'{self.name}: ')}")
                self._end_requests()
            raise

    async def _push(self, weights: tuple[Path, int]) -> None:
        """Load weights, as `load_weights`. After ServerUnreachable the server may still be paused; the next call resumes it."""
        path, version = weights
        async with self._updating:
            await self._request_control("/pause", params={"mode": "keep"})
            try:
                load = {"method": "reload_weights", "kwargs": {"weights_path": str(path.parent.resolve())}}
                await self._request_control("/collective_rpc", json=load)
                # Cached blocks hold keys and values of the old weights.
                reset = await self._request_control("/reset_prefix_cache", params={"reset_running_requests": True})
                with readable_answer(self.name):
                    done = not reset.content or answer_json(reset)["success"]  # vLLM 0.24 answers with an empty body
                if not done:
                    raise EngineError(f"{self.name}: the server did not reset its prefix cache")
                await self._request_control(VERSION_PATH, json={"version": version})
            except BaseException as error:
                if not isinstance(error, ServerUnreachable):
                    with suppress(EngineError, UserError):  # the first error is the one to report
                        await self._request_control("/resume")
                raise
            await self._request_control("/resume")
        self.version, self._loaded = version, weights

    async def _served_version(self) -> int | None:
        """Return the weight version that was sent last, or None if none was sent since the server started."""
        answer = await self._request_control(VERSION_PATH, "GET")
        with readable_answer(self.name):
            return answer_json(answer)["version"]

    async def weight_version(self) -> int | None:
        """Return the version of the weights that a trainer sent last, or None if it sent none or the server accepts none."""
        with suppress(EngineError, UserError):
            return await self._served_version()
        return None

    async def serves(self, folder: Path) -> bool:
        """Return whether the server was started with the model in `folder` and still has its weights."""
        return Path(self.root).resolve() == folder.resolve() and await self.weight_version() is None

    # Control requests

    async def _is_healthy(self) -> bool:
        """Return whether the server answers and its engine is alive."""
        with suppress(httpx.TransportError):
            return (await self._send("GET", "/health", timeout=HEALTH_TIMEOUT_S)).status_code == 200
        return False

    async def _request_control(self, path: str, method: str = "POST", **arguments: Any) -> httpx.Response:
        """Send an idempotent request. Raises EngineError, or UserError if the server does not have this path."""
        with reachable(f"{self.name}: {path}", ServerUnreachable):
            answer = await self._send(method, path, timeout=self.stall_s, **arguments)
        if answer.status_code == 404:
            raise UserError(
                f"{self.name} does not accept new weights: start it with `rstar-lab serve MODEL --updatable`"
            )
        if answer.status_code != 200:
            raise EngineError(f"{self.name}: {path}: {answer.status_code} {error_message(answer)}")
        return answer

    async def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send an idempotent request. It is sent again if the connection breaks: vLLM 0.24 closes a connection after an error
        response, and this client may send its next request on that connection."""
        with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
            return await self._http.request(method, path, **arguments)
        return await self._http.request(method, path, **arguments)

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text by the server's tokenizer. Raises EngineError."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = await self._request_control("/tokenize", json=body)
        with readable_answer(self.name):
            return [*map(int, answer_json(answer)["tokens"])]


class ModelCard(TypedDict):
    """A model of a server."""

    id: str
    max_model_len: NotRequired[int | None]
    root: NotRequired[str | None]


class _Models(TypedDict):
    data: list[ModelCard]


async def read_model_card(http: httpx.AsyncClient, url: str) -> ModelCard:
    """Return the description of a server's first model, with its `id`.

    Raises UserError if the server does not answer, rejects the token, or is not OpenAI-style.
    """
    try:
        answer = await http.get("/v1/models", timeout=30.0)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise UserError(
            f"{url} does not answer ({first_line(error)}): start it with `rstar-lab serve MODEL`, or correct the URL"
        ) from None
    if answer.status_code in (401, 403):
        raise UserError(f"{url} rejects the token: set {API_KEY} to the token that the server was started with")
    with reading(
        f"{url} is not an OpenAI-style server: /v1/models returns status {answer.status_code}", error=UserError
    ):
        return answer_json(answer, _Models)["data"][0]
