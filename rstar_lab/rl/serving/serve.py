"""`rstar-lab serve`: vLLM servers with one model, each in processes of its own; the dead and the hung are started anew, none
outlives us."""

import asyncio
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rstar_lab.errors import UserError
from rstar_lab.rl.engines.devices import environment_for, visible_gpus
from rstar_lab.rl.engines.server import API_KEY
from rstar_lab.rl.serving.auth import TOKEN
from rstar_lab.rl.serving.keeper import KILLED

CPU_ENVIRONMENT = {
    # Two spinning OpenMP threads on a busy core cost a factor of thirty: one thread a server, and it sleeps when idle.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The model runs in the engine's process, not in one more (vLLM reads this as a leave to do so; the HTTP side stays apart).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
RESTART_PAUSES_S = (0.0, 2.0, 10.0, 30.0, 60.0)  # the last for every further one; a server that was ready starts over


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and how. port: of the first server, the others follow; 0 takes free ones.

    updatable: lets who holds the token push new weights. max_model_len None: the model's own. hung_after_s: a server that has
    not answered for as long is started anew. extra: flags handed to vLLM.
    """

    model: Path
    replicas: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    updatable: bool = False
    max_model_len: int | None = None
    dtype: str = "auto"
    max_batch: int = 256
    kv_cache_gb: float = 1.0
    memory_share: float = 0.85
    tensor_parallel: int = 1
    hung_after_s: float = 120.0
    extra: tuple[str, ...] = ()


def check(options: ServeOptions) -> None:
    """Raises UserError for what would go wrong later."""
    if not (options.model / "config.json").is_file():
        raise UserError(f"model {options.model}: no folder with a config.json")
    if options.api_key is None and not _is_loopback(options.host):
        raise UserError(
            f"--host {options.host} is open to others: give a token, --api-key or the environment's {API_KEY}"
        )
    if options.api_key is None and options.updatable:
        raise UserError(
            f"--updatable lets others change the model: give a token, --api-key or the environment's {API_KEY}"
        )
    if options.updatable and not visible_gpus() and _is_tied(options.model):
        raise UserError(
            f"--updatable: {options.model} has tied embeddings, whose head vLLM on a CPU keeps at its old weights; "
            "save the model with tie_word_embeddings false"
        )
    if needed := max(0, options.replicas * options.tensor_parallel - len(visible_gpus())) if visible_gpus() else 0:
        raise UserError(
            f"--replicas {options.replicas} x --tensor-parallel {options.tensor_parallel}: {needed} GPUs too few"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_tied(model: Path) -> bool:
    return bool(json.loads((model / "config.json").read_text()).get("tie_word_embeddings"))


def take_ports(options: ServeOptions) -> list[int]:
    """The servers' ports. Raises UserError where one is taken."""
    ports = []
    with ExitStack() as bound:
        for number in range(options.replicas):
            port = options.port + number if options.port else 0
            try:
                one = bound.enter_context(socket.create_server((options.host, port)))
            except (OSError, OverflowError) as error:
                why = "is in use" if isinstance(error, OSError) and error.errno == 98 else f"cannot be used ({error})"
                raise UserError(
                    f"port {port} on {options.host} {why}: choose another --port (0 takes free ones)"
                ) from None
            ports.append(one.getsockname()[1])
    return ports


class Replica:
    """One vLLM server behind its keeper."""

    def __init__(self, number: int, port: int, options: ServeOptions, folder: Path):
        self.number, self.options = number, options
        # What listens everywhere is reached from here by loopback.
        host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
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
        command += [
            "--model",
            str(folder),
            "--served-model-name",
            folder.name,
            str(folder),
        ]  # clients know it by either
        command += ["--host", options.host, "--port", str(self.port), "--dtype", options.dtype]
        command += ["--max-num-seqs", str(options.max_batch), "--disable-uvicorn-access-log"]
        # Log-probs of the distribution drawn from; tool calls as OpenAI's clients expect them.
        command += [
            "--logprobs-mode",
            "processed_logprobs",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ]
        command += ["--generation-config", "vllm"]  # no sampling defaults from the model's folder
        if options.max_model_len:
            command += ["--max-model-len", str(options.max_model_len)]
        if options.api_key:
            command += ["--middleware", "rstar_lab.rl.serving.auth.TokenGuard"]
        if visible_gpus():
            command += ["--gpu-memory-utilization", str(options.memory_share)]
            command += ["--tensor-parallel-size", str(options.tensor_parallel)]
        else:
            command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
            command += ["--kv-cache-memory-bytes", str(int(options.kv_cache_gb * 2**30))]
            # As in `engines.engine_options`: on a CPU the draws of a seed hold only for prompts computed whole.
            command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(8192, self.context))]
        return [*command, *options.extra]

    @property
    def context(self) -> int:
        config = json.loads((self.options.model / "config.json").read_text())
        return self.options.max_model_len or config.get("max_position_embeddings", 8192)

    def environment(self) -> dict[str, str]:
        own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        own["VLLM_SERVER_DEV_MODE"] = "1" if self.options.updatable else "0"
        if self.options.api_key:
            own[TOKEN] = self.options.api_key
        if gpus := visible_gpus():
            first = self.number * self.options.tensor_parallel
            own |= environment_for(gpus[first : first + self.options.tensor_parallel])
        else:
            own |= CPU_ENVIRONMENT
        kept = {key: value for key, value in os.environ.items() if key not in (API_KEY, "VLLM_API_KEY")}
        return kept | own

    @property
    def pid(self) -> int | None:
        """Of the keeper, whose process group is the server's."""
        return self._keeper.pid if self._keeper else None

    async def lost(self) -> str:
        """Wait until it has ended or hangs; says why."""
        assert self._keeper
        heard = time.monotonic()
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while self._keeper.returncode is None:
                if await self._answers(client):
                    heard = time.monotonic()
                elif time.monotonic() - heard > self.options.hung_after_s:
                    return f"no answer for {self.options.hung_after_s:.0f} s"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._keeper.wait(), 5.0)
        return last_error(self.log)

    async def ready(self) -> None:
        """Wait until it serves. Raises UserError where it ends before."""
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while self._keeper and self._keeper.returncode is None:
                if await self._answers(client):
                    return
                await asyncio.sleep(0.25)
        raise UserError(f"server {self.number} ended while it started: {last_error(self.log)} (log: {self.log})")

    async def _answers(self, client: httpx.AsyncClient) -> bool:
        with suppress(httpx.TransportError):
            return (await client.get(f"{self.url}/health")).status_code == 200
        return False

    def let_go(self) -> None:
        """Have the keeper end the server: at once it begins, within seconds it is over."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    async def aclose(self) -> None:
        self.let_go()
        if self._keeper:
            await self._keeper.wait()


def last_error(log: Path) -> str:
    """What a server said last before it ended, of its lines the one that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [re.sub(r"^\(\w+ pid=\d+\)\s*(?:\w+ [\d-]+ [\d:]+ \[[^]]*\]\s*)?", "", line) for line in lines]
    if lines and lines[-1].startswith(KILLED):
        return lines[-1]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    specific = [line for line in errors if "Engine core initialization failed" not in line]
    return (specific or errors or lines or ["it said nothing"])[-1][:300]


@asynccontextmanager
async def serving(
    options: ServeOptions, say: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
) -> AsyncIterator[list[Replica]]:
    """Servers that are ready, until the block ends; one that dies or hangs is started again. Raises UserError.

    say: told of what happens meanwhile, as (event, fields).
    """
    check(options)
    folder = Path(tempfile.mkdtemp(prefix="rstar-lab-serve-"))
    replicas = [Replica(number, port, options, folder) for number, port in enumerate(take_ports(options))]
    watchers: list[asyncio.Task[None]] = []
    keep_logs = True
    try:
        for replica in replicas:
            await replica.spawn()
        await _all_ready(replicas)
        keep_logs = False
        watchers = [asyncio.create_task(_watch(replica, say)) for replica in replicas]
        yield replicas
    finally:
        for watcher in watchers:
            watcher.cancel()
        for replica in replicas:
            replica.let_go()
        await asyncio.gather(*(replica.aclose() for replica in replicas))
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)


async def _all_ready(replicas: Sequence[Replica]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(replica.ready())
    except* UserError as several:
        raise several.exceptions[0] from None


async def _watch(replica: Replica, say: Callable[[str, dict[str, Any]], None]) -> None:
    in_a_row = 0
    while True:
        say("died", {"url": replica.url, "error": await replica.lost()})
        await replica.aclose()
        await asyncio.sleep(RESTART_PAUSES_S[min(in_a_row, len(RESTART_PAUSES_S) - 1)])
        replica.restarts += 1
        await replica.spawn()
        try:
            await replica.ready()
        except UserError:
            in_a_row += 1
        else:
            in_a_row = 0
            say("restarted", {"url": replica.url, "restarts": replica.restarts})


async def serve_command(options: ServeOptions, as_json: bool) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError."""

    def say(event: str, fields: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps({"event": event} | fields), flush=True)
        elif event == "died":
            print(f"server {fields['url']} died ({fields['error']}); starting it again", flush=True)
        else:
            print(f"server {fields['url']} is back", flush=True)

    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        check(options)
        if not as_json:
            print(f"starting {options.replicas} x {options.model} ...", flush=True)
        async with serving(options, say) as replicas:
            urls = [replica.url for replica in replicas]
            if as_json:
                name = options.model.resolve().name
                print(
                    json.dumps({"urls": urls, "model": name, "pids": [replica.pid for replica in replicas]}), flush=True
                )
            else:
                print(f"ready: {' '.join(urls)}   (Ctrl-C ends {'it' if len(urls) == 1 else 'them'})", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass  # asked to end
