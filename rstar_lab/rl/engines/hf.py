"""An engine that runs transformers' `generate` in this process, one batch after the other. For machines without vLLM.

It is slower (see `rstar-lab bench rollout`). Each request has its own random generator, so its tokens do not depend on the
rest of the batch, up to rounding.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rstar_lab.rl.engine import Completion, EngineError, FinishReason, Sampling
from rstar_lab.rl.engines.weights import read_weights
from rstar_lab.rl.models.config_facts import context_length
from rstar_lab.rl.models.model import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnTokens = Callable[[list[int]], None]
Request = tuple[list[int], Sampling, asyncio.Future[Completion], OnTokens | None]


class HfEngine:
    """An engine in this process. Requests that arrive while a batch is generated wait for the next batch.

    max_batch: maximum number of requests in a batch.
    """

    def __init__(self, *, max_batch: int = 64):
        self.name, self.max_batch, self.kv_tokens = "transformers", max_batch, 10**9
        self._queue: list[Request] = []
        self._batches: asyncio.Task[None] | None = None
        self._generating = asyncio.Lock()  # held during a batch and while weights are loaded
        self._version = 0

    async def start(self, model: Path | str, options: dict[str, Any]) -> None:
        """Load the model. options: the key dtype is used. Raises UserError if the model cannot be loaded."""
        dtype = getattr(torch, options["dtype"])
        self._model: PreTrainedModel = await asyncio.to_thread(load_model, model, dtype)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
        self._model.eval()

    async def aclose(self) -> None:
        if self._batches:
            self._batches.cancel()
        for _, _, future, _ in self._queue:
            if not future.done():
                future.set_exception(EngineError(f"{self.name} was closed"))
        self._queue.clear()

    def submit(
        self, requests: Iterable[tuple[list[int], Sampling]], on_tokens: OnTokens | None = None
    ) -> list[asyncio.Future[Completion]]:
        loop = asyncio.get_running_loop()
        futures = []
        for prompt_ids, sampling in requests:
            future: asyncio.Future[Completion] = loop.create_future()
            futures.append(future)
            if len(prompt_ids) >= self._positions:  # as a vLLM server: an empty completion
                future.set_result(Completion([], [], FinishReason.LENGTH, self.name, self._version))
            else:
                self._queue.append((prompt_ids, sampling, future, on_tokens))
        if self._batches is None or self._batches.done():
            self._batches = loop.create_task(self._run_batches())
        return futures

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Sample one completion. on_tokens: called in the event loop with each new token."""
        (future,) = self.submit([(prompt_ids, sampling)], on_tokens)
        return await future

    @property
    def _positions(self) -> int:
        """Maximum tokens of a sequence."""
        return context_length(self._model.config) or 2**20

    async def load_weights(self, path: Path | str, version: int) -> None:
        """Load a safetensors file of the whole model after the current batch."""
        async with self._generating:
            self._model.load_state_dict(read_weights(path), strict=not self._model.config.tie_word_embeddings)
            self._version = version

    async def _run_batches(self) -> None:
        while self._queue:
            batch = [request for request in self._queue[: self.max_batch] if not request[2].done()]
            del self._queue[: self.max_batch]
            if not batch:
                continue
            loop = asyncio.get_running_loop()
            try:
                async with self._generating:
                    completions = await asyncio.to_thread(self._generate, batch, loop.call_soon_threadsafe)
            except Exception as error:
                for _, _, future, _ in batch:
                    if not future.done():
                        future.set_exception(EngineError(f"{self.name}: {error}"))
                continue
            for (_, _, future, _), completion in zip(batch, completions, strict=True):
                if not future.done():
                    future.set_result(completion)

    @torch.no_grad()
    def _generate(self, batch: list[Request], call_in_loop: Callable[..., Any]) -> list[Completion]:
        device = self._model.device
        width = max(len(prompt) for prompt, *_ in batch)
        ids_BT = torch.zeros((len(batch), width), dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for row, (prompt, *_) in enumerate(batch):
            ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, width - len(prompt) :] = 1
        limit = max(sampling.max_tokens for _, sampling, *_ in batch)
        limit = min(limit, self._positions - width)
        sampler = _Sampler(batch, call_in_loop)
        stops = sorted({token for _, sampling, *_ in batch for token in sampling.stop_token_ids})
        out = self._model.generate(  # type: ignore[operator]
            input_ids=ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            max_new_tokens=limit,
            do_sample=False,  # `sampler` draws the token and sets the logits of all others to -inf
            logits_processor=[sampler],
            stopping_criteria=[sampler.abandoned],
            eos_token_id=stops or None,
            pad_token_id=0,
        )
        completions = []
        for row, (_, sampling, *_) in enumerate(batch):
            tokens = out[row, width:].tolist()[: sampling.max_tokens]
            end = next((i + 1 for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
            tokens = tokens[:end]
            reason = FinishReason.LENGTH if end is None else FinishReason.STOP
            log_probs = [step[row] for step in sampler.log_probs[: len(tokens)]]
            completions.append(Completion(tokens, log_probs, reason, self.name, self._version))
        return completions


class _Sampler:
    """A logits processor that samples a token per row, with one generator per row, and records its log-prob."""

    def __init__(self, batch: list[Request], call_in_loop: Callable[..., Any]):
        from transformers import TopPLogitsWarper

        self.batch, self.call_in_loop = batch, call_in_loop
        self.samplings = samplings = [sampling for _, sampling, *_ in batch]
        self.nuclei = [TopPLogitsWarper(sampling.top_p) for sampling in samplings]
        self.generators = [torch.Generator() for _ in samplings]
        for generator, sampling in zip(self.generators, samplings, strict=True):
            generator.manual_seed(sampling.seed) if sampling.seed is not None else generator.seed()
        self.log_probs: list[list[float]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        step_log_probs = []
        for row, (sampling, generator) in enumerate(zip(self.samplings, self.generators, strict=True)):
            logits_V = scores[row].float().cpu()
            if sampling.temperature == 0:
                token = int(logits_V.argmax())
                log_probs_V = logits_V.log_softmax(-1)
            else:
                log_probs_V = (logits_V / sampling.temperature).log_softmax(-1)
                if sampling.top_p < 1:
                    log_probs_V = self.nuclei[row](input_ids, log_probs_V[None])[0].log_softmax(-1)
                token = int(torch.multinomial(log_probs_V.exp(), 1, generator=generator))
            forced[row, token] = 0.0
            step_log_probs.append(float(log_probs_V[token]))
            if on_tokens := self.batch[row][3]:
                self.call_in_loop(on_tokens, [token])
        self.log_probs.append(step_log_probs)
        return forced

    def abandoned(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.Tensor:
        """Stop the batch when all its requests were cancelled."""
        cancelled = all(future.done() for _, _, future, _ in self.batch)
        return torch.full((len(self.batch),), cancelled, device=input_ids.device, dtype=torch.bool)
