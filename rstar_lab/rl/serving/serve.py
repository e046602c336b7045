"""`rstar-lab serve`: vLLM servers for one model. A server that dies or hangs is restarted. All servers end with this
process."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rstar_lab.common.errors import UserError
from rstar_lab.common.service_tokens import LOOPBACK, published_token
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.rl.engines.devices import CPU_THREADS, end_of_log, environment_for, visible_gpus
from rstar_lab.rl.engines.server import API_KEY
from rstar_lab.rl.models.config_facts import context_length
from rstar_lab.rl.models.model import chat_template_of, load_tokenizer
from rstar_lab.rl.models.model_folder import has_tied_embeddings
from rstar_lab.rl.models.sources import check_files, read_config
from rstar_lab.rl.renderers.formats import RENDERERS
from rstar_lab.rl.serving.keeper import KILLED
from rstar_lab.rl.serving.middleware import TOKEN
from rstar_lab.untrusted.files import read_text

# VLLM_ENABLE_V1_MULTIPROCESSING: run the model in the engine process. The HTTP server stays a separate process.
CPU_ENVIRONMENT = CPU_THREADS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
CHAT_TEMPLATE_FILE = "chat_template.jinja"
# Pauses before the first, second ... consecutive restart; further restarts use the last value.
RESTART_PAUSES_S = (0.0, 2.0, 10.0, 30.0, 60.0)
HUNG_AFTER_S = 120.0  # a server that does not answer for this long is restarted


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `rstar-lab serve`.

    replicas: number of servers. port: port of the first server; the others use the next ports. 0: free ports. api_key:
    token that requests must have; None: one is made for each server, in a file where clients of this user find it
    (service_tokens.py). updatable: accept new weights from clients with the token.
    max_model_len: maximum number of prompt plus response tokens; None: the model's own. dtype: `auto`: the model's on a
    GPU, float32 on a CPU, because vLLM's bfloat16 kernels use instructions that some processors do not have.
    tensor_parallel: GPUs per server. own_token: make a token if there is no `api_key`. prompt_format: `paper` or `released`:
    use the chat template of this format; None: the model's own. extra: further options of vLLM.
    """

    model: Path
    replicas: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    updatable: bool = False
    max_model_len: int | None = None
    dtype: str = "auto"
    tensor_parallel: int = 1
    prompt_format: str | None = None
    extra: tuple[str, ...] = ()
    own_token: bool = True


def check_options(options: ServeOptions) -> None:
    """Raise UserError for options that cannot work."""
    formats = [name for name, renderer in RENDERERS.items() if renderer.has_template]
    if options.prompt_format not in (None, *formats):
        raise UserError(f"--prompt-format {options.prompt_format}: choose from {', '.join(formats)}")
    if not (options.model / "config.json").is_file():
        raise UserError(f"model {options.model}: no folder with a config.json")
    if options.model.resolve().name.startswith("-"):
        raise UserError(f"model {options.model}: vLLM reads the name of the folder as an option; rename the folder")
    check_files(options.model)
    if options.api_key is None and options.host not in LOOPBACK:
        raise UserError(
            f"--host {options.host} can be reached by others: set a token with --api-key or the environment variable {API_KEY}"
        )
    if options.api_key is None and options.updatable:
        raise UserError(
            f"--updatable lets clients change the model: set a token with --api-key or the environment variable {API_KEY}"
        )
    if options.updatable and not visible_gpus() and has_tied_embeddings(options.model):
        raise UserError(
            f"--updatable: {options.model} has tied embeddings, and vLLM on a CPU does not update their head; "
            "save the model with tie_word_embeddings: false"
        )
    if missing := max(0, options.replicas * options.tensor_parallel - len(visible_gpus())) if visible_gpus() else 0:
        raise UserError(
            f"--replicas {options.replicas} x --tensor-parallel {options.tensor_parallel}: {missing} GPUs are missing"
        )


def reserve_ports(options: ServeOptions) -> list[int]:
    """Return the ports of the servers. Raises UserError if one is in use."""
    ports = []
    with ExitStack() as bound:
        for number in range(options.replicas):
            port = options.port + number if options.port else 0
            try:
                listener = bound.enter_context(socket.create_server((options.host, port)))
            except (OSError, OverflowError) as error:
                reason = (
                    "is in use" if isinstance(error, OSError) and error.errno == 98 else f"cannot be used ({error})"
                )
                raise UserError(
                    f"port {port} on {options.host} {reason}: choose another --port (0: free ports)"
                ) from None
            ports.append(listener.getsockname()[1])
    return ports


class Replica:
    """One vLLM server, supervised by a keeper process."""

    def __init__(self, number: int, port: int, options: ServeOptions, folder: Path):
        self.number, self.options = number, options
        # A server that listens on all addresses is reached over loopback.
        host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.token = options.api_key or ""
        self.token_file: Path | None = None  # with a token that is made at the start
        self.port, self.log = port, folder / f"server-{number}.log"
        self.restarts = 0
        self._keeper: asyncio.subprocess.Process | None = None
        self._life = -1

    async def spawn(self) -> None:
        life, self._life = os.pipe()
        try:
            with self.log.open("ab") as output:
                self._keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "rstar_lab.rl.serving.keeper", str(life), *self.command()),
                    pass_fds=(life,),
                    env=self.environment(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        finally:
            os.close(life)

    def command(self) -> list[str]:
        options = self.options
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        folder = options.model.resolve()
        # Requests may use the name or the path of the folder.
        command += ["--model", str(folder), "--served-model-name", folder.name, str(folder)]
        dtype = "float32" if options.dtype == "auto" and not visible_gpus() else options.dtype
        command += ["--host", options.host, "--port", str(self.port), "--dtype", dtype]
        command += ["--max-num-seqs", "256", "--disable-uvicorn-access-log"]
        # Log-probs of the sampled distribution; tool calls in the format of OpenAI clients.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--generation-config", "vllm"]  # ignore the sampling defaults in the model's folder
        if options.prompt_format:
            command += ["--chat-template", str(self.log.parent / CHAT_TEMPLATE_FILE)]
        if options.max_model_len:
            command += ["--max-model-len", str(options.max_model_len)]
        if options.updatable:
            command += ["--middleware", "rstar_lab.rl.serving.middleware.WeightVersion"]
        if self.token:  # last, because vLLM runs the last middleware first
            command += ["--middleware", "rstar_lab.rl.serving.middleware.TokenGuard"]
        if visible_gpus():
            command += ["--gpu-memory-utilization", "0.85"]
            command += ["--tensor-parallel-size", str(options.tensor_parallel)]
        else:
            command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
            command += ["--kv-cache-memory-bytes", str(2**30)]
            # On a CPU, seeded sampling is reproducible only without chunked prefill (see
            # `engines.group.engine_options`).
            tokens = max(8192, options.max_model_len or context_length(read_config(options.model)) or 0)
            command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
        return [*command, *options.extra]

    def environment(self) -> dict[str, str]:
        variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        variables["TMPDIR"] = str(self.log.parent)  # vLLM does not remove its sockets and rendezvous files
        variables["VLLM_SERVER_DEV_MODE"] = "1" if self.options.updatable else "0"
        if self.token:
            variables[TOKEN] = self.token
        if gpus := visible_gpus():
            first = self.number * self.options.tensor_parallel
            variables |= environment_for(gpus[first : first + self.options.tensor_parallel])
        else:
            variables |= CPU_ENVIRONMENT
        kept = {key: value for key, value in os.environ.items() if key not in (API_KEY, "VLLM_API_KEY")}
        return kept | variables

    @property
    def pid(self) -> int | None:
        """Process id of the keeper, which is also the process group of the server."""
        return self._keeper.pid if self._keeper else None

    async def wait_until_lost(self) -> str:
        """Wait until the server has ended or hangs; return an error message."""
        assert self._keeper
        answered_at = time.monotonic()
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while self._keeper.returncode is None:
                if await self._answers(client):
                    answered_at = time.monotonic()
                elif time.monotonic() - answered_at > HUNG_AFTER_S:
                    return f"no answer for {HUNG_AFTER_S:.0f} s"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._keeper.wait(), 5.0)
        return last_error(self.log)

    async def wait_until_ready(self) -> None:
        """Wait until the server answers. Raises UserError if it ends before that."""
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while self._keeper and self._keeper.returncode is None:
                if await self._answers(client):
                    return
                await asyncio.sleep(0.25)
        raise UserError(f"server {self.number} ended while it started: {last_error(self.log)}{end_of_log(self.log)}")

    async def _answers(self, client: httpx.AsyncClient) -> bool:
        with suppress(httpx.TransportError):
            return (await client.get(f"{self.url}/health")).status_code == 200
        return False

    def end(self) -> None:
        """Make the keeper end the server. Returns at once; the server ends within seconds."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    async def aclose(self) -> None:
        self.end()
        if self._keeper:
            await self._keeper.wait()


def last_error(log: Path) -> str:
    """Return the last line of a server's log that names an error, else its last line."""
    lines = [line.strip() for line in read_text(log, errors="replace").splitlines() if line.strip()]
    lines = [re.sub(r"^\(\w+ pid=\d+\)\s*(?:\w+ [\d-]+ [\d:]+ \[[^]]*\]\s*)?", "", line) for line in lines]
    if lines and lines[-1].startswith(KILLED):
        return lines[-1]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    specific = [line for line in errors if "Engine core initialization failed" not in line]
    return (specific or errors or lines or ["no output"])[-1][:300]


@asynccontextmanager
async def serving(
    options: ServeOptions, on_event: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
) -> AsyncIterator[list[Replica]]:
    """Start servers, yield them when all are ready, and end them after the block. Restarts a server that dies or hangs.

    on_event: called with ("died", fields) and ("restarted", fields). Raises UserError if a server does not start.
    """
    check_options(options)
    locked = LockedFolder("serve")
    folder = locked.path
    if options.prompt_format:
        template = chat_template_of(load_tokenizer(options.model), options.prompt_format)
        (folder / CHAT_TEMPLATE_FILE).write_text(template)
    replicas = [Replica(number, port, options, folder) for number, port in enumerate(reserve_ports(options))]
    watchers: list[asyncio.Task[None]] = []
    tokens = ExitStack()
    try:
        for replica in replicas:
            if not replica.token and options.own_token:
                replica.token, replica.token_file = tokens.enter_context(published_token(options.host, replica.port))
            await replica.spawn()
        await asyncio.gather(*(replica.wait_until_ready() for replica in replicas))
        watchers = [asyncio.create_task(_watch(replica, on_event)) for replica in replicas]
        yield replicas
    finally:
        for watcher in watchers:
            watcher.cancel()
        for replica in replicas:
            replica.end()
        await asyncio.gather(*(replica.aclose() for replica in replicas))
        tokens.close()
        if not watchers:  # the error names a log
            locked.keep()
        locked.cleanup()


async def _watch(replica: Replica, on_event: Callable[[str, dict[str, Any]], None]) -> None:
    failed_starts = 0
    while True:
        on_event("died", {"url": replica.url, "error": await replica.wait_until_lost()})
        await replica.aclose()
        await asyncio.sleep(RESTART_PAUSES_S[min(failed_starts, len(RESTART_PAUSES_S) - 1)])
        replica.restarts += 1
        await replica.spawn()
        failed_starts += 1
        with suppress(UserError):
            await replica.wait_until_ready()
            failed_starts = 0
            on_event("restarted", {"url": replica.url, "restarts": replica.restarts})


async def serve_command(options: ServeOptions, as_json: bool) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError if the servers cannot start."""

    def print_event(event: str, fields: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps({"event": event} | fields), flush=True)
        elif event == "died":
            print(f"server {fields['url']} died ({fields['error']}); restarting it", flush=True)
        else:
            print(f"server {fields['url']} is ready again", flush=True)

    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):  # a signal arrived
        check_options(options)
        if not as_json:
            print(f"starting {options.replicas} x {options.model} ...", flush=True)
        async with serving(options, print_event) as replicas:
            urls = [replica.url for replica in replicas]
            if as_json:
                pids = [replica.pid for replica in replicas]
                print(json.dumps({"urls": urls, "model": options.model.resolve().name, "pids": pids}), flush=True)
            else:
                for replica in (replica for replica in replicas if replica.token_file):
                    print(f"for OpenAI clients: {replica.url}/v1, API key in {replica.token_file}", flush=True)
                print(f"ready: {' '.join(urls)}   (Ctrl-C ends {'it' if len(urls) == 1 else 'them'})", flush=True)
            await asyncio.Event().wait()
