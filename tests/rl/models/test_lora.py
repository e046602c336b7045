"""LoRA: adapters against peft's own model, merged weights in engines and checkpoints, exact resume."""

import json

import pytest
import torch
from helpers.scripted_training import TOKENIZER, problem, tiny, train
from helpers.trajectories import BATCH
from peft import PeftModel

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engines.weights import tensors_to_send
from rstar_lab.rl.models import lora as module
from rstar_lab.rl.models.lora import attach_lora, full_state, load_adapter, save_adapter
from rstar_lab.rl.models.model import load_model, save_model
from rstar_lab.rl.preflight.context import Architecture
from rstar_lab.rl.preflight.estimate import lora_parameters
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.training.trainer import Trainer
from rstar_lab.rl.training.update import Learner
from rstar_lab.runs.reader import RunReader

IDS = torch.arange(20)[None]
LORA = Lora(rank=4)


def trained(steps: int = 2, **options):
    """Return a model with adapters after some updates, and what they reported."""
    model = tiny()
    attach_lora(model, LORA, seed=0)
    rl = RlSection(lora=LORA, lr=1e-2, old_log_probs="engine", **options)
    learner = Learner(model)
    learner.begin_stage(rl, reset=False, reference=None)
    selection = Selection.of(BATCH, [1.0, -0.5, -0.5, 0.7, 0.7, -1.4])
    return model, [learner.update(selection, rl, lr_scale=1.0, seed=step).metrics for step in range(steps)]


def test_adapters_start_as_the_base_model_and_only_they_are_trained():
    model, base = tiny(), tiny()
    attach_lora(model, LORA, seed=0)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = base.config
    size = Architecture(2, 64, 2, 1, shape.head_dim, shape.intermediate_size, shape.vocab_size, False)
    assert count == lora_parameters(size, LORA)
    model, metrics = trained()
    assert metrics[0]["grad_norm"] > 0
    for name, tensor in model.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, base.state_dict()[name.replace(".base_layer", "")]), name
    assert not torch.allclose(model(IDS).logits, base(IDS).logits, atol=1e-3)


@pytest.mark.slow
def test_merged_weights_have_the_names_of_the_base_and_compute_the_same():
    model, _ = trained()
    merged, base = full_state(model), tiny()
    assert merged.keys() == base.state_dict().keys()
    layer = model.model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(merged["model.layers.0.mlp.up_proj.weight"], expected), "the bits are those of peft"
    base.load_state_dict(merged)
    torch.testing.assert_close(base(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-4)
    tensors, _ = tensors_to_send(merged, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


@pytest.mark.slow
def test_peft_loads_the_exported_adapter(tmp_path):
    model, _ = trained()
    save_adapter(tmp_path / "adapter", model)
    theirs = PeftModel.from_pretrained(tiny(), tmp_path / "adapter")
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, atol=1e-6, rtol=1e-5)
    again = tiny()
    attach_lora(again, LORA, seed=9)
    load_adapter(tmp_path / "adapter", again)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["lora_alpha"] == 8


def test_the_saved_model_is_merged(tmp_path):
    model, _ = trained()
    save_model(tmp_path, model, TOKENIZER)
    torch.testing.assert_close(load_model(tmp_path)(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
async def test_a_run_sends_merged_weights_and_resumes_exactly(tmp_path):
    stages = [{"name": "one", "steps": 3}]
    problems = {"one": [problem("a", 0.5), problem("b", 0.5)]}
    sent = []

    class WithLora(Trainer):
        def __init__(self, recipe, **keywords):
            attach_lora(keywords["model"], recipe.rl.lora, recipe.seed)
            super().__init__(recipe, **keywords)

        async def load_weights(self, version):
            sent.append({name: tensor.clone() for name, tensor in full_state(self.learner.model).items()})
            await super().load_weights(version)

    keys = {"lora": {"rank": 4}, "lr": 1e-2}
    _, whole = await train(tmp_path / "whole", stages, problems, trainer_class=WithLora, **keys)
    assert sent[-1].keys() == tiny().state_dict().keys()
    assert not torch.equal(sent[0]["model.layers.0.mlp.up_proj.weight"], sent[-1]["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(sent[0]["lm_head.weight"], sent[-1]["lm_head.weight"])
    for stop in (1, 2):
        await train(tmp_path / "cut", stages, problems, trainer_class=WithLora, stop_after=stop, **keys)
    _, cut = await train(tmp_path / "cut", stages, problems, trainer_class=WithLora, **keys)
    losses = [[line["loss"] for line in RunReader(run).metrics()] for run in (whole, cut)]
    assert losses[0] == losses[1]
    final = [load_model(run / "checkpoints" / "step=000003").state_dict() for run in (whole, cut)]
    assert all(torch.equal(tensor, final[1][name]) for name, tensor in final[0].items())
    assert (whole / "checkpoints" / "step=000003" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_gradient_checkpointing_trains_adapters_the_same():
    plain, recomputed = trained()[1], trained(gradient_checkpointing=True)[1]
    assert recomputed[1] == pytest.approx(plain[1], rel=1e-3, abs=1e-6)


def test_wrong_targets_are_refused():
    with pytest.raises(UserError, match=r"rl\.lora\.targets: the model has no linear layer qkv; it has down_proj"):
        attach_lora(tiny(), Lora(targets=("qkv",)), seed=0)
    assert module.has_lora(tiny()) is False
