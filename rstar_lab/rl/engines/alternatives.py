"""The most likely next tokens of a model, for a position of a stored rollout. Used by `Inspector.alternatives`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.rl.models.model import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Alternatives:
    """token_id: the stored token. log_probs: token id to log-prob at temperature 1, of the `k` most likely tokens, most likely
    first, and of the stored token. rank: rank of the stored token, from 1. weights: the model folder or URL."""

    token_id: int
    log_probs: dict[int, float]
    rank: int
    weights: str


def most_likely_tokens(before: list[int], token: int, *, k: int, model: Path | None, url: str = "") -> Alternatives:
    """Return the `k` most likely tokens after the tokens `before`, and those of `token`.

    model: model folder, evaluated with transformers in float32. The last model stays in memory. url: vLLM server to use
    instead; by default, a server returns at most 20 tokens. Raises UserError if the model or server cannot be used, or
    if k is below 1.
    """
    if k < 1:
        raise UserError(f"k must be at least 1, got {k}")
    if url:
        with ThreadPoolExecutor(1) as thread:  # a notebook's thread already runs an event loop
            log_probs, rank = thread.submit(lambda: asyncio.run(_ask_server(url, before, token, k))).result()
        return Alternatives(token, log_probs, rank, url)
    if model is None:
        raise UserError("give a model folder or the URL of a server")
    network = _load(model, max((path.stat().st_mtime_ns for path in model.glob("*.safetensors")), default=0))
    size = network.get_input_embeddings().num_embeddings
    if max(*before, token) >= size:
        raise UserError(
            f"{model} has {size} tokens, the rollout has token {max(*before, token)}: choose a model with the same tokenizer"
        )
    with torch.inference_mode():
        ids = torch.tensor([before], device=network.device)
        row = network(input_ids=ids, logits_to_keep=1).logits[0, -1].float().log_softmax(-1).cpu()
    best = row.topk(min(k, len(row))).indices.tolist()
    log_probs = {number: float(row[number]) for number in [*best, token]}
    return Alternatives(token, log_probs, int((row > row[token]).sum()) + 1, str(model))


@lru_cache(maxsize=1)
def _load(folder: Path, _modified: int) -> "PreTrainedModel":
    """Load a model. _modified: time of the last change of its weights; a change loads the model again."""
    model = load_model(folder, torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return model.eval()


async def _ask_server(url: str, before: list[int], token: int, k: int) -> tuple[dict[int, float], int]:
    async with aclosing(ServerEngine(url)) as server:
        await server.start()
        try:
            return await server.alternatives(before, token, k)
        except EngineError as error:
            raise UserError(str(error)) from None
