"""The policy's forward pass: log-probs and entropy of a response's own tokens, without a batch x length x vocabulary tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rstar_lab.rl.trajectory import Trajectory

CHUNK_LOGITS = 64 * 2**20  # logits held at once, in numbers


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences, padded on the right. B sequences, T tokens of prompt and response.

    index: their places in the batch they were cut from (B,); ids_BT; mask_BT: True where a token is the model's own, and so
    predicted by the token before it (False in column 0).
    """

    index: list[int]
    ids_BT: Tensor
    mask_BT: Tensor

    def scatter(self, rows: Sequence[Sequence[float]], prompts: Sequence[int]) -> Tensor:
        """Per-response arrays of the whole batch as (B, T), 0 where there is none; prompts: prompt lengths."""
        out = torch.zeros(self.ids_BT.shape)
        for row, i in enumerate(self.index):
            out[row, prompts[i] : prompts[i] + len(rows[i])] = torch.as_tensor(rows[i], dtype=torch.float32)
        return out


def micro_batches(batch: Sequence[Trajectory], max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Cut a batch by length, so that little is padded; each has at most `max_tokens` padded tokens, or one sequence."""
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in batch]
    order = sorted(range(len(batch)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, max_tokens // lengths[order[start]])
        index = order[start : start + size]
        start += size
        width = lengths[index[0]]
        ids = torch.zeros((len(index), width), dtype=torch.long)
        mask = torch.zeros((len(index), width), dtype=torch.bool)
        for row, i in enumerate(index):
            prompt = len(batch[i].prompt_ids)
            ids[row, : lengths[i]] = torch.tensor(batch[i].prompt_ids + batch[i].response_ids)
            mask[row, prompt : lengths[i]] = torch.tensor(batch[i].loss_mask, dtype=torch.bool)
        yield MicroBatch(index, ids.to(device), mask.to(device))


def log_probs_and_entropy(
    model: PreTrainedModel, micro: MicroBatch, temperature: float = 1.0, *, fp32_head: bool = False
) -> tuple[Tensor, Tensor]:
    """Of each own token under the model: (log_probs_BT, entropy_BT), float32, 0 where the mask is False.

    Padding is on the right and attention causal, so no attention mask is needed. Gradients flow through the log-probs only.
    fp32_head: the LM head's product in float32 whatever the rest runs in (ScaleRL, arXiv 2510.13786).
    """
    hidden_BTH = model.model(input_ids=micro.ids_BT, use_cache=False).last_hidden_state
    before = micro.mask_BT.roll(-1, dims=1)  # the positions whose next token is the model's own
    hidden_NH, target_N = hidden_BTH[before], micro.ids_BT[micro.mask_BT]
    chunk = max(1, CHUNK_LOGITS // model.lm_head.weight.shape[0])
    pieces = []
    for hidden, target in zip(hidden_NH.split(chunk), target_N.split(chunk), strict=True):
        if len(target_N) > chunk and torch.is_grad_enabled():
            pieces.append(
                checkpoint(_token_stats, model.lm_head, hidden, target, temperature, fp32_head, use_reentrant=False)
            )
        else:
            pieces.append(_token_stats(model.lm_head, hidden, target, temperature, fp32_head))
    log_probs_BT = torch.zeros(micro.ids_BT.shape, device=micro.ids_BT.device)
    entropy_BT = torch.zeros_like(log_probs_BT)
    if pieces:
        log_probs_BT = log_probs_BT.index_put((micro.mask_BT,), torch.cat([piece[0] for piece in pieces]))
        entropy_BT = entropy_BT.index_put((micro.mask_BT,), torch.cat([piece[1] for piece in pieces]).detach())
    return log_probs_BT, entropy_BT


def _token_stats(
    head: torch.nn.Linear, hidden_NH: Tensor, target_N: Tensor, temperature: float, fp32_head: bool
) -> tuple[Tensor, Tensor]:
    if fp32_head:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            logits_NV = torch.nn.functional.linear(hidden_NH.float(), head.weight.float()) / temperature
    else:
        logits_NV = head(hidden_NH).float() / temperature
    log_probs_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
    return log_probs_NV.gather(-1, target_N[:, None])[:, 0], entropy_N
