"""Tests that the chunked, padded forward pass equals one sequence at a time."""

from dataclasses import replace

import pytest
import torch
from helpers.scripted_training import tiny
from helpers.trajectories import BATCH, trajectory

from rstar_lab.rl.training import log_probs as policy
from rstar_lab.rl.training.data_parallel import Ranks
from rstar_lab.rl.training.log_probs import micro_batches, token_statistics
from rstar_lab.rl.trajectory import Trajectory


@pytest.fixture(scope="module")
def model():
    return tiny()


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


def test_a_batch_without_model_tokens_gives_zeros(model):
    t = trajectory(0, 3, 1)
    silent = [t.__class__(**{name: getattr(t, name) for name in t.__slots__} | {"loss_mask": [False]})]
    (micro,) = micro_batches(silent, 100, torch.device("cpu"))
    log_probs, _ = token_statistics(model, micro)
    assert log_probs.abs().sum() == 0


def test_a_prompt_is_processed_once_for_all_its_responses():
    """test_architectures.py compares the values and gradients of such rows."""
    shared = [replace(t, prompt_ids=BATCH[i // 3].prompt_ids) for i, t in enumerate(BATCH)]
    (alone,) = micro_batches(shared, 10_000, torch.device("cpu"), shared_width=0)
    (together,) = micro_batches(shared, 10_000, torch.device("cpu"))
    assert alone.row_ids_RW.shape[0] == 6 and alone.attention_R1WW is None
    assert together.row_ids_RW.shape[0] == 2 and together.row_ids_RW.numel() < alone.row_ids_RW.numel()


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
