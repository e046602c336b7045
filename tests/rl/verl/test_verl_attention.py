"""Tests of the attention that verl uses without flash-attn: packed sequences, alone and split over two ranks."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.utils import ulysses

from rstar_lab.hardware.processes import free_port
from rstar_lab.rl.verl.config import PACKED_ATTENTION, override_config

pytestmark = pytest.mark.slow
LENGTHS = (5, 1, 12, 3)  # 21 tokens: two ranks need one token of padding


def make_model(attention, key_heads=2, **changes):
    import rstar_lab.rl.verl.attention  # noqa: F401

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=key_heads, **changes)
    config._attn_implementation = attention
    return Qwen3ForCausalLM(config).train()


def packed_row():
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (1, sum(LENGTHS)))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def loss_and_gradients(model, logits):
    """Return a scalar that depends on all logits (tokens, vocabulary), and the gradients of the parameters."""
    torch.manual_seed(2)
    loss = (logits * torch.randn(sum(LENGTHS), logits.shape[-1])).sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def sequence_by_sequence(key_heads=2):
    model = make_model("eager", key_heads)
    ids, _ = packed_row()
    logits = torch.cat([model(input_ids=part).logits[0] for part in ids.split(LENGTHS, dim=1)])
    return logits, *loss_and_gradients(model, logits)


def test_packed_sequences_equal_separate_ones_in_logits_and_gradients():
    model = make_model(PACKED_ATTENTION)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, positions = packed_row()
    logits = model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits[0]
    loss, gradients = loss_and_gradients(model, logits)
    expected, expected_loss, expected_gradients = sequence_by_sequence()
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-4, rtol=1e-4)


def one_rank(rank, port, key_heads, results):
    """Forward and backward of one of two ranks as verl's engine does it; rank 0 saves logits and the sum of gradients."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    model = make_model(PACKED_ATTENTION, key_heads)
    ids, positions = packed_row()
    ids, positions, padding = ulysses.ulysses_pad_and_slice_inputs(ids, positions, 2)
    logits = model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits[0]
    logits = ulysses.gather_outputs_and_unpad(
        logits, gather_dim=0, unpad_dim=0, padding_size=padding, grad_scaler=False
    )
    _, gradients = loss_and_gradients(model, logits)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    if rank == 0:
        torch.save((logits.detach(), gradients), results)
    dist.destroy_process_group()


@pytest.mark.soak
@pytest.mark.parametrize("key_heads", [2, 1])
def test_two_ranks_that_share_a_row_equal_separate_sequences(tmp_path, key_heads):
    if torch.__version__ < "2.12":
        pytest.skip("gloo of torch 2.11 has no all-to-all")
    port = free_port()
    torch.multiprocessing.spawn(one_rank, (port, key_heads, tmp_path / "rank0.pt"), nprocs=2)
    logits, gradients = torch.load(tmp_path / "rank0.pt")
    expected, _, expected_gradients = sequence_by_sequence(key_heads)
    torch.testing.assert_close(logits, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-4, rtol=1e-4)


def test_a_padded_batch_and_a_short_sliding_window_are_refused():
    model = make_model(PACKED_ATTENTION)
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="use_remove_padding"):
        model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    windowed = make_model(PACKED_ATTENTION, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    ids, positions = packed_row()
    with pytest.raises(ValueError, match="sliding window of 8"):
        windowed(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False)


def test_flash_attn_is_used_if_it_is_installed(monkeypatch):
    assert override_config(flash=True)["attn_implementation"] == PACKED_ATTENTION, "flash-attn is not installed here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "flash_attn" else None)
    assert override_config(flash=True)["attn_implementation"] == "flash_attention_2"
    assert override_config(flash=False)["attn_implementation"] == PACKED_ATTENTION
