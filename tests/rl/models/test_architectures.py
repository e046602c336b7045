"""Log-probs of the trainer equal those of the model's own forward pass, for every supported architecture."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.architectures import ARCHITECTURES, tiny_architecture
from helpers.trajectories import BATCH
from torch import nn
from torch.nn.functional import cross_entropy

from rstar_lab.common.errors import UserError
from rstar_lab.rl.models.forward_path import forward_path
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.renderers.conversations import Example
from rstar_lab.rl.training.log_probs import micro_batches, token_statistics
from rstar_lab.rl.training.sft import _loss
from rstar_lab.rl.training.update import Learner

SHARED = [replace(t, prompt_ids=BATCH[i // 3].prompt_ids) for i, t in enumerate(BATCH)]
HYBRID = {"Qwen3_5", "Qwen3Next", "Lfm2"}
everywhere = pytest.mark.parametrize("name", ARCHITECTURES)


def expected(model, batch):
    found = []
    for t in batch:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        log_probs = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].float().log_softmax(-1)
        own = log_probs.gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]
        found.append(own[torch.tensor(t.loss_mask)])
    return found


def assert_exact(model, batch, micros, **options):
    wanted, seen = expected(model, batch), 0
    for micro in micros:
        log_probs, _ = token_statistics(model, micro, **options)
        for row, i in enumerate(micro.index):
            torch.testing.assert_close(log_probs[row][micro.mask_BT[row]], wanted[i], atol=1e-5, rtol=1e-5)
            seen += 1
    assert seen == len(batch)


@everywhere
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fp32_head", [False, True])
def test_log_probs_equal_the_forward_pass(name, shared, fp32_head):
    batch = SHARED if shared else BATCH
    model = tiny_architecture(name)
    micros = list(micro_batches(batch, 10_000, torch.device("cpu")))
    assert (micros[0].attention_R1WW is not None) == shared
    assert_exact(model, batch, micros, fp32_head=fp32_head)


@everywhere
def test_gradients_of_an_update_equal_those_of_the_forward_pass(name):
    model = tiny_architecture(name)
    learner = Learner(copy.deepcopy(model))
    micros = list(learner.micro_batches(SHARED, RlSection()))
    for micro in micros:
        log_probs, _ = learner.forward(learner.model, micro, RlSection(precision="fp32"))
        log_probs.sum().backward()
    sum(row.sum() for row in expected(model, SHARED)).backward()
    found = torch.cat([p.grad.flatten() for p in learner.model.parameters()])
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found / wanted.norm(), wanted / wanted.norm(), atol=1e-5, rtol=1e-3)
    shares = any(micro.attention_R1WW is not None for micro in micros)
    assert shares == (forward_path(model).shared_width > 256), "a model with a state never shares"
    assert not (shares and name in HYBRID)


@everywhere
@pytest.mark.parametrize("packing", [True, False])
def test_sft_loss_equals_the_forward_pass(name, packing):
    model = tiny_architecture(name)
    examples = [Example(t.prompt_ids + t.response_ids, [False] * len(t.prompt_ids) + t.loss_mask) for t in BATCH]
    wanted = torch.zeros(())
    for example in examples:
        logits = model(torch.tensor([example.ids])).logits[0, :-1].float()
        own = torch.tensor(example.mask[1:])
        wanted = wanted + cross_entropy(logits[own], torch.tensor(example.ids[1:])[own], reduction="sum")
    torch.testing.assert_close(_loss(model, examples, packing), wanted, atol=1e-5, rtol=1e-5)


@everywhere
@pytest.mark.parametrize("fp32_head", [False, True])
def test_log_probs_with_lora_equal_the_forward_pass(name, fp32_head):
    model = tiny_architecture(name, tie_word_embeddings=False)
    names = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
    attach_lora(model, Lora(rank=2, targets=sorted(names)), seed=0)
    assert "lm_head" in names
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert_exact(model, SHARED, micro_batches(SHARED, 10_000, torch.device("cpu")), fp32_head=fp32_head)


def test_an_adapter_of_a_tied_head_is_refused():
    with pytest.raises(UserError, match=r"rl\.lora\.targets: lm_head shares its weights"):
        attach_lora(tiny_architecture("Qwen2"), Lora(rank=2, targets=["q_proj", "lm_head"]), seed=0)


@pytest.mark.parametrize("fp32_head", [False, True])
def test_the_bias_of_the_head_counts(fp32_head):
    model = tiny_architecture("Phi3")
    head = nn.Linear(32, 259)
    head.weight = model.lm_head.weight
    nn.init.normal_(head.bias)
    model.lm_head = head
    assert_exact(model, BATCH, micro_batches(BATCH, 10_000, torch.device("cpu")), fp32_head=fp32_head)
    assert not forward_path(model).plain


def test_an_unknown_treatment_of_logits_takes_the_whole_forward_pass(caplog):
    model = tiny_architecture("Llama")
    forward = model.forward

    def halved(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = output.logits / 2
        return output

    model.forward = halved
    assert_exact(model, SHARED, micro_batches(SHARED, 10_000, torch.device("cpu")))
    assert forward_path(model).plain and "LlamaForCausalLM computes its logits" in caplog.text
    (micro,) = micro_batches(BATCH, 10_000, torch.device("cpu"))
    with pytest.raises(UserError, match=r"rl\.fp32_head: LlamaForCausalLM"):
        token_statistics(model, micro, fp32_head=True)


def test_layers_with_an_unknown_state_are_found_by_comparison(caplog):
    model = tiny_architecture("Llama")
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda x, *rest, **options: forward(x + 0.1 * x.roll(1, 1).cumsum(1), *rest, **options)
    path = forward_path(model)
    assert (path.shared_width, path.packs, path.plain) == (0, False, False)
    assert "mixes responses" in caplog.text and "mixes conversations" in caplog.text


def test_attention_of_another_kind_does_not_share_rows():
    model = tiny_architecture("Llama")
    assert forward_path(model).shared_width > 256
    model.set_attn_implementation("eager")
    assert forward_path(model).shared_width == 0 and forward_path(model).packs
