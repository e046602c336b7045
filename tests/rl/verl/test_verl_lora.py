"""LoRA under verl: the engines and the exported models have the adapters, and the base weights stay as they are."""

import json

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file

from benchmarks.verl_parity import prepare, train_with_verl
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.renderers.conversations import Conversation, Message, reply, write_conversations
from rstar_lab.rl.verl import adapters

RECORDER = """
import shutil
from benchmarks.verl_scripted import ScriptedEngine


class Recorder(ScriptedEngine):
    async def load_weights(self, path, version):
        shutil.copy(path, f"{FOLDER}/sent-{version}.safetensors")
        await super().load_weights(path, version)


def serve(model, options):
    return Recorder(model)
"""


@pytest.mark.slow
def test_export_merges_the_adapters_into_weights_in_several_files(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base, a, b, other = (torch.randn(shape, generator=generator) for shape in ((6, 8), (2, 8), (6, 2), (5,)))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    source = tmp_path / "huggingface"
    source.mkdir()
    save_file({f"{layer}.base_layer.weight": base, f"{layer}.lora_B.default.weight": b}, source / "a.safetensors")
    save_file({f"{layer}.lora_A.default.weight": a, "base_model.model.norm": other}, source / "b.safetensors")
    (source / "config.json").write_text("{}")
    adapters.export_merged(source, tmp_path / "merged", Lora(rank=2, alpha=6, targets=("q_proj",)))
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert files == ["a.safetensors", "b.safetensors"]
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"model.layers.0.self_attn.q_proj.weight": "a.safetensors", "norm": "b.safetensors"}
    found = {k: v for name in files for k, v in load_file(tmp_path / "merged" / name).items()}
    assert found.keys() == {"model.layers.0.self_attn.q_proj.weight", "norm"}
    torch.testing.assert_close(found["model.layers.0.self_attn.q_proj.weight"], base + 3 * b @ a)
    assert torch.equal(found["norm"], other)
    own = load_file(tmp_path / "merged" / "adapter" / "adapter_model.safetensors")
    assert own.keys() == {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_adapters_are_trained_sent_and_exported_over_two_stages(tmp_path, monkeypatch):
    (tmp_path / "recording.py").write_text(RECORDER.replace("FOLDER", repr(str(tmp_path))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe_file = prepare(tmp_path, steps=1, lora={"rank": 4, "targets": ["q_proj", "down_proj"]}, lr=1e-2)
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["stages"].append(recipe["stages"][0] | {"name": "two"})
    recipe_file.write_text(yaml.safe_dump(recipe))
    factory = "verl.+actor_rollout_ref.rollout.engine_kwargs.rstar={factory: 'recording:serve'}"
    run = train_with_verl(recipe_file, tmp_path / "verl", "--set", factory)
    start = load_model(tmp_path / "model", torch.float32)
    before, stages = (
        start.state_dict(),
        [load_file(run / "stages" / name / "model.safetensors") for name in ("one", "two")],
    )
    for step, found in enumerate(stages, 1):
        changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
        assert changed == {name for name in before if "q_proj.weight" in name or "down_proj" in name}, step
        sent = load_file(tmp_path / f"sent-{step}.safetensors")
        for name, tensor in found.items():
            torch.testing.assert_close(sent[name], tensor, rtol=0, atol=1e-7)
    assert not torch.equal(*(found["model.layers.0.mlp.down_proj.weight"] for found in stages))
    adapter = run / "stages" / "two" / "adapter"
    with_adapter = PeftModel.from_pretrained(start, adapter).merge_and_unload().state_dict()
    for name, tensor in stages[1].items():
        torch.testing.assert_close(with_adapter[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sft_trains_adapters_and_exports_the_merged_model(tmp_path):
    recipe_file = prepare(tmp_path, steps=1, lr=1e-12, weight_decay=0.0)
    turns = [
        (Message(role="user", content=f"{n}?"), Message(role="assistant", content=reply(str(n)))) for n in range(8)
    ]
    write_conversations(
        tmp_path / "c.jsonl",
        [Conversation(conversation_id=str(n), source="test", messages=messages) for n, messages in enumerate(turns)],
    )
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["sft"] = {
        "epochs": 6, "batch_size": 4, "lr": 2e-2, "max_tokens": 512, "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]},
        "conversations": [{"file": str(tmp_path / "c.jsonl")}],
    }  # fmt: skip
    recipe_file.write_text(yaml.safe_dump(recipe))
    run = train_with_verl(recipe_file, tmp_path / "verl")
    sft = run.parent / "parity-sft" / "sft"
    losses = [json.loads(line)["loss"] for line in (sft / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1
    start, found = load_model(tmp_path / "model", torch.float32), load_model(sft / "model", torch.float32).state_dict()
    changed = {name for name, tensor in start.state_dict().items() if not torch.equal(tensor, found[name])}
    assert changed == {name for name in found if "q_proj.weight" in name or "down_proj" in name}
    with_adapter = PeftModel.from_pretrained(start, sft / "model" / "adapter").merge_and_unload().state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(with_adapter[name], tensor, rtol=0, atol=1e-6)
