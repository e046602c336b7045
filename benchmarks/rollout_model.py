"""`rstar-lab bench rollout --model NAME`: tokens per second of our engines with a pretrained model, compared with a plain vLLM
server and with transformers' `generate`, for the same requests in float32.

A request is a prompt of the paper's format and 64 tokens at temperature 1; all requests are sent at once. Every peer has the cores
of the machine. The server is `vllm.entrypoints.openai.api_server`, and gets token ids.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import Sampling
from rstar_lab.rl.engines.group import open_engines
from rstar_lab.rl.models.model import load_model, load_tokenizer
from rstar_lab.rl.models.sources import get_model
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.paper import CODE_TOOL, PaperRenderer, control_tokens
from rstar_lab.rl.synthetic import families

REQUESTS, TOKENS, CONTEXT, START_S = 16, 64, 1024, 900
Generate = Callable[[list[list[int]]], Awaitable[int]]


def model_lines(model: str) -> Iterator[dict[str, Any]]:
    """Yield one line per peer: our tokens per second, and how many times those of the peer. model: folder or name."""
    folder = get_model(model).resolve()
    tokenizer = load_tokenizer(folder)
    renderer = PaperRenderer(PromptStyle("paper"), control_tokens(tokenizer))
    questions = [problem.question for problem in families.synthesize(0, REQUESTS)]
    texts = [renderer.prompt(question, [CODE_TOOL]) for question in questions]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name:
        rates = asyncio.run(_rates(folder, Path(name), prompts))
    for peer in ("vllm serve", "transformers generate"):
        yield {
            "name": f"rollout_model_{peer.split()[0]}",
            "value": rates["ours"],
            "unit": "tokens/s",
            "against": f"{peer}, {rates[peer]:.0f} tokens/s",
            "ratio": rates["ours"] / rates[peer],
            "n": REQUESTS,
        }


async def _rates(folder: Path, work_dir: Path, prompts: list[list[int]]) -> dict[str, float]:
    """Return the tokens per second of each peer. All are started before the first measurement and measured twice, in turn."""
    loaded = load_model(folder, _float32()).eval()
    section = EngineSection(dtype="float32", kv_cache_gb=0.5)
    with _vllm_server(folder, work_dir / "server.log") as url:
        async with open_engines(section, folder, work_dir, CONTEXT) as group:
            await group.load_folder(folder)

            async def ours(batch: list[list[int]]) -> int:
                engines = itertools.cycle(group.engines)
                calls = (
                    engine.generate(prompt, Sampling(TOKENS)) for engine, prompt in zip(engines, batch, strict=False)
                )
                return sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))

            async def server(batch: list[list[int]]) -> int:
                return await _complete(url, batch)

            async def transformers(batch: list[list[int]]) -> int:
                return await asyncio.to_thread(_generate, loaded, batch)

            peers: dict[str, Generate] = {"ours": ours, "vllm serve": server, "transformers generate": transformers}
            tokens, seconds = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0.0)
            for generate in peers.values():
                await generate(prompts[:2])  # warm-up
            for name in (*peers, *reversed(peers)):  # so that a change of the machine's speed affects all
                started = time.monotonic()
                tokens[name] += await peers[name](prompts)
                seconds[name] += time.monotonic() - started
    return {name: tokens[name] / seconds[name] for name in peers}


def _float32() -> Any:
    import torch

    return torch.float32


@contextmanager
def _vllm_server(folder: Path, log: Path) -> Iterator[str]:
    """Run vLLM's own server of the model. Yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32",
               "--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(CONTEXT), "--served-model-name", "m"]  # fmt: skip
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    import httpx

    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield url
    except httpx.HTTPStatusError as error:
        lines = log.read_text().splitlines()
        causes = [line for line in lines if "Error" in line and "HTTP/1.1" not in line] or lines
        raise UserError(f"bench rollout: the vLLM server: {error}; its log has\n" + "\n".join(causes[-10:])) from error
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise UserError(f"bench rollout: the vLLM server did not start: {log.read_text()[-300:]}")


async def _complete(url: str, batch: list[list[int]]) -> int:
    import httpx

    async with httpx.AsyncClient(timeout=3600) as client:
        # Without a seed: on a CPU, vLLM's server fails if a request has a seed and its prompt is prefilled in chunks.
        bodies = [
            {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
            for prompt in batch
        ]
        replies = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for body in bodies))
    return sum(reply.raise_for_status().json()["usage"]["completion_tokens"] for reply in replies)


def _generate(model: Any, batch: list[list[int]]) -> int:
    import torch

    width = max(map(len, batch))
    ids_BT = torch.zeros((len(batch), width), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(batch):  # padded on the left
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    end = model.generation_config.eos_token_id
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=0
        )[:, width:].tolist()
    ends = end if isinstance(end, list) else [end]
    return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in out)
