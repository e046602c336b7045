"""Checkpoints under HSDP: every shard is written once, and every rank resumes from it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.workers.engine.fsdp import transformer_impl

from rstar_lab.hardware.processes import free_port

STEPS = 3


def tiny_model():
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))


def sharded_model(mesh, seed):
    torch.manual_seed(seed)
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, rank):
    for step in steps:
        ids = torch.arange(8)[None] + 10 * step + rank
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def one_rank(rank, port, folder):
    from rstar_lab.rl.verl import checkpoints  # noqa: F401 (replaces verl's manager)

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    contents = ["model", "optimizer", "extra"]
    config = {"save_contents": contents, "load_contents": contents}

    def manager_of(model, optimizer):
        return transformer_impl.FSDPCheckpointManager(model=model, optimizer=optimizer, checkpoint_config=config)

    model, optimizer = sharded_model(mesh, seed=0)
    train(model, optimizer, range(STEPS), rank)
    manager = manager_of(model, optimizer)
    manager.save_checkpoint(folder, global_step=STEPS)
    assert manager.rank == rank and manager.checkpoint_save_contents == contents
    expected = train(model, optimizer, range(STEPS, 2 * STEPS), rank)
    model, optimizer = sharded_model(mesh, seed=1)
    train(model, optimizer, range(1), rank)
    manager_of(model, optimizer).load_checkpoint(folder)
    resumed = train(model, optimizer, range(STEPS, 2 * STEPS), rank)
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    dist.destroy_process_group()


@pytest.mark.soak  # four processes that import verl
def test_every_shard_is_written_once_and_every_rank_resumes_from_it(tmp_path):
    port = free_port()
    torch.multiprocessing.spawn(one_rank, (port, str(tmp_path)), nprocs=4)
    files = {path.name: path.stat().st_size for path in tmp_path.glob("*.pt")}
    kinds = [name.split("_world")[0] for name in files]
    assert {kind: kinds.count(kind) for kind in kinds} == {"model": 2, "optim": 2, "extra_state": 4}
    parameters = sum(parameter.numel() for parameter in tiny_model().parameters())
    sharded = sum(size for name, size in files.items() if not name.startswith("extra"))
    assert sharded == pytest.approx(12 * parameters, rel=0.3), "weights and two moments in fp32, once"
