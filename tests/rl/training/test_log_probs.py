"""Tests that the chunked, padded forward pass equals one sequence at a time."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.trajectories import BATCH, trajectory
from transformers import LlamaConfig, LlamaForCausalLM

from rstar_lab.rl.algorithm.advantages import optimal_token_advantages
from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.echo import Echo
from rstar_lab.rl.methods.otb import Otb
from rstar_lab.rl.models.model import build_tiny
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.training import log_probs as policy
from rstar_lab.rl.training.data_parallel import Ranks
from rstar_lab.rl.training.driver import LocalPasses
from rstar_lab.rl.training.log_probs import (
    CPU_TOKENS,
    SHARED_WIDTH,
    micro_batches,
    token_statistics,
    worthwhile_width,
)
from rstar_lab.rl.training.update import Batch, Learner, micro_batch_loss
from rstar_lab.rl.trajectory import Trajectory, Turn


@pytest.fixture(scope="module")
def model():
    return build_tiny(train_tokenizer(["text"], 300), seed=0, hidden_size=64, layers=2, heads=2, kv_heads=1)


def plain(model, t: Trajectory, temperature: float):
    ids = torch.tensor([t.prompt_ids + t.response_ids])
    log_probs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    before = log_probs[len(t.prompt_ids) - 1 : -1]
    own = before.gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]
    entropy = -(before.exp() * before).sum(-1)
    mask = torch.tensor(t.loss_mask)
    return own * mask, entropy * mask


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2**30, 300 * 7])  # one chunk; chunks of seven tokens
def test_log_probs_equal_one_sequence_at_a_time(model, monkeypatch, chunk):
    monkeypatch.setattr(policy, "CHUNK_LOGITS", chunk)
    seen = []
    for micro in micro_batches(BATCH, 60, torch.device("cpu")):
        assert micro.ids_BT.numel() <= 60 or len(micro.index) == 1
        log_probs, entropy = token_statistics(model, micro, 0.7)
        for row, i in enumerate(micro.index):
            t = BATCH[i]
            span = slice(len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids))
            expected, expected_entropy = plain(model, t, 0.7)
            torch.testing.assert_close(log_probs[row, span], expected, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(entropy[row, span], expected_entropy, atol=2e-5, rtol=1e-4)
            assert log_probs[row, : span.start].abs().sum() == 0 and log_probs[row, span.stop :].abs().sum() == 0
        seen += micro.index
    assert sorted(seen) == list(range(len(BATCH)))


@pytest.mark.slow
def test_gradients_do_not_depend_on_micro_batches_and_chunks(model, monkeypatch):
    def gradient(tokens: int, chunk: int) -> torch.Tensor:
        monkeypatch.setattr(policy, "CHUNK_LOGITS", chunk)
        model.zero_grad()
        for micro in micro_batches(BATCH, tokens, torch.device("cpu")):
            token_statistics(model, micro)[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient(10_000, 2**30)
    torch.testing.assert_close(gradient(40, 2**30), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradient(40, 300 * 5), expected, atol=1e-4, rtol=1e-4)
    assert expected.abs().sum() > 0


@pytest.mark.slow
def test_tool_output_loss_is_the_cross_entropy_of_tool_response_tokens(model):
    model.zero_grad()
    total, tokens = torch.tensor(0.0), 0
    for t in BATCH:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        logits = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].float()
        other = ~torch.tensor(t.loss_mask)
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(t.response_ids), reduction="none")
        total, tokens = total + each[other].sum(), tokens + int(other.sum())
    expected = total / tokens
    expected.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    found = 0.0
    others = [~np.array(t.loss_mask) for t in BATCH]
    selection = Selection.of(BATCH, [0.0] * len(BATCH)).add([Streams(ce_weight_T=row) for row in others])
    batch = Batch.of(selection, range(len(BATCH)), "token-mean")
    for micro in micro_batches(BATCH, 60, torch.device("cpu"), also_scored=batch.also_scored):
        log_probs, _ = token_statistics(model, micro)
        own = plain(model, BATCH[micro.index[0]], 1.0)[0]
        start = len(BATCH[micro.index[0]].prompt_ids)
        masked = log_probs.masked_fill(~micro.mask_BT, 0.0)[0, start : start + len(own)]
        torch.testing.assert_close(masked, own, atol=2e-5, rtol=1e-4)
        loss, _ = micro_batch_loss(log_probs, micro, batch, "trainer", LossConfig())
        loss.backward()
        found += float(loss.detach())
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in model.parameters()]), gradient, atol=1e-5, rtol=1e-4
    )


@pytest.mark.slow
def test_an_update_with_the_tool_output_loss_predicts_tool_outputs_better(model):
    rl = RlSection(
        method={"add": [{"type": "echo", "weight": 1.0}]}, lr=1e-3, schedule={"lockstep": True}, old_log_probs="engine"
    )
    rollouts = [replace(t, turns=(Turn(0, 4, "", 0, 0, 0, outputs=((3, 4), (8, 9))),)) for t in BATCH]
    # Without advantages nothing else is learned.
    selection = Selection(rollouts, [Echo(weight=1.0).score_rollout(t, Streams()) for t in rollouts])
    learner = Learner(model)
    learner.begin_stage(rl, reset=False, reference=None)
    losses = [learner.update(selection, rl, lr_scale=1.0, seed=0).metrics["tool_output_loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
    without = learner.update(Selection.of(rollouts, [0.0] * len(BATCH)), rl, lr_scale=1.0, seed=0)
    assert "tool_output_loss" not in without.metrics


@pytest.mark.slow
def test_otb_trains_every_token_with_its_own_advantage(model):
    """The gradient equals that of sequences processed one at a time with the advantages of OTB."""
    rl = RlSection(method={"type": "otb"}, lr=1e-3, temperature=0.7, max_grad_norm=1e9, micro_batch_tokens=60)
    centred = [t.reward - 0.5 for t in BATCH]
    energies, own_log_probs = [], []
    for t in BATCH:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        before = (model(ids).logits[0].float() / 0.7).log_softmax(-1)[len(t.prompt_ids) - 1 : -1]
        own = before.gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]
        mask = torch.tensor(t.loss_mask)
        energies.append((1 - 2 * own.exp() + before.exp().square().sum(-1))[mask].detach().numpy())
        own_log_probs.append(own[mask])
    advantages = optimal_token_advantages(centred, ["g"] * len(BATCH), energies)
    assert np.ptp(advantages[-1]) > 0.01  # they do differ between tokens
    loss = -sum((torch.tensor(a) * lp).sum() for a, lp in zip(advantages, own_log_probs, strict=True))
    model.zero_grad()
    (loss / sum(len(a) for a in advantages)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    model.zero_grad()
    learner = Learner(copy.deepcopy(model))
    learner.begin_stage(rl, reset=False, reference=None)
    passes = LocalPasses(learner, rl, None, None)
    selection = asyncio.run(Otb().forward(Selection.of(list(BATCH), centred), BATCH, passes))
    result = learner.update(selection, rl, lr_scale=1.0, seed=0)
    assert result.metrics["grad_norm"] == pytest.approx(float(expected), rel=1e-4)
    assert result.metrics["loss"] == pytest.approx(-np.concatenate(advantages).mean(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("old_log_probs", ["trainer", "engine"])
def test_the_advantage_of_distillation_is_teacher_minus_student(model, old_log_probs):
    """The gradient equals that of plain rollouts with these advantages of the tokens. NaN counts as no difference."""
    rl = RlSection(
        method={"add": [{"type": "opd", "weight": 0.5}]},
        lr=1e-3,
        max_grad_norm=1e9,
        micro_batch_tokens=60,
        old_log_probs=old_log_probs,
    )
    rng = np.random.default_rng(0)
    own = [plain(model, t, 1.0)[0] for t in BATCH]
    gaps = [rng.normal(size=len(row)).astype(np.float32) for row in own]
    teacher = [row.detach().numpy() + gap for row, gap in zip(own, gaps, strict=True)]
    teacher[2][-1] = np.nan
    gaps[2][-1] = 0.0
    batch = [replace(t, log_probs=row.tolist()) for t, row in zip(BATCH, own, strict=True)]
    advantages = [t.reward - 0.5 for t in batch]
    tokens = sum(t.model_tokens for t in batch)
    loss = torch.tensor(0.0)
    for t, row, gap, advantage in zip(batch, own, gaps, advantages, strict=True):
        loss = loss - (row * (advantage + 0.5 * torch.tensor(gap)))[torch.tensor(t.loss_mask)].sum() / tokens
    model.zero_grad()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    model.zero_grad()
    learner = Learner(copy.deepcopy(model))
    learner.begin_stage(rl, reset=False, reference=None)
    selection = Selection.of(batch, advantages).add([Streams(reference_log_prob_T=row) for row in teacher])
    metrics = learner.update(selection, rl, lr_scale=1.0, seed=0).metrics
    assert metrics["grad_norm"] == pytest.approx(float(expected), rel=1e-4)
    masked = [gap[np.array(t.loss_mask)] for t, gap in zip(batch, gaps, strict=True)]
    assert metrics["teacher_kl"] == pytest.approx(-np.concatenate(masked).mean(), rel=1e-3)


def test_a_batch_without_model_tokens_gives_zeros(model):
    t = trajectory(0, 3, 1)
    silent = [t.__class__(**{name: getattr(t, name) for name in t.__slots__} | {"loss_mask": [False]})]
    (micro,) = micro_batches(silent, 100, torch.device("cpu"))
    log_probs, _ = token_statistics(model, micro)
    assert log_probs.abs().sum() == 0


@pytest.mark.slow
def test_a_prompt_is_processed_once_for_all_its_responses(model):
    shared = [replace(t, prompt_ids=BATCH[i // 3].prompt_ids) for i, t in enumerate(BATCH)]
    (alone,) = micro_batches(shared, 10_000, torch.device("cpu"), shared_width=0)
    (together,) = micro_batches(shared, 10_000, torch.device("cpu"))
    assert alone.row_ids_RW.shape[0] == 6 and alone.attention_R1WW is None
    assert together.row_ids_RW.shape[0] == 2 and together.row_ids_RW.numel() < alone.row_ids_RW.numel()
    answers = []
    for micro in (alone, together):
        model.zero_grad()
        log_probs, entropy = token_statistics(model, micro, 0.7)
        (log_probs * torch.tensor(micro.index)[:, None]).sum().backward()
        order = torch.tensor(micro.index).argsort()
        answers.append((log_probs[order], entropy[order], torch.cat([p.grad.flatten() for p in model.parameters()])))
    for one, other in zip(*answers, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_right_padded_rows_use_causal_attention_without_a_mask(model, monkeypatch):
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def recording(*arguments, attn_mask=None, **options):
        masks.append(attn_mask)
        return attention(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    (micro,) = micro_batches(BATCH, 10_000, torch.device("cpu"), shared_width=0)
    assert (micro.row_ids_RW.shape[0], micro.attention_R1WW) == (len(BATCH), None)
    token_statistics(model, micro)
    assert masks and all(mask is None for mask in masks)


def test_each_row_belongs_to_exactly_one_rank(model):
    all_rows = [i for micro in micro_batches(BATCH, 40, torch.device("cpu")) for i in micro.index]
    parts = [
        [i for micro in micro_batches(BATCH, 40, torch.device("cpu"), ranks=Ranks(rank, 2)) for i in micro.index]
        for rank in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(all_rows) and all(parts)


def test_a_large_micro_batch_ends_before_its_padding_grows(monkeypatch):
    monkeypatch.setattr(policy, "CPU_TOKENS", 160)
    rows = [trajectory(i, 1, length) for i, length in enumerate((30, 29, 28, 9, 9, 8))]
    cut = list(micro_batches(rows, 10_000, torch.device("cpu"), shared_width=0))
    assert [tuple(micro.row_ids_RW.shape) for micro in cut] == [(3, 31), (3, 10)]
    assert sorted(i for micro in cut for i in micro.index) == list(range(6))


def test_a_larger_model_shares_a_prompt_of_several_hundred_tokens():
    """SmolLM2-135M has nine times as many weights per layer and width of the queries as the tiny model."""
    shapes = (
        {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
    )
    with torch.device("meta"):
        tiny, smol = (LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, **shape)) for shape in shapes)
    tiny_width, smol_width = worthwhile_width(tiny), worthwhile_width(smol)
    assert tiny_width == SHARED_WIDTH < 700 < smol_width < CPU_TOKENS
    group = [replace(trajectory(0, 300, 100), group_id="g") for _ in range(8)]
    tokens = {
        width: sum(m.row_ids_RW.numel() for m in micro_batches(group, 10_000, torch.device("cpu"), shared_width=width))
        for width in (tiny_width, smol_width)
    }
    assert tokens == {tiny_width: 8 * 400, smol_width: 2 * 700}
