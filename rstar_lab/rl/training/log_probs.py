"""The policy's forward pass: log-probs and entropy of a response's own tokens, without a batch x length x vocabulary tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rstar_lab.rl.training.data_parallel import SINGLE_RANK, Ranks
from rstar_lab.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = 64 * 2**20  # logits held at once, in numbers
# Responses to one prompt share a row that holds the prompt once, up to this many tokens: past it, attention over
# strangers in the row costs more than the prompts that are saved.
SHARED_WIDTH = 256
# A micro-batch of so many tokens is enough to keep a machine busy: from there on it ends where rows get shorter.
ENOUGH_TOKENS, MAX_PADDING = 4096, 0.05
CPU_TOKENS = 1024  # on a CPU one of half as many is enough, and one of more leaves the caches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences, and the rows in which the model reads them. B sequences, T tokens of prompt and response, N own
    tokens, R rows of W tokens.

    index: the sequences' places in the batch they were cut from (B,); ids_BT: padded on the right; mask_BT: True where a
    token is the model's own, and so predicted by the token before it (False in column 0).
    row_ids_RW, positions_RW: each row is a prompt and one or more of its responses. attention_R1WW: True where a token may
    look, None where that is plain causal attention. before_N: for each own token, in mask_BT's order, the flat place in
    the rows of the token before it.
    """

    index: list[int]
    ids_BT: Tensor
    mask_BT: Tensor
    row_ids_RW: Tensor
    positions_RW: Tensor
    attention_R1WW: Tensor | None
    before_N: Tensor

    def scatter(self, rows: Sequence[Sequence[float]], prompts: Sequence[int]) -> Tensor:
        """Per-response arrays of the whole batch as (B, T), 0 where there is none; prompts: prompt lengths."""
        out = torch.zeros(self.ids_BT.shape)
        for row, i in enumerate(self.index):
            out[row, prompts[i] : prompts[i] + len(rows[i])] = torch.as_tensor(rows[i], dtype=torch.float32)
        return out


def micro_batches(
    batch: Sequence[Trajectory],
    max_tokens: int,
    device: torch.device,
    *,
    share: bool = True,
    ranks: Ranks = SINGLE_RANK,
) -> Iterator[MicroBatch]:
    """Cut a batch by length, so that little is padded; each has at most `max_tokens` padded tokens, or one row, and ends
    before where it would be padded by more than MAX_PADDING, if it has ENOUGH_TOKENS. On a CPU: see CPU_TOKENS.

    ranks: only this process's part of the rows.
    share: read a prompt once for all its responses. Exact: a prompt's states do not depend on what follows it, and
    gradients of all responses flow into them.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, t in enumerate(batch):
        by_prompt.setdefault(tuple(t.prompt_ids), []).append(i)
    rows: list[tuple[int, list[int]]] = []  # (width, sequences)
    for prompt, members in by_prompt.items():
        row: list[int] = []
        width = 0
        for i in sorted(members, key=lambda i: (-len(batch[i].response_ids), i)):
            wider = width + len(batch[i].response_ids)
            if row and (not share or wider > min(SHARED_WIDTH, max_tokens)):
                rows.append((width, row))
                row, wider = [], len(prompt) + len(batch[i].response_ids)
            row.append(i)
            width = wider if len(row) > 1 else len(prompt) + len(batch[i].response_ids)
        rows.append((width, row))
    rows = sorted(rows, key=lambda one: (-one[0], one[1]))[ranks.rank :: ranks.size]
    enough = ENOUGH_TOKENS
    if device.type == "cpu":
        enough, max_tokens = CPU_TOKENS // 2, min(max_tokens, CPU_TOKENS)
    start = 0
    while start < len(rows):
        widest = rows[start][0]
        end, tokens = start + 1, widest
        while end < len(rows) and (end + 1 - start) * widest <= max_tokens:
            tokens += rows[end][0]
            if tokens >= enough and (end + 1 - start) * widest > (1 + MAX_PADDING) * tokens:
                break
            end += 1
        yield _micro_batch(batch, [row for _, row in rows[start:end]], widest, device)
        start = end


def _micro_batch(batch: Sequence[Trajectory], rows: list[list[int]], W: int, device: torch.device) -> MicroBatch:
    index = [i for row in rows for i in row]
    T = max(len(batch[i].prompt_ids) + len(batch[i].response_ids) for i in index)
    ids_BT = torch.zeros((len(index), T), dtype=torch.long)
    mask_BT = torch.zeros((len(index), T), dtype=torch.bool)
    row_ids_RW = torch.zeros((len(rows), W), dtype=torch.long)
    # Positions go on in the padding: a position that falls starts a new sequence for transformers, which then builds a
    # dense mask and loses the causal kernel.
    positions_RW = torch.arange(W).repeat(len(rows), 1)
    part_RW = torch.full((len(rows), W), -1)  # 0: the prompt, 1...: a response, -1: padding
    before: list[Tensor] = []
    b = 0
    for r, row in enumerate(rows):
        prompt = torch.tensor(batch[row[0]].prompt_ids)
        P = len(prompt)
        row_ids_RW[r, :P], part_RW[r, :P] = prompt, 0
        start = P
        for part, i in enumerate(row, 1):
            response, own = torch.tensor(batch[i].response_ids), torch.tensor(batch[i].loss_mask, dtype=torch.bool)
            L = len(response)
            ids_BT[b, :P], ids_BT[b, P : P + L], mask_BT[b, P : P + L] = prompt, response, own
            span = slice(start, start + L)
            row_ids_RW[r, span], positions_RW[r, span], part_RW[r, span] = response, torch.arange(P, P + L), part
            place = torch.arange(start - 1, start - 1 + L)
            place[:1] = P - 1
            before.append(r * W + place[own])
            start += L
            b += 1
    attention = None
    if len(index) > len(rows):
        seen = (part_RW[:, None, :] == 0) | (part_RW[:, None, :] == part_RW[:, :, None])
        attention = (seen & torch.ones(W, W, dtype=torch.bool).tril())[:, None].to(device)
    return MicroBatch(
        index,
        ids_BT.to(device),
        mask_BT.to(device),
        row_ids_RW.to(device),
        positions_RW.to(device),
        attention,
        torch.cat(before).to(device),
    )


def log_probs_and_entropy(
    model: "PreTrainedModel", micro: MicroBatch, temperature: float = 1.0, *, fp32_head: bool = False
) -> tuple[Tensor, Tensor]:
    """Of each own token under the model: (log_probs_BT, entropy_BT), float32, 0 where the mask is False.

    Gradients flow through the log-probs only.
    fp32_head: the LM head's product in float32 whatever the rest runs in (ScaleRL, arXiv 2510.13786).
    """
    hidden_RWH = model.model(
        input_ids=micro.row_ids_RW,
        position_ids=micro.positions_RW,
        # Padding is on the right: without a mask, attention is causal and needs none.
        attention_mask=micro.attention_R1WW,
        use_cache=False,
    ).last_hidden_state
    hidden_NH, target_N = hidden_RWH.flatten(0, 1)[micro.before_N], micro.ids_BT[micro.mask_BT]
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
