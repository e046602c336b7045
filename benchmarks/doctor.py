"""Detection and false-alarm rates of `rstar-lab doctor`, measured on short runs with planted faults and on honest runs.

    python -m benchmarks.doctor train FOLDER [RUN...]   # about 10 s of two cores per run; continues where it was interrupted
    python -m benchmarks.doctor score FOLDER            # applies the rules to these runs; writes doctor.csv, rates.json, docs/doctor.md

All runs start from one SFT model of the recipe tiny_fast and train for 12 steps of 4 problems. They run one after the other in one
process, with one vLLM engine that serves under two names. The checks of the trainer are off, so that each fault reaches the log.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import binomtest

from benchmarks.planted import LR, PLANTED, Planted
from benchmarks.short_runs import LIMITS, RememberingSandbox, done_file, open_engine, sft_model, train_one
from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import benchmark_file
from rstar_lab.doctor.diagnosis import RATES_FILE, diagnose
from rstar_lab.doctor.logs import read_logs
from rstar_lab.doctor.rule import Log, Rule
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.sandbox import LocalSandbox

STEPS = 12
# Rules and thresholds are chosen on the runs of the first two seeds. The rates that the page reports are those of the others, scored
# after the last change of a rule.
SEEDS = (0, 5, 6, 7, 8)
REPORTED = (6, 7, 8)
KEYS: dict[str, Any] = {
    "processes": 1, "rl.problems_per_step": 4, "rl.group_size": 8, "rl.method.roc.rule": "none", "rl.lr": LR,
    "stages.0.steps": STEPS, "engine.mismatch_limit": 1e9, "rl.limits.max_response_tokens": 64,
    "engine.count": 2, "rl.checkpoint_every": 100, "rl.token_arrays": "all", "evaluate.samples": 1,
    "evaluate.sets.held_out.synthetic.count": 16,
}  # fmt: skip
# Honest runs: other seeds, methods, schedules, learning rates and problems. Nothing is broken in them.
HONEST: dict[str, dict[str, Any]] = {
    "default": {},
    "roc": {"rl.method.roc.rule": "paper"},
    "gspo": {"rl.method.loss": "gspo", "rl.method.clip_low": 3e-3, "rl.method.clip_high": 4e-3},
    "one-update": {"rl.mini_batches": 1, "rl.old_log_probs": "trainer"},
    "low-lr": {"rl.lr": LR / 2},
    "evaluated": {"evaluate.during.every": 2},
    "lora": {"rl.lora": {"rank": 8}, "rl.lr": 5e-3},
    "other-problems": {"stages.0.problems.synthetic.families": ["exclusive_or", "common_divisor"]},
    "cooler": {"rl.temperature": 0.8},
    "one-step-off": {
        "rl.schedule": {"type": "one_step_off"}, "rl.old_log_probs": "trainer", "rl.correction": {"type": "tis"}, "rl.mini_batches": 1,
    },
    "dr-grpo": {"rl.method.normalise_std": False, "rl.method.aggregation": "seq-mean-token-sum-norm"},
    "maxrl": {"rl.method.type": "maxrl"},
    "dapo": {
        "rl.method.clip_high": 0.28, "rl.method.add": [{"type": "overlong_buffer", "tokens": 16}, {"type": "overlong_filter"}],
        "rl.schedule": {"type": "sync", "lockstep": True, "dynamic_sampling": 1},
    },
    "kl-loss": {"rl.method.kl_coefficient": 0.01},
    "async": {
        "rl.schedule": {"type": "async"}, "rl.old_log_probs": "trainer", "rl.correction": {"type": "tis"}, "rl.mini_batches": 1,
    },
    "four-updates": {"rl.mini_batches": 4},
    "large-groups": {"rl.problems_per_step": 2, "rl.group_size": 16},
    "small-groups": {"rl.problems_per_step": 8, "rl.group_size": 4},
    "recipe-lr": {"rl.lr": 5e-4},
    "warm-up": {"rl.warmup_steps": 6},
    "few-problems": {"stages.0.problems.synthetic.count": 4},
    "sft": {},
    "sft-half-lr": {"sft.lr": 0.0014, "sft.muon_lr": 0.007},
    "sft-adamw": {"sft.optimizer": "adamw", "sft.lr": 0.0028},
}  # fmt: skip
SFT_VARIANTS = ("sft", "sft-half-lr", "sft-adamw")


@dataclass(frozen=True)
class Job:
    """One run: a fault and its strength, or `honest` and the name of a variant."""

    fault: str
    strength: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.fault}_{self.strength}_{self.seed}"

    @property
    def planted(self) -> Planted | None:
        return PLANTED.get(self.fault)

    @property
    def sft(self) -> bool:
        return self.planted.sft if self.planted else self.strength in SFT_VARIANTS

    @property
    def keys(self) -> Mapping[str, Any]:
        return self.planted.keys(float(self.strength)) if self.planted else HONEST[self.strength]


def jobs() -> list[Job]:
    """Return all runs in the order in which they are made. First, each fault with its usual strength, seed by seed."""
    usual, others = list[Job](), list[Job]()
    for seed in SEEDS:
        usual += [Job("honest", variant, seed) for variant in HONEST]
        for fault in PLANTED.values():
            for strength in fault.strengths:
                (usual if strength == fault.usual else others).append(Job(fault.name, f"{strength:g}", seed))
    return [*usual, *others]


async def train_all(folder: Path, names: Sequence[str] = ()) -> None:
    """Make the runs that are missing in `folder`. names: only these runs, in this order. Default: all."""
    torch.set_num_threads(1)
    model = await sft_model(folder)
    by_name = {job.name: job for job in jobs()}
    todo = [by_name[name] for name in names] if names else [*by_name.values()]
    for keeps_cache in (False, True):
        left = [job for job in todo if (job.fault == "prefix-cache-kept") is keeps_cache]
        left = [job for job in left if not done_file(folder, job.name).exists()]
        if not left:
            continue
        patch = PLANTED["prefix-cache-kept"].patch(1) if keeps_cache else contextlib.nullcontext()
        with patch:
            async with open_engine(folder, model, KEYS) as engine, RememberingSandbox(LIMITS, 2) as sandbox:
                for number, job in enumerate(left):
                    started = time.monotonic()
                    error = await _train(job, folder, model, engine, sandbox)
                    print(f"{number + 1}/{len(left)} {job.name} {time.monotonic() - started:.0f} s {error}", flush=True)


async def _train(job: Job, folder: Path, model: Path, engine: VllmEngine, sandbox: LocalSandbox) -> str:
    own = {"seed": 100 + job.seed, "stages.0.problems.synthetic.seed": 200 + job.seed, "name": "run"}
    own |= {"sft.problems.synthetic.count": 500} if job.sft else {"model": str(model), "sft": None}
    broken = job.planted.planted(float(job.strength)) if job.planted else contextlib.nullcontext()
    start = None if job.sft else model
    return await train_one(folder, job.name, KEYS | own | dict(job.keys), start, engine, sandbox, broken)


# Scores


def score(folder: Path) -> pd.DataFrame:
    """Apply the rules to all stored runs. Returns one row per run and finding, and one without a rule for each run.

    step: the first step from which the log up to it has the finding.
    """
    rows = []
    for job in jobs():
        done = done_file(folder, job.name)
        if done.exists():
            own = {"fault": job.fault, "strength": job.strength, "seed": job.seed}
            found = first_steps(folder / "runs" / job.name)
            if found is None:  # no step was made
                continue
            rows.append(own | {"rule": "", "step": 0, "error": json.loads(done.read_text())["error"]})
            rows += [own | {"rule": rule, "step": step, "error": ""} for rule, step in sorted(found.items())]
    return pd.DataFrame(rows)


def first_steps(runs: Path) -> dict[str, int] | None:
    """Return the first step from which the log has each finding; None if no step was made."""
    with tempfile.TemporaryDirectory() as imported:
        try:
            logs = read_logs(runs, Path(imported))
        except UserError:
            return None
        return {
            finding.rule.name: _first_step(log, finding.rule) for log in logs for finding in diagnose([log]).findings
        }


def _first_step(log: Log, rule: Rule) -> int:
    steps = sorted(log.steps.step)
    first = steps[-1]
    for step in reversed(steps[:-1]):
        part = _until(log, step)
        if part.missing(rule.reads) or not rule.check(part):
            break
        first = step
    return int(first)


def _until(log: Log, step: int) -> Log:
    steps, rollouts = log.steps[log.steps.step <= step], log.rollouts[log.rollouts.step <= step]
    return replace(log, steps=steps.reset_index(drop=True), rollouts=rollouts)


# Tables


def recorded() -> pd.DataFrame:
    """Return the recorded scores."""
    return pd.read_csv(benchmark_file("doctor.csv"), keep_default_na=False, dtype={"strength": str})


def is_reported(scores: pd.DataFrame) -> pd.Series:
    """Return which rows belong to runs that the page reports."""
    return scores.seed.isin(REPORTED)


def interval(hits: int, n: int) -> str:
    """Return "3/5 [0.23, 0.88]": a share with its 95% Wilson interval."""
    low, high = binomtest(hits, n).proportion_ci(method="wilson")
    return f"{hits}/{n} [{low:.2f}, {high:.2f}]"


def named(scores: pd.DataFrame) -> pd.DataFrame:
    """Return one row per run with a fault: fault, strength, seed, step (at which the fault was named; NaN: not named), others."""
    rows = []
    for (fault, strength, seed), own in scores[scores.fault != "honest"].groupby(
        ["fault", "strength", "seed"], sort=False
    ):
        right = own[own.rule.isin(PLANTED[str(fault)].named_by)]
        others = sorted(set(own.rule) - {"", *right.rule})
        rows.append((fault, strength, seed, right.step.min(), others))
    return pd.DataFrame(rows, columns=["fault", "strength", "seed", "step", "others"])


def fault_table(scores: pd.DataFrame) -> str:
    """Return in how many reported runs of each fault the doctor names it, by strength, as Markdown."""
    runs = named(scores)
    runs = runs[is_reported(runs)]
    lines = ["| fault | strength: runs in which it is named | step (median) |", "|---|---|---|"]
    for fault in PLANTED.values():
        own = runs[runs.fault == fault.name]
        if own.empty:
            continue
        by_strength = [(f"{strength:g}", own[own.strength == f"{strength:g}"].step) for strength in fault.strengths]
        counts = ", ".join(f"{name}: {step.notna().sum()}/{len(step)}" for name, step in by_strength if len(step))
        step = "–" if own.step.isna().all() else f"{own.step.median():g}"
        lines.append(f"| {fault.name}: {fault.meaning} | {counts} | {step} |")
    return "\n".join(lines) + "\n"


def summary(scores: pd.DataFrame) -> str:
    """Return the totals as sentences."""
    runs, honest = named(scores), scores[scores.fault == "honest"]
    parts = {"reported": runs[is_reported(runs)], "other": runs[~is_reported(runs)]}
    ends = scores[(scores.rule == "") & (scores.error != "")]
    alarms = {
        name: (
            int((own.rule != "").sum()),
            own[own.rule != ""].drop_duplicates(["strength", "seed"]).shape[0],
            int((own.rule == "").sum()),
        )
        for name, own in (
            ("reported", honest[is_reported(honest)]),
            ("other", honest[~is_reported(honest)]),
        )
    }
    lost = parts["reported"][parts["reported"].step.isna()]
    listed = (
        ", ".join(f"{row.fault} ({row.strength})" for row in lost.drop_duplicates(["fault", "strength"]).itertuples())
        or "none"
    )
    seeds = ", ".join(str(seed) for seed in sorted(set(scores.seed) & set(REPORTED)))
    titles = {
        "reported": f"Reported runs (seeds {seeds})",
        "other": "Runs on which rules and thresholds were chosen",
    }
    kinds, count = honest.strength.nunique(), int((honest.rule == "").sum())
    lines = [
        f"{len(runs) + count} runs: {len(runs)} with one of {runs.fault.nunique()} faults, {count} honest ones of {kinds} kinds; "
        f"{len(ends)} ended with an error.",
        "",
    ]
    for name, title in titles.items():
        count, alarmed, n = alarms[name]
        hits = int(parts[name].step.notna().sum())
        lines.append(
            f"- {title}: the fault is named in {interval(hits, len(parts[name]))} runs; "
            f"{interval(alarmed, n)} honest runs have a false alarm at step 12, {count} in all."
        )
    wrong = honest[is_reported(honest) & (honest.rule != "")].rule.value_counts()
    lines.append(
        f"- False alarms in reported runs: {', '.join(f'{name} ({n})' for name, n in wrong.items()) or 'none'}."
    )
    lines.append(f"- Not named in a reported run: {listed}.")
    if left := (planned := len(jobs())) - int((scores.rule == "").sum()):
        lines.append(
            f"- Of {planned} planned runs (each strength of each fault and each honest kind), {left} were not made."
        )
    else:
        lines.append(f"- Each strength of each fault and each honest kind was run with {len(SEEDS)} seeds.")
    return "\n".join(lines) + "\n"


def rates(scores: pd.DataFrame) -> dict[str, list[int]]:
    """Return [reported runs with a planted fault, reported runs] among those with each finding."""
    reported = scores[is_reported(scores) & (scores.rule != "")]
    return {str(rule): [int((own.fault != "honest").sum()), len(own)] for rule, own in reported.groupby("rule")}


def write_results(scores: pd.DataFrame) -> None:
    """Write the recorded scores, the rates that the doctor shows, and the tables of the page."""
    scores.to_csv(benchmark_file("doctor.csv"), index=False)
    RATES_FILE.write_text(json.dumps(rates(scores), indent=1) + "\n")
    text = PAGE.read_text()
    for name, content in (("summary", summary), ("faults", fault_table)):
        text = replace_part(text, name, content(scores))
    PAGE.write_text(text)


def replace_part(page: str, name: str, content: str) -> str:
    """Return a page with another text between `<!-- NAME -->` and the next `<!-- end -->`."""
    before, _, rest = page.partition(f"<!-- {name} -->\n")
    return f"{before}<!-- {name} -->\n{content}<!-- end -->{rest.partition('<!-- end -->')[2]}"


PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "score"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.command == "train":
        asyncio.run(train_all(given.folder.resolve(), given.names))
    else:
        write_results(score(given.folder))


if __name__ == "__main__":
    main()
