"""Tests of SFT: loss on the model's tokens only, independence of packing and batching, resumption after a kill."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM

from rstar_lab.common.errors import UserError
from rstar_lab.rl.models.gpu import use_fast_layers
from rstar_lab.rl.models.model import build_tiny, has_bf16, load_model, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.recipe import SftConfig
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.conversations import Example, encode
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.sft import _loss, _micro_batches, common_beginning, finish, iterate_batches, lr_scale, sft

SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 64}
TINY = {
    "epochs": 2,
    "batch_size": 4,
    "lr": 3e-3,
    "optimizer": "muon",
    "max_tokens": 256,
    "packing": False,
    "precision": "fp32",
}


def conversation(n: int) -> list[tuple[str, bool]]:
    messages = [
        {"role": "user", "content": chat.format_question(f"What is {n} plus {n}?")},
        {"role": "assistant", "content": "<reason>Let me count.</reason>" + " Well." * (n % 5)},
        {"role": "tool", "content": str(2 * n)},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": f"<reason>So.</reason>\n<answer>\\boxed{{{2 * n}}}</answer>"},
    ]
    return chat.render_segments(messages)


DATASET = [conversation(n) for n in range(30)]
TOKENIZER = train_tokenizer((text for pieces in DATASET for text, _ in pieces), 320)


def fresh():
    return build_tiny(TOKENIZER, seed=0, **SHAPE)


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def same_files(one: Path, other: Path) -> bool:
    names = ("model/model.safetensors", "metrics.jsonl")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def reference_loss(model, examples):
    """Return the loss computed one conversation at a time with all logits."""
    total = torch.zeros(())
    for example in examples:
        logits = model(torch.tensor([example.ids])).logits[0]
        for position, own in enumerate(example.mask):
            if own:
                total = total + cross_entropy(logits[position - 1], torch.tensor(example.ids[position]))
    return total


def test_mask_covers_exactly_the_model_turns():
    (example,), left_out = encode(DATASET[:1], TOKENIZER, 256)
    assert left_out == 0
    model_text = TOKENIZER.decode([token for token, own in zip(example.ids, example.mask, strict=True) if own])
    assert model_text == "".join(text for text, own in DATASET[0] if own)
    assert TOKENIZER.decode(example.ids) == "".join(text for text, _ in DATASET[0])
    assert model_text.count(chat.END_OF_TURN) == 2
    assert "tool_response" not in model_text


def test_pieces_are_tokenized_separately():
    # "12" would be one token if pieces were joined first and the tokenizer merged across them.
    (example,), _ = encode([[("<reas", False), ("on>", True)]], TOKENIZER, 256)
    assert example.ids == TOKENIZER.encode("<reas") + TOKENIZER.encode("on>")


def test_dropped_conversations_are_counted():
    examples, left_out = encode([DATASET[0], [("x" * 500, True)], [("a question", False)]], TOKENIZER, 128)
    assert (len(examples), left_out) == (1, 2)


def test_packed_conversations_are_attended_one_by_one_without_a_mask(monkeypatch):
    """With a mask of the whole row, SDPA would compute all pairs of tokens."""
    model, (examples, _) = fresh(), encode(DATASET[:7], TOKENIZER, 256)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = reference_loss(model, examples)
    (wanted,) = torch.autograd.grad(expected, model.model.embed_tokens.weight)
    _loss(model, examples, True)  # the first call compares the model's rows
    calls = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def recording(query, *arguments, attn_mask=None, **options):
        calls.append((query.shape[2], attn_mask))
        return attention(query, *arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    loss = _loss(model, examples, True)
    (gradient,) = torch.autograd.grad(loss, model.model.embed_tokens.weight)  # computes the layers again
    assert {mask for _, mask in calls} == {None}
    assert {length for length, _ in calls} == {len(example.ids) for example in examples}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_common_beginning_is_computed_once_with_equal_gradients(bf16, early):
    """early: the first trained tokens differ and directly follow the common tokens."""
    model, (examples, _) = fresh(), encode(DATASET[:7], TOKENIZER, 256)
    if early:
        examples = [
            Example([5, 6, 7, 8, 10 + i, *range(20, 40 + i)], [False] * 4 + [True] * (21 + i)) for i in range(5)
        ]
    common = common_beginning(examples)
    same = [ids for ids in zip(*(example.ids for example in examples), strict=False) if len(set(ids)) == 1]
    assert common == (3 if early else common) > 2 and common <= len(same)
    expected = reference_loss(model, examples)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        if bf16:
            use_fast_layers(model)
        loss = _loss(model, examples, False, common)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2 if bf16 else 1e-5)
    for gradient, exact in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        limit = (0.05 if bf16 else 1e-4) * exact.norm()
        assert (gradient - exact).norm() <= limit


@pytest.mark.parametrize("packing", [True, False])
def test_each_epoch_contains_each_conversation_once(packing):
    examples = [Example([n] * (n % 9 + 2), [False] + [True] * (n % 9 + 1)) for n in range(50)]
    config = SftConfig(epochs=2, batch_size=8, packing=packing, micro_batch_tokens=24)
    batches = [batch for _, batch in iterate_batches(examples, config, range(1, 15))]
    for epoch in (batches[:7], batches[7:]):
        assert sorted(example.ids[0] for batch in epoch for example in batch) == list(range(50))
    assert batches[:7] != batches[7:]
    for batch in batches:
        pieces = list(_micro_batches(batch, config))
        assert [example for piece in pieces for example in piece] == batch
        for piece in pieces:
            lengths = [len(example.ids) for example in piece]
            assert len(piece) == 1 or (sum(lengths) if packing else len(piece) * max(lengths)) <= 24


def test_batches_do_not_depend_on_the_first_step():
    examples = [Example([n, n], [False, True]) for n in range(50)]
    config = SftConfig(batch_size=8)
    assert list(iterate_batches(examples, config, range(1, 22)))[9:] == list(
        iterate_batches(examples, config, range(10, 22))
    )


def test_learning_rate_warms_up_and_decays():
    cosine = SftConfig(warmup=0.1)
    assert [lr_scale(step, 100, cosine) for step in (1, 10)] == [0.1, 1.0]
    assert lr_scale(55, 100, cosine) == pytest.approx(0.5)
    assert 0 < lr_scale(100, 100, cosine) < lr_scale(99, 100, cosine) < 0.001
    assert lr_scale(2, 2, cosine.model_copy(update={"warmup": 0.0})) > 0
    tail = SftConfig(warmup=0.1, schedule="linear_tail")
    assert [lr_scale(step, 100, tail) for step in (10, 50)] == [1.0, 1.0]
    assert 0 < lr_scale(100, 100, tail) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw", "packing": True, "schedule": "cosine"}])
def test_sft_lowers_the_loss_and_writes_a_model_folder(tmp_path, changes):
    lines: list[dict[str, float]] = []
    model = fresh()
    config = SftConfig(**TINY | changes | {"epochs": 20})
    result = sft(model, TOKENIZER, DATASET, config=config, out_dir=tmp_path, on_step=lines.append)
    assert result["steps"] == len(lines) == 160
    assert lines[-1]["loss"] < lines[0]["loss"] / 3
    assert torch.equal(weights(load_model(tmp_path / "model")), weights(model))
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == lines


def test_micro_batches_do_not_change_the_weights(tmp_path):
    # Micro-batches give the weights of the full batch, up to rounding.
    results = []
    for name, tokens in (("one", 8192), ("pieces", 64)):
        model = fresh().bfloat16()
        config = SftConfig(**TINY | {"optimizer": "adamw", "epochs": 0.2, "micro_batch_tokens": tokens})
        sft(model, TOKENIZER, DATASET, config=config, out_dir=tmp_path / name)
        assert model.dtype == torch.float32
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_a_finished_run_is_reused_and_other_settings_are_an_error(tmp_path):
    config = SftConfig(**TINY)
    lines: list[dict[str, float]] = []
    model, again = fresh(), fresh()
    result = sft(model, TOKENIZER, DATASET, config=config, out_dir=tmp_path)
    assert sft(again, TOKENIZER, DATASET, config=config, out_dir=tmp_path, on_step=lines.append) == result
    assert not lines
    assert torch.equal(weights(again), weights(model))
    with pytest.raises(UserError, match="another folder"):
        sft(fresh(), TOKENIZER, DATASET[:-1], config=config, out_dir=tmp_path)


def test_sft_without_conversations_is_an_error(tmp_path):
    with pytest.raises(UserError, match="max_tokens"):
        sft(fresh(), TOKENIZER, DATASET, config=SftConfig(**TINY | {"max_tokens": 4}), out_dir=tmp_path)


def test_a_model_that_does_not_fit_on_the_disk_is_named_and_nothing_of_it_stays(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, usual[1]))
    try:
        with pytest.raises(
            UserError,
            match=rf"cannot write {tmp_path}/model: .* \(more than [\d,]+ bytes are needed, [\d,]+ bytes are free\)",
        ):
            finish(tmp_path, lambda folder: save_model(folder, fresh(), TOKENIZER), [], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_loss_that_is_not_finite_is_an_error(tmp_path):
    model = fresh()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="learning rate"):
        sft(model, TOKENIZER, DATASET, config=SftConfig(**TINY), out_dir=tmp_path)


@pytest.mark.parametrize(
    ("optimizer", "processes"), [("adamw", 1), ("muon", 1), pytest.param("adamw", 2, marks=pytest.mark.soak)]
)
def test_lora_trains_adapters_and_resumes_exactly(tmp_path, optimizer, processes):
    lora = {"rank": 4, "targets": ("q_proj", "up_proj")}
    config = SftConfig(**TINY | {"optimizer": optimizer, "epochs": 0.5, "checkpoint_every": 2, "lora": lora})
    whole = fresh()

    def train(folder, model, stop=None):
        def on_step(line):
            if line["step"] == stop:
                raise KeyboardInterrupt

        with HelperProcesses(processes) as helpers:
            sft(model, TOKENIZER, DATASET, config=config, out_dir=tmp_path / folder, helpers=helpers, on_step=on_step)

    train("whole", whole)
    with pytest.raises(KeyboardInterrupt):
        train("cut", fresh(), stop=3)
    assert all("lora_" in name for name in torch.load(tmp_path / "cut" / "checkpoint.pt")["model"])
    train("cut", fresh())
    base, merged = fresh().state_dict(), load_model(tmp_path / "whole" / "model")
    resumed = load_model(tmp_path / "cut" / "model").state_dict()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, resumed[name])
        assert torch.equal(tensor, base[name]) == (not name.endswith(("q_proj.weight", "up_proj.weight"))), name
    ids = torch.arange(20)[None]
    adapted = PeftModel.from_pretrained(fresh(), tmp_path / "whole" / "model" / "adapter")
    for model in (whole, adapted):
        torch.testing.assert_close(model(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-4)
    again = fresh()
    train("whole", again, stop=1)  # finished: no step runs
    assert torch.equal(weights(again), weights(merged))


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {here!r})
    from test_sft import DATASET, TINY, TOKENIZER, fresh
    from pathlib import Path
    from rstar_lab.rl.training.data_parallel import HelperProcesses
    from rstar_lab.rl.recipe import SftConfig
    from rstar_lab.rl.training.sft import sft

    def on_step(line):
        if line["step"] == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    config = SftConfig(**TINY | {{"checkpoint_every": 4}})
    with HelperProcesses({processes}) as helpers:
        sft(fresh(), TOKENIZER, DATASET, config=config, out_dir=Path({out!r}), helpers=helpers, on_step=on_step)
"""


def helpers_alive() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"rstar_lab.rl.training.data_parallel" in path.read_bytes():
                found.add(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_killed_run_ends_with_the_same_weights_and_metrics(tmp_path, processes):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = SftConfig(**TINY | {"checkpoint_every": 4})
    with HelperProcesses(processes) as helpers:
        sft(fresh(), TOKENIZER, DATASET, config=config, out_dir=tmp_path / "uninterrupted", helpers=helpers)
    before = helpers_alive()
    script = SCRIPT.format(here=str(Path(__file__).parent), processes=processes, out=str(tmp_path / "cut"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=280, check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while helpers_alive() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not helpers_alive() - before
    assert not (tmp_path / "cut" / "sft.json").exists()
    with HelperProcesses(processes) as helpers:
        sft(fresh(), TOKENIZER, DATASET, config=config, out_dir=tmp_path / "cut", helpers=helpers)
    torch.set_num_threads(threads)
    assert same_files(tmp_path / "cut", tmp_path / "uninterrupted")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_train_like_one(tmp_path, optimizer):
    models = [fresh(), fresh()]
    for processes, model in enumerate(models, 1):
        config = SftConfig(**TINY | {"optimizer": optimizer, "epochs": 0.5})
        with HelperProcesses(processes) as helpers:
            sft(model, TOKENIZER, DATASET, config=config, out_dir=tmp_path / str(processes), helpers=helpers)
    # Muon computes in bf16 if the CPU supports it; its rounding amplifies the float32 differences of the sums of gradients.
    in_bf16 = optimizer == "muon" and has_bf16(torch.device("cpu"))
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-3, atol=1e-3 if in_bf16 else 1e-4)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32"])
def test_the_defaults_fit_into_memory_with_a_large_vocabulary(tmp_path, precision):
    """Neither logits of all tokens nor attention of tokens x tokens is computed."""
    config = fresh().config
    config.vocab_size = 49_152
    pieces = [[*conversation(0), (" Well." * 500, True)] for _ in range(12)]
    with LargestTensor() as largest:
        settings = SftConfig(epochs=1, precision=precision)
        sft(Qwen3ForCausalLM(config), TOKENIZER, pieces, config=settings, out_dir=tmp_path)
    assert largest.elements <= 2**25
