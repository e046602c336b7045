"""Make a recipe and a profile so small that the whole job runs on this machine.

Kept: stages, algorithm keys, turns, filter, hand-off rules, evaluation, checkpoints, trainer, sandbox service, storage lookup.
Shrunk:

| key | rehearsal |
|---|---|
| model | the tiny model after the SFT of `tiny_fast`, with positions for prompt and response |
| problems, conversations | 16 synthetic problems, 8 conversations per file |
| problems_per_step, group_size | 2 per mini-batch (4 if there is one stage), 4 |
| limits.max_response_tokens | 96 for the shortest stage, the others in proportion |
| steps | 2 per stage (3 if there is one stage), a checkpoint after each |
| precision | auto, which is fp32 on a CPU |
| hand_off.window, filter.samples, evaluate.samples | 1, 2, 2 |
| evaluate.during.every | 1, unless 0 |
| hardware | two nodes of one CPU rank and one vLLM engine each under verl; two training processes and two engines under the local trainer |
| fsdp_size, sequence_parallel | 1 if the profile has several replicas of the model, at most 2 |
"""

import os
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.key_reads import recording
from rstar_lab.hardware.profiles import EngineSettings, Hardware, Parallelism, Profile, Slurm, Storage, load_profile
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.recipe import Recipe

SHORTEST_RESPONSE = 96
PROMPT_TOKENS = 2048
PROBLEMS, CONVERSATIONS = 16, 8
FAMILIES = ("exclusive_or", "squares_sum", "product_remainder")


def shrink_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """Return the small recipe. Its data files are below `folder`; `write_data` writes them."""
    data = recipe.model_dump(mode="json")
    data["name"] = f"rehearsal-{recipe.name}"
    data["model"] = str(folder / "models" / "tiny")
    data["runs"] = str(folder / "runs")
    data["processes"] = max(2, recipe.processes)
    data["rl"] = _shrink_rl(data["rl"], recipe)
    for number, stage in enumerate(data["stages"]):
        stage["rl"] = _shrink_rl(stage["rl"], recipe)
        stage["steps"] = 2 if len(data["stages"]) > 1 else 3
        stage["problems"] = {"file": str(folder / "data" / f"stage-{number}.jsonl")}
        if stage["hand_off"]:
            stage["hand_off"]["window"] = 1
        if stage["filter"]:
            stage["filter"]["samples"] = 2
    if data["sft"]:
        _shrink_sft(data["sft"], folder)
    data["engine"] |= {
        "dtype": "float32",
        "kv_cache_gb": 0.25,
        "count": 2,
        "max_num_seqs": 32,
        "kind": "vllm",
        "urls": (),
        "teacher_url": None,
    }
    data["sandbox"] |= {"workers": None if data["sandbox"]["workers"] is None else 1, "memory_mb": 256, "url": "local"}
    names = list(data["evaluate"]["sets"])
    data["evaluate"]["sets"] = {name: {"file": str(folder / "data" / f"evaluate-{name}.jsonl")} for name in names}
    data["evaluate"] |= {
        "samples": 2,
        "max_response_tokens": SHORTEST_RESPONSE,
        "during": data["evaluate"]["during"] | {"every": min(1, data["evaluate"]["during"]["every"])},
    }
    return parse_recipe(data, "rehearsal")


def _shrink_rl(keys: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the keys of `rl`, or those that a stage changes, with small values."""
    tokens = [recipe.settings(stage).limits.max_response_tokens for stage in recipe.stages]
    scale = SHORTEST_RESPONSE / min(tokens or [recipe.rl.limits.max_response_tokens])
    small: dict[str, Any] = {
        "problems_per_step": (4 if len(recipe.stages) == 1 else 2) * keys.get("mini_batches", recipe.rl.mini_batches),
        "group_size": 4,
        "micro_batch_tokens": 4096,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
        "precision": "auto",
    }
    changed = keys | {key: value for key, value in small.items() if key in keys}
    if "mini_batches" in keys:
        changed["problems_per_step"] = small["problems_per_step"]
    if limits := dict(keys.get("limits", {})):
        if "max_response_tokens" in limits:
            limits["max_response_tokens"] = int(limits["max_response_tokens"] * scale)
        if "max_tool_chars" in limits:
            limits["max_tool_chars"] = 200
        changed["limits"] = limits
    if "add" in keys.get("method", {}):
        # The rehearsal's model has another tokenizer than the teacher.
        added = [dict(addition) for addition in keys["method"]["add"] if addition["type"] != "opd"]
        for addition in added:
            if "tokens" in addition:
                addition["tokens"] = max(1, int(addition["tokens"] * scale))
        changed["method"] = keys["method"] | {"add": added}
    return changed


def _shrink_sft(sft: dict[str, Any], folder: Path) -> None:
    sft["conversations"] = [
        {
            "file": str(folder / "data" / f"conversations-{number}.jsonl"),
            "count": min(entry["count"] or CONVERSATIONS, CONVERSATIONS),
        }
        for number, entry in enumerate(sft["conversations"])
    ]
    if sft["problems"]:
        sft["problems"] = {"synthetic": {"count": 64, "seed": 1, "levels": [1], "families": list(FAMILIES)}}
    sft |= {"epochs": 1, "batch_size": 8, "max_tokens": 512, "micro_batch_tokens": 2048, "checkpoint_every": 4}


def shrink_profile(profile: Profile, folder: Path) -> Profile:
    """Return a profile of this machine with the trainer, sandbox and environment variables of `profile`."""
    nodes = 2 if profile.trainer == "verl" else 1
    cpus = max(1, (os.cpu_count() or 1) // nodes)
    laptop = load_profile("laptop")
    return profile.model_copy(
        update={
            "name": f"{profile.name}_rehearsal",
            "backend": "local",
            "hardware": Hardware(nodes=nodes, cpus_per_node=cpus, memory_gb_per_node=4, disk_gb=1),
            "engine": EngineSettings(dtype="float32", eager=True, max_sequences=32, kv_cache_dtype_bytes=4),
            "parallelism": _shrink_parallelism(profile, ranks=nodes),
            "sandbox": profile.sandbox.model_copy(update={"workers_per_node": 1}),
            "storage": Storage(**{name: str(folder / name) for name in ("runs", "models", "data")}),
            # RSTAR_LAB_RETRIES: as in a job on GPUs, a stage whose worker dies continues in new processes.
            "env": {**profile.env, **laptop.env, "RSTAR_LAB_RETRIES": "2", **recording(reads_folder(folder))},
            "container": None,
            "slurm": Slurm(),
        }
    )


def reads_folder(folder: Path, dry: bool = False) -> Path:
    """Return the folder in which the processes of a rehearsal record the keys that they read. folder: folder of the rehearsal.
    dry: the folder of its dry run."""
    return folder / ("key_reads_dry_run" if dry else "key_reads")


def _shrink_parallelism(profile: Profile, ranks: int) -> Parallelism:
    """Return the parallelism for `ranks` CPU ranks. Sequence parallelism and model replicas are kept if the profile has them."""
    parallel = profile.parallelism
    replicas = 0 < parallel.fsdp_size < profile.hardware.gpus
    return Parallelism(
        fsdp_size=1 if replicas else -1,
        sequence_parallel=min(parallel.sequence_parallel, ranks),
        tokens_per_gpu=8192,
    )
