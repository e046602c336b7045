"""Everything that can be known to go wrong, looked at before a GPU is touched. `rstar-lab preflight RECIPE --profile P`."""

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.profiles import Profile, load_profile
from rstar_lab.rl import estimate
from rstar_lab.rl.recipe import CODE_TOOLS, Recipe, load_recipe
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.tools import make_tools

# The paper's own figure, which estimates of its recipe are put beside: 510 steps on 64 MI300X in one week.
PAPER_STEPS, PAPER_HOURS = 510, 168.0
SAMPLED_PROBLEMS = 32
CODE = "print('</tool_call>')\n"  # a tag inside a string must not end the call
# Recipe keys that only the local trainer reads, with the profile's part that verl reads instead.
LOCAL_ONLY = {
    "engine.count": "engine.tensor_parallel", "engine.max_batch": "engine.max_sequences",
    "engine.memory_share": "engine.memory_utilization", "engine.dtype": "engine.dtype", "engine.kind": "trainer, verl, which has vLLM",
    "engine.urls": "trainer, verl, which starts its own servers", "engine.deadline_s": "nothing: verl's servers are its own",
    "engine.scheduler": "trainer, verl, whose router sends a rollout's turns to one server",
    "rl.micro_batch_tokens": "parallelism.tokens_per_gpu", "rl.processes": "the profile's GPUs",
    "rl.rollout": "nothing: verl rolls out asynchronously",
}  # fmt: skip


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    message: str


class NotNeeded(Exception):
    """A check that has nothing to look at on this profile: it passes."""


class Skip(Exception):
    """What a check cannot see from here."""


class Warn(Exception):
    """What is odd, but may be meant."""


@dataclass(frozen=True)
class Subject:
    recipe: Recipe
    profile: Profile
    verl_overrides: Mapping[str, Any]

    @property
    def architecture(self) -> estimate.Architecture:
        found = estimate.architecture_of(self.recipe.model)
        if found is None:
            raise Skip(f"model {self.recipe.model} is not on this machine, and its shape is not a known one")
        return found

    @property
    def on_gpus(self) -> Profile:
        if not self.profile.hardware.gpus:
            raise NotNeeded(f"profile {self.profile.name} has no GPU")
        return self.profile


def preflight(recipe: str, profile: str, overrides: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """All findings, in order. A recipe or profile that cannot be read is a failure and ends the list."""
    own = {key.removeprefix("verl."): value for key, value in (overrides or {}).items() if key.startswith("verl.")}
    ours = {key: value for key, value in (overrides or {}).items() if not key.startswith("verl.")}
    try:
        loaded = load_recipe(recipe, ours)
        yield Finding("recipe", Status.PASS, f"{loaded.name}: {len(loaded.stages)} stages, every key known")
    except UserError as error:
        yield Finding("recipe", Status.FAIL, str(error))
        return
    try:
        chosen = load_profile(profile)
        yield Finding("profile", Status.PASS, f"{chosen.name}: {chosen.description}")
    except UserError as error:
        yield Finding("profile", Status.FAIL, str(error))
        return
    subject = Subject(loaded, chosen, own)
    for name, check in CHECKS.items():
        try:
            yield Finding(name, Status.PASS, check(subject))
        except NotNeeded as reason:
            yield Finding(name, Status.PASS, f"not needed: {reason}")
        except Skip as reason:
            yield Finding(name, Status.SKIP, str(reason))
        except Warn as reason:
            yield Finding(name, Status.WARN, str(reason))
        except UserError as error:
            yield Finding(name, Status.FAIL, str(error))


# Configuration


def own_functions(subject: Subject) -> str:
    """The tools and the reward that the recipe names are there, and say what they take."""
    rl = subject.recipe.rl
    own = [name for name in rl.tools if name not in CODE_TOOLS]
    if not own and rl.reward == "verify":
        raise NotNeeded("the recipe names none")
    make_tools(own, None, own_timeout_s=rl.tool_timeout_s)
    make_reward(rl.reward)
    return ", ".join([*own, *([rl.reward] if rl.reward != "verify" else [])])


def unread_keys(subject: Subject) -> str:
    """Keys that the chosen trainer cannot honour, and such that another place decides."""
    if subject.profile.trainer != "verl":
        return "the local trainer reads every key"
    from rstar_lab.rl.verl.offer import refusals

    if refused := refusals(subject.recipe):
        raise UserError(f"not under verl: {'; '.join(refused)}")
    recipe, default = subject.recipe, Recipe(model=subject.recipe.model)
    found = []
    for key, instead in LOCAL_ONLY.items():
        section, _, name = key.partition(".")
        if getattr(getattr(recipe, section), name) != getattr(getattr(default, section), name):
            found.append(f"{key} (verl reads the profile's {instead})")
    if found:
        raise Warn(f"set, but decided elsewhere: {'; '.join(found)}")
    return "verl reads every key that is set"


def verl_configuration(subject: Subject) -> str:
    """The whole configuration, composed from verl's own files and validated by verl."""
    if subject.profile.trainer != "verl":
        raise NotNeeded(f"profile {subject.profile.name} trains without verl")
    try:
        from rstar_lab.rl.verl import config
        from rstar_lab.rl.verl.progress import stages_of
    except ImportError as error:
        raise Skip(f"verl is not installed here ({error})") from error
    recipe = subject.recipe
    if not recipe.stages:
        raise UserError("stages: the recipe has none to train")
    for settings in stages_of(recipe, recipe.runs.absolute()):
        overrides = config.overrides(settings, subject.profile, Path(recipe.model), subject.verl_overrides)
        composed = config.compose(overrides)
    return f"verl {metadata.version('verl')} composes it for each of {len(recipe.stages)} stages ({len(composed)} sections)"


# Tokens and data


def token_contract(subject: Subject) -> str:
    """Chat template, loss mask and parser on the recipe's own tokenizer."""
    from rstar_lab.rl import chat

    folder = Path(subject.recipe.model)
    if subject.recipe.model == "tiny":
        raise NotNeeded("the run makes its own tokenizer")
    if not (folder / "tokenizer_config.json").is_file():
        raise Skip(f"tokenizer of {subject.recipe.model} is not on this machine")
    from rstar_lab.rl.model import load_tokenizer

    tokenizer = load_tokenizer(folder)
    for token in chat.SPECIAL_TOKENS:
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise UserError(
                f"tokenizer: {token} is not one token, so a turn cannot end with it; add it as a special token"
            )
    prompt = chat.render_prompt("What is 1 + 1?")
    if not prompt.endswith(chat.GENERATION_PREFIX):
        raise UserError("chat template: a prompt does not end with the generation prefix")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != prompt:
        raise UserError("tokenizer: a prompt does not survive encoding and decoding")
    call = chat.render_tool_call(chat.CODE_TOOL["function"]["name"], {"code": CODE, "input": ""})
    written = tokenizer.encode(f"I compute.</reason>\n{call}{chat.END_OF_TURN}", add_special_tokens=False)
    parsed = chat.parse_tool_calls(str(tokenizer.decode(written, skip_special_tokens=False)))
    if len(parsed) != 1 or parsed[0].error or (parsed[0].arguments or {}).get("code") != CODE:
        raise UserError(f"parser: a tool call does not survive the tokenizer: {parsed}")
    answer = tokenizer.encode(chat.render_tool_responses(["2"]), add_special_tokens=False)
    joined = tokenizer.decode([*ids, *written, *answer], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    pieces = [prompt, f"I compute.</reason>\n{call}{chat.END_OF_TURN}", chat.render_tool_responses(["2"])]
    if joined != "".join(pieces):
        raise UserError("tokenizer: turns tokenised one by one are not the conversation, so the loss mask would be off")
    return f"prefix, turn end, loss mask and call round trip hold on {len(tokenizer)} tokens"


def data(subject: Subject) -> str:
    """Schema of every stage's problems, and whether sampled true answers verify."""
    from rstar_lab.rl.problems import load_problems
    from rstar_lab.verify import verify

    told, missing = [], []
    for stage in subject.recipe.stages:
        section = stage.problems
        if section.file is None:
            told.append(f"{stage.name}: made on the spot")
            continue
        if not section.file.is_file():
            missing.append(str(section.file))
            continue
        problems = load_problems(section.file, fields={str(ours): theirs for ours, theirs in section.fields.items()})
        if not problems:
            raise UserError(f"stages.{stage.name}.problems: {section.file} holds no problem")
        sampled = problems[:: max(1, len(problems) // SAMPLED_PROBLEMS)][:SAMPLED_PROBLEMS]
        wrong = [p for p in sampled if not verify(f"<answer>\\boxed{{{p.answer}}}</answer>", p.answer)]
        if len(wrong) > len(sampled) // 4:
            raise UserError(
                f"stages.{stage.name}.problems: of {len(sampled)} true answers {len(wrong)} do not verify, e.g. "
                f"{wrong[0].problem_id}: {wrong[0].answer!r}; `rstar-lab data prepare` takes answers out of solutions"
            )
        told.append(
            f"{stage.name}: {len(problems)} problems, {len(sampled) - len(wrong)}/{len(sampled)} answers verify"
        )
    if missing:
        raise Skip(f"not on this machine: {', '.join(missing)}")
    return "; ".join(told) or "no stages"


# The sandbox


def sandbox(subject: Subject) -> str:
    """Reachable, and fast enough for a step's calls while it generates."""
    section = subject.recipe.sandbox
    calls = max(
        rl.problems_per_step * rl.group_size * rl.oversample * estimate.CALLS_PER_ROLLOUT
        for rl in (subject.recipe.settings(stage) for stage in subject.recipe.stages)
    ) if subject.recipe.stages else 0  # fmt: skip
    hardware, settings = subject.profile.hardware, subject.profile.sandbox
    workers = (
        (section.workers or hardware.cpus_per_node)
        if section.url == "local"
        else settings.workers_per_node * hardware.nodes
    )
    if section.url != "local":
        try:
            seconds = asyncio.run(_probe_remote(section.url))
        except Exception as error:
            raise Skip(f"{section.url} cannot be reached from here ({type(error).__name__})") from error
    elif subject.profile.backend != "local":
        raise Skip(f"the sandbox of {subject.profile.name} runs on its nodes; it is asked for {calls:.0f} calls a step")
    else:
        seconds = asyncio.run(_probe_local(section))
    load = calls * seconds / max(1, workers)
    message = (
        f"{seconds * 1e3:.0f} ms a call; {calls:.0f} calls a step on {workers} workers keep them busy for {load:.0f} s"
    )
    if subject.profile.hardware.gpus:
        longest = max(
            estimate.step_time(subject.architecture, subject.recipe.settings(s), subject.profile).generation
            for s in subject.recipe.stages
        )
        if load > longest:
            raise UserError(
                f"{message}, longer than the generation of {longest:.0f} s: more workers (profile sandbox.workers_per_node)"
            )
    return message


async def _probe_local(section: Any) -> float:
    from rstar_lab.sandbox import Limits, LocalSandbox

    async with LocalSandbox(Limits(timeout_s=section.timeout_s, memory_mb=section.memory_mb), 1) as box:
        return await _probe(box)


async def _probe_remote(url: str) -> float:
    from rstar_lab.sandbox import SandboxClient

    async with SandboxClient(url, deadline_s=10.0) as box:
        return await _probe(box)


async def _probe(box: Any, count: int = 5) -> float:
    seconds = []
    for number in range(count):
        started = time.monotonic()
        result = await box.run(f"print({number} * 2)")
        seconds.append(time.monotonic() - started)
        if result.stdout.strip() != str(number * 2):
            raise UserError(f"sandbox: it answered {result.outcome} {result.stdout!r} instead of {number * 2}")
    return statistics.median(seconds)


# Memory, batches, disk


def gpu_memory(subject: Subject) -> str:
    """Weights, optimizer, longest micro-batch and KV cache against the HBM, in the stage with the longest responses."""
    profile = subject.on_gpus
    stages = [subject.recipe.settings(stage) for stage in subject.recipe.stages] or [subject.recipe.rl]
    rl = max(stages, key=lambda keys: keys.max_response_tokens)
    found = estimate.memory(subject.architecture, rl, profile)
    message = (
        f"training {found.training_peak:.0f} GB (state {found.training_state:.0f}), rollout {found.rollout_peak:.0f} GB of "
        f"{found.hbm:.0f} GB; KV cache {found.kv_tokens} tokens a replica = {found.kv_tokens // max(1, found.longest)} rollouts "
        f"of the longest {found.longest}"
    )
    if not found.fits:
        raise UserError(
            f"{message}: does not fit; larger engine.tensor_parallel or parallelism.sequence_parallel, smaller "
            "parallelism.tokens_per_gpu or engine.memory_utilization, or offload in the profile"
        )
    return message


def batches(subject: Subject) -> str:
    """problems x kept rollouts over ranks and mini-batches."""
    profile = subject.profile
    ranks = max(1, profile.hardware.gpus // profile.parallelism.sequence_parallel)
    if (
        profile.hardware.gpus % (profile.parallelism.sequence_parallel * profile.engine.tensor_parallel)
        and profile.hardware.gpus
    ):
        raise UserError(
            f"profile {profile.name}: {profile.hardware.gpus} GPUs cannot be cut by sequence_parallel "
            f"{profile.parallelism.sequence_parallel} and tensor_parallel {profile.engine.tensor_parallel}"
        )
    told = []
    for stage in subject.recipe.stages:
        rl = subject.recipe.settings(stage)
        kept = rl.group_size
        if rl.problems_per_step % rl.mini_batches:
            raise UserError(
                f"stages.{stage.name}: problems_per_step {rl.problems_per_step} / mini_batches {rl.mini_batches} is not whole"
            )
        mini = rl.problems_per_step // rl.mini_batches * kept
        if mini % ranks:
            raise UserError(f"stages.{stage.name}: a mini-batch of {mini} rollouts cannot be cut over {ranks} ranks")
        told.append(f"{stage.name}: {rl.problems_per_step} x {kept} = {rl.mini_batches} x {mini} over {ranks} ranks")
    return "; ".join(told) or "no stages"


def disk(subject: Subject) -> str:
    """Checkpoints and transcripts against the free space, or the profile's where the folder is not here."""
    checkpoints, store = estimate.disk_bytes(subject.architecture, subject.recipe)
    needed = (checkpoints + store) / estimate.GB
    folder = Path(subject.profile.storage.runs)
    here = subject.profile.backend == "local"
    if here:
        folder = subject.recipe.runs.absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / estimate.GB
    else:
        free = subject.profile.hardware.disk_gb
    where = "free" if here else "by the profile"
    message = (
        f"checkpoints {checkpoints / estimate.GB:.1f} GB, run store {store / estimate.GB:.1f} GB; {free:.0f} GB {where}"
    )
    if needed > free:
        raise UserError(f"{message}: fewer rl.keep_checkpoints, rl.token_arrays: sampled, or another storage.runs")
    return message


# The machine


def gpu_variables(subject: Subject) -> str:
    """Variables that hide GPUs from each other's tools."""
    merged = {**os.environ, **subject.profile.env}
    hip, cuda, rocr = (merged.get(f"{kind}_VISIBLE_DEVICES") for kind in ("HIP", "CUDA", "ROCR"))
    if rocr is not None and (hip is not None or cuda is not None):
        raise UserError(
            "ROCR_VISIBLE_DEVICES is set together with HIP_ or CUDA_VISIBLE_DEVICES: verl refuses that; unset ROCR_VISIBLE_DEVICES"
        )
    if hip is not None and cuda is not None and hip != cuda:
        raise UserError(f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: unset one")
    subject.on_gpus  # noqa: B018
    if "expandable_segments:True" in merged.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise UserError(
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments: vLLM's sleep mode cannot give memory back then; unset it"
        )
    return "no conflict"


def versions(subject: Subject) -> str:
    """What is installed against what was tested together."""
    wanted = ["torch", "transformers"] + (
        ["verl", "ray", "tensordict", "TransferQueue"] if subject.profile.trainer == "verl" else []
    )
    found = {}
    for package in wanted:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise Skip(f"{package} is not installed here; the nodes' image has it") from error
    told = ", ".join(f"{name} {version}" for name, version in found.items())
    if subject.profile.trainer == "verl" and not found["verl"].startswith("0.9."):
        raise Warn(f"{told}: the adapters were tested with verl 0.9.1")
    return told


def devices(subject: Subject) -> str:
    """GPUs of this machine against the profile's."""
    profile = subject.on_gpus
    import torch

    if not torch.cuda.is_available():
        raise Skip("no GPU on this machine")
    here, memory_gb = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory / estimate.GB
    if here < profile.hardware.gpus_per_node or memory_gb < 0.9 * profile.hardware.hbm_gb:
        raise UserError(
            f"{here} GPUs of {memory_gb:.0f} GB here, the profile says {profile.hardware.gpus_per_node} of {profile.hardware.hbm_gb:.0f} GB"
        )
    return f"{here} x {torch.cuda.get_device_name(0)}"


def duration(subject: Subject) -> str:
    """Seconds a step and hours in all, by estimate.FORMULA; beside the paper's week where the machine is the paper's."""
    profile = subject.on_gpus
    if not profile.hardware.hbm_tb_per_s or not profile.hardware.bf16_tflops:
        raise Skip(f"profile {profile.name} gives no peak rates")
    told, seconds, steps = [], 0.0, 0
    for stage in subject.recipe.stages:
        step = estimate.step_time(subject.architecture, subject.recipe.settings(stage), profile)
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in vars(step).items())
        told.append(f"{stage.name}: {step.total:.0f} s a step ({parts})")
        seconds += stage.steps * step.total
        steps += stage.steps
    message = f"{'; '.join(told)}; {steps} steps = {seconds / 3600:.0f} h"
    if steps == PAPER_STEPS and profile.hardware.gpus == 64 and (profile.hardware.gpu or "").startswith("MI300X"):
        a_step = PAPER_HOURS * 3600 / PAPER_STEPS
        message += f"; the paper: {PAPER_STEPS} steps in one week = {PAPER_HOURS:.0f} h, {a_step:.0f} s a step"
    return message


CHECKS: dict[str, Callable[[Subject], str]] = {
    "unread keys": unread_keys, "verl configuration": verl_configuration, "tokens": token_contract, "data": data,
    "own functions": own_functions, "sandbox": sandbox, "memory": gpu_memory, "batches": batches, "disk": disk,
    "GPU variables": gpu_variables, "versions": versions, "devices": devices, "time": duration,
}  # fmt: skip


def run_preflight(
    recipe: str, profile: str, overrides: Mapping[str, Any], *, strict: bool = False, as_json: bool = False
) -> int:
    """Print the table, or one JSON object a line; returns the exit code: 1 for a failure, with `strict` for a skip too."""
    from rich.console import Console
    from rich.table import Table

    colours = {Status.PASS: "green", Status.WARN: "yellow", Status.SKIP: "cyan", Status.FAIL: "bold red"}
    table = Table("check", "status", "message", title=f"preflight {recipe} on {profile}")
    counts = dict.fromkeys(Status, 0)
    for finding in preflight(recipe, profile, overrides):
        counts[finding.status] += 1
        if as_json:
            print(
                json.dumps({"check": finding.check, "status": str(finding.status), "message": finding.message}),
                flush=True,
            )
        table.add_row(finding.check, f"[{colours[finding.status]}]{finding.status}[/]", finding.message)
    code = 1 if counts[Status.FAIL] or (strict and counts[Status.SKIP]) else 0
    if as_json:
        print(
            json.dumps(
                {str(status): count for status, count in counts.items()} | {"exit": code, "formula": estimate.FORMULA}
            )
        )
    else:
        console = Console()
        console.print(table)
        console.print(f"time: {estimate.FORMULA}", style="dim")
        console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return code
