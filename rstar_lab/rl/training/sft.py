"""Supervised fine-tuning on one machine: next-token loss on the model's own tokens, all the rest is context.

The paper's SFT teaches the format and the tool, no reasoning (3 epochs, lr 5e-6, 4% warm-up, cosine, batch 128): these
are the defaults. The tiny model starts from nothing and learns faster with Muon on its matrices.

Killed at any moment and started again with the same arguments, a run ends with the same weights bit for bit: batches
are a function of seed and step alone, and a checkpoint holds all the rest.
"""

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from rstar_lab.errors import UserError
from rstar_lab.memory import release_free_heap
from rstar_lab.rl.chat_format.encoding import Example, encode
from rstar_lab.rl.models.model import has_bf16, load_model, save_model
from rstar_lab.rl.recipe import SftConfig
from rstar_lab.rl.training.data_parallel import SINGLE_RANK, HelperProcesses, Ranks
from rstar_lab.rl.training.muon import Muon
from rstar_lab.runs.files import atomic_write, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BUCKET_BATCHES = 50
_LOGITS_AT_ONCE = 2**26
_WIDTH_MULTIPLE = 16
_TARGETS_MULTIPLE = 64
_IGNORED = -100
_RELEASE_EVERY = 10  # steps


def sft(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Sequence[Sequence[tuple[str, bool]]],
    *,
    config: SftConfig,
    out_dir: Path,
    helpers: HelperProcesses | None = None,
    on_step: Callable[[dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Fine-tune `model` in place; leaves out_dir/model (Hugging Face format) and out_dir/metrics.jsonl.

    dataset: conversations as (text, is_the_model's_own) pieces. helpers: processes that share each batch; none are
    needed. on_step gets each step's metrics.
    A run that was cut short goes on where its last checkpoint is; a finished one is loaded and its result returned.
    Returns {"steps", "examples", "left_out", "tokens", "loss", "seconds"}: loss is the mean over the last tenth of the
    steps, seconds is this attempt's. Raises UserError where no conversation is left or out_dir holds another run.
    """
    started = time.monotonic()
    out_dir = Path(out_dir)
    examples, left_out = encode(dataset, tokenizer, config.max_tokens)
    model.float()  # master weights
    key = _key(model, examples, config, helpers.size if helpers else 1)
    if (result := _finished(out_dir, key)) is not None:
        model.load_state_dict(load_model(out_dir / "model").state_dict())
        return result
    ranks = helpers.lead("rstar_lab.rl.training.sft:help_sft") if helpers is not None else SINGLE_RANK
    ranks.share((type(model), model.config, examples, config, out_dir, key))
    history = _train(model, examples, config, out_dir, key, ranks, on_step)
    result = summary(history, len(examples), left_out, time.monotonic() - started)
    finish(out_dir, lambda folder: save_model(folder, model, tokenizer), history, {"key": key, "result": result})
    return result


def summary(history: list[dict[str, float]], examples: int, left_out: int, seconds: float) -> dict[str, Any]:
    """What `sft` returns, from the metrics of all steps."""
    tail = [line["loss"] for line in history[-max(1, len(history) // 10) :]]
    return {
        "steps": len(history),
        "examples": examples,
        "left_out": left_out,
        "tokens": int(sum(line["tokens"] for line in history)),
        "loss": sum(tail) / len(tail),
        "seconds": seconds,
    }


def help_sft(ranks: Ranks) -> None:
    """What a helper process does."""
    model_class, model_config, examples, config, out_dir, key = ranks.share(None)
    _train(model_class(model_config).float(), examples, config, out_dir, key, ranks, None)


def _train(
    model: "PreTrainedModel",
    examples: list[Example],
    config: SftConfig,
    out_dir: Path,
    key: str,
    ranks: Ranks,
    on_step: Callable[[dict[str, float]], None] | None,
) -> list[dict[str, float]]:
    ranks.share_weights(model)
    optimizers = _optimizers(model, config, ranks)
    history = _resume(out_dir, key, model, optimizers)
    steps = steps_of(examples, config)
    bf16 = config.precision == "bf16" or (config.precision == "auto" and has_bf16(model.device))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    if model.device.type == "cpu" and bf16:
        model.set_attn_implementation("eager")  # its products run in bf16, SDPA's kernel for CPUs is slower there
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for step, batch in iterate_batches(examples, config, range(len(history) + 1, steps + 1)):
        targets = sum(sum(example.mask) for example in batch)
        loss_sum = torch.zeros((), device=model.device)
        for rows in _micro_batches(batch[ranks.rank :: ranks.size], config):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
                loss = _loss(model, rows, config.packing)
            (loss / targets).backward()
            loss_sum += loss.detach()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        ranks.sum([*(parameter.grad for parameter in parameters if parameter.grad is not None), loss_sum])
        norm = clip_grad_norm_(parameters, config.grad_clip)
        scale = lr_scale(step, steps, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % _RELEASE_EVERY == 0 and model.device.type == "cpu":
            release_free_heap()
        line = {
            "step": step,
            "steps": steps,
            "loss": loss_sum.item() / targets,
            "lr": config.lr * scale,
            "grad_norm": norm.item(),
            "tokens": sum(len(example.ids) for example in batch),
        }
        history.append(line)
        if ranks.rank == 0:
            check_finite(line)
            if step % config.checkpoint_every == 0 and step < steps:
                _save_checkpoint(out_dir, key, model, optimizers, history)
            if on_step:
                on_step(line)
    model.eval()
    return history


def _loss(model: "PreTrainedModel", rows: list[Example], packing: bool) -> Tensor:
    """Sum of the negative log-likelihoods of the model's own tokens; the LM head sees only what comes before them."""
    lengths = [len(row.ids) for row in rows]
    # Few widths: every new shape costs a CPU kernels to prepare and memory to keep them.
    width = sum(lengths) if packing else -(-max(lengths) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    shape = (1, width) if packing else (len(rows), width)
    ids_BT = torch.zeros(shape, dtype=torch.long)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    # Positions that start again at 0 tell transformers where the next conversation of a packed row begins.
    positions_BT = torch.arange(width).repeat(shape[0], 1)
    start = 0
    for i, row in enumerate(rows):
        where = (0, slice(start, start + len(row.ids))) if packing else (i, slice(0, len(row.ids)))
        ids_BT[where] = torch.tensor(row.ids)
        mask_BT[where] = torch.tensor(row.mask)
        if packing:
            positions_BT[where] = torch.arange(len(row.ids))
            start += len(row.ids)
    device = model.device
    # Padding is on the right, after all that counts: causal attention needs no mask for it.
    hidden_BTH = model.base_model(
        input_ids=ids_BT.to(device), position_ids=positions_BT.to(device), use_cache=False
    ).last_hidden_state
    # Few numbers of targets, too: what is added at the end of them is ignored.
    own = mask_BT[:, 1:].flatten().nonzero().flatten()
    added = -len(own) % _TARGETS_MULTIPLE
    targets_N = pad(ids_BT[:, 1:].flatten()[own], (0, added), value=_IGNORED).to(device)
    hidden_NH = hidden_BTH[:, :-1].flatten(0, 1)[pad(own, (0, added)).to(device)]
    head = model.get_output_embeddings()

    def nll(hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(head(hidden).float(), targets, ignore_index=_IGNORED, reduction="sum")

    chunk = max(1, _LOGITS_AT_ONCE // head.weight.shape[0])
    if len(targets_N) <= chunk:
        return nll(hidden_NH, targets_N)
    pieces = zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    return torch.stack([checkpoint(nll, hidden, targets, use_reentrant=False) for hidden, targets in pieces]).sum()


def steps_of(examples: Sequence[Example], config: SftConfig) -> int:
    """Steps of a run; the last batch of an epoch may be a short one."""
    return math.ceil(config.epochs * math.ceil(len(examples) / config.batch_size))


def iterate_batches(examples: list[Example], config: SftConfig, steps: range) -> Iterator[tuple[int, list[Example]]]:
    """(step, batch) for these steps. Each epoch has its own order, drawn from the seed; unless rows are packed, a batch
    holds conversations of like length."""
    size = config.batch_size
    a_epoch = math.ceil(len(examples) / size)
    epoch, batches = -1, []
    for step in steps:
        if (step - 1) // a_epoch != epoch:
            epoch = (step - 1) // a_epoch
            rng = random.Random(f"{config.seed}/{epoch}")
            order = rng.sample(examples, len(examples))
            if not config.packing:
                window = size * _BUCKET_BATCHES
                windows = [order[i : i + window] for i in range(0, len(order), window)]
                order = [example for part in windows for example in sorted(part, key=lambda example: len(example.ids))]
            batches = [order[i : i + size] for i in range(0, len(order), size)]
            rng.shuffle(batches)
        yield step, batches[(step - 1) % a_epoch]


def _micro_batches(batch: list[Example], config: SftConfig) -> Iterator[list[Example]]:
    """The batch in pieces of at most micro_batch_tokens (padding included), and never less than one conversation."""
    rows: list[Example] = []
    for example in batch:
        wider = [*rows, example]
        lengths = [len(row.ids) for row in wider]
        if rows and (sum(lengths) if config.packing else len(wider) * max(lengths)) > config.micro_batch_tokens:
            yield rows
            wider = [example]
        rows = wider
    if rows:
        yield rows


def lr_scale(step: int, steps: int, config: SftConfig) -> float:
    """The learning rate of a step, counted from 1, as a share of the highest."""
    warmup = math.ceil(config.warmup * steps)
    if step <= warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, 2 * (1 - done) + 1 / steps)


def _optimizers(model: "PreTrainedModel", config: SftConfig, ranks: Ranks) -> list[torch.optim.Optimizer]:
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        matrices = [parameter for parameter in rest if parameter.ndim == 2 and id(parameter) not in ends]
        taken = set(map(id, matrices))
        rest = [parameter for parameter in rest if id(parameter) not in taken]
        optimizers.append(Muon(matrices, config.muon_lr, config.weight_decay, ranks))
    optimizers.append(torch.optim.AdamW(rest, lr=config.lr, weight_decay=config.weight_decay, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def check_finite(line: dict[str, float]) -> None:
    """Raises UserError where a step's loss or gradient is no number."""
    if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
        raise UserError(
            f"SFT: loss {line['loss']}, gradient norm {line['grad_norm']} at step {line['step']}: try a lower learning rate"
        )


# --- what is kept on disk ---------------------------------------------------------------------------------------------


def _key(model: "PreTrainedModel", examples: list[Example], config: SftConfig, processes: int) -> str:
    """Names a run by all that its weights depend on."""
    digest = hashlib.sha256(f"{processes} {config.model_dump_json(exclude={'checkpoint_every'})}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for example in examples:
        digest.update(repr((example.ids, example.mask)).encode())
    return digest.hexdigest()[:16]


def _finished(out_dir: Path, key: str) -> dict[str, Any] | None:
    path = out_dir / "sft.json"
    if not path.is_file():
        return None
    saved = json.loads(path.read_text())
    _same_run(out_dir, saved["key"], key)
    return saved["result"]


def _same_run(out_dir: Path, found: str, key: str) -> None:
    if found != key:
        raise UserError(
            f"{out_dir} holds an SFT run with other data, settings or weights: choose another folder or remove it"
        )


def _save_checkpoint(
    out_dir: Path,
    key: str,
    model: "PreTrainedModel",
    optimizers: list[torch.optim.Optimizer],
    history: list[dict[str, float]],
) -> None:
    state = {
        "key": key,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "history": history,
    }
    with atomic_write(out_dir / "checkpoint.pt") as file:
        torch.save(state, file)


def _resume(
    out_dir: Path, key: str, model: "PreTrainedModel", optimizers: list[torch.optim.Optimizer]
) -> list[dict[str, float]]:
    path = out_dir / "checkpoint.pt"
    if not path.is_file():
        return []
    try:
        state = torch.load(path, map_location=model.device, weights_only=True)
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error}; remove it to start the SFT again") from error
    _same_run(out_dir, state["key"], key)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["history"]


def finish(
    out_dir: Path, save: Callable[[Path], object], history: list[dict[str, float]], summary: dict[str, Any]
) -> None:
    """What a finished run leaves. save: writes the model and its tokenizer into a folder."""
    with atomic_write(out_dir / "metrics.jsonl") as file:
        file.write("".join(json.dumps(line) + "\n" for line in history).encode())
    temporary = out_dir / ".model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    save(temporary)
    shutil.rmtree(out_dir / "model", ignore_errors=True)
    temporary.rename(out_dir / "model")
    write_json(out_dir / "sft.json", summary)  # from here on the run is finished
    (out_dir / "checkpoint.pt").unlink(missing_ok=True)
