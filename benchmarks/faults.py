"""Inject faults into a short training run and find out which check notices each: `rstar-lab inject`.

Each fault is a mistake that other frameworks' users have reported and that trains a worse model without an error. A check
notices it if preflight fails or warns, if the run stops with an error, or if `find_alerts` reports an alert.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.planted import PLANTED, Planted, unchecked
from benchmarks.trl_faults import NOT_APPLICABLE, PROMPTS, TrlRun, run_trl
from rstar_lab.analysis import find_alerts, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.progress import Reporter, plain
from rstar_lab.doctor import doctor
from rstar_lab.rl import resolved
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import fine_tune, train
from rstar_lab.rl.preflight.run import Status, preflight
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.resolved import read_problems, read_stage_problems, resolve
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.training.rollout_source import RolloutSource
from rstar_lab.runs.reader import RunReader
from rstar_lab.sandbox import CallResult, LocalSandbox

MAX_STEPS = 3  # a fault that no check notices within these steps counts as not noticed
DOCTOR_STEPS = 12  # the same for the faults of `benchmarks.planted`, which the doctor looks for
TRAINERS = ("rstar-lab", "trl")
TRL_PROBLEMS = MAX_STEPS * PROMPTS
TRL_METRICS = ("reward", "frac_reward_zero_std", "grad_norm")


@dataclass(frozen=True)
class Fault:
    """patch: context manager that breaks the program. problems: alternatively, a function that returns faulty problems
    for the first stage, given the problems of the recipe and of its evaluation sets; preflight reads them from a
    file."""

    name: str
    meaning: str
    patch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    problems: Callable[[Sequence[Problem], Sequence[Problem]], list[Problem]] | None = None


@dataclass(frozen=True)
class FaultResult:
    """noticed: None if the trainer cannot have the fault; `message` is the reason. step: the step in which a check noticed
    the fault; 0: before the first step; None: not noticed. check: name of the check. metrics: the last values that TRL
    logged."""

    fault: str
    noticed: bool | None
    step: int | None
    check: str | None
    message: str
    metrics: dict[str, float] | None = None


def _stale_weights() -> AbstractContextManager[Any]:
    load = VllmEngine.load_weights

    async def only_first(engine: VllmEngine, path: Path | str, version: int) -> None:
        if version == 0:
            await load(engine, path, version)

    return mock.patch.object(VllmEngine, "load_weights", only_first)


@contextlib.contextmanager
def _wrong_template() -> Iterator[None]:
    render = PaperRenderer.prompt
    with mock.patch.object(PaperRenderer, "prompt", lambda *a, **k: render(*a, **k).removesuffix("<reason>")):
        yield


def _changed_rollouts(change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    original = RolloutSource.next_step

    async def next_step(source: RolloutSource, *arguments: Any) -> Any:
        rollouts = await original(source, *arguments)
        changed = {t.traj_id: change(t) for t in rollouts.trajectories}
        selection = rollouts.selection
        kept = replace(selection, trajectories=[changed[t.traj_id] for t in selection.trajectories])
        return replace(rollouts, trajectories=list(changed.values()), selection=kept)

    return mock.patch.object(RolloutSource, "next_step", next_step)


def _empty_outputs() -> AbstractContextManager[Any]:
    async def run_many(sandbox: LocalSandbox, calls: Sequence[Any]) -> list[CallResult]:
        return [CallResult(Outcome.OK, "", "", None, 0.0) for _ in calls]

    return mock.patch.object(LocalSandbox, "run_many", run_many)


def _wrong_sign() -> AbstractContextManager[Any]:
    make = resolved.make_reward

    def negated(*arguments: Any, **named: Any) -> Callable[[str, str], float]:
        reward = make(*arguments, **named)
        return lambda text, answer: 1.0 - reward(text, answer)

    return mock.patch.object(resolved, "make_reward", negated)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("stale-weights", "the engines keep their first weights", _stale_weights),
        Fault("wrong-template", "rollout prompts lack the last part of the prompt used in SFT", _wrong_template),
        Fault(
            "shifted-mask",
            "the loss mask is shifted by one token",
            lambda: _changed_rollouts(lambda t: replace(t, loss_mask=[*t.loss_mask[-1:], *t.loss_mask[:-1]])),
        ),
        Fault(
            "no-log-probs",
            "the engines return log-probs of 0",
            lambda: _changed_rollouts(lambda t: replace(t, log_probs=[0.0] * len(t.log_probs))),
        ),
        Fault("empty-outputs", "the sandbox runs nothing and reports success without output", _empty_outputs),
        Fault("wrong-reward-sign", "wrong answers are rewarded and correct ones are not", _wrong_sign),
        Fault(
            "repeated-problems",
            "a fifth of the training problems are copies of others",
            problems=lambda own, _: [*own, *own[: len(own) // 4]],
        ),
        Fault(
            "evaluation-in-training",
            "evaluation problems are among the training problems, with another layout",
            problems=lambda own, held_out: [
                *own,
                *(p.model_copy(update={"question": f" {p.question.replace(' ', '  ')}"}) for p in held_out[:8]),
            ],
        ),
    )
}
NONE = Fault("none", "nothing is broken: no check may fire")


async def inject(
    recipe: str, names: Sequence[str], reporter: Reporter, *, runs_dir: Path | None = None, trainer: str = "rstar-lab"
) -> list[FaultResult]:
    """Run each fault for MAX_STEPS steps of the recipe's first stage, all from one SFT model. Returns the findings in order.

    names: names in FAULTS or PLANTED, or "none". Faults of PLANTED run for DOCTOR_STEPS steps with the checks of the trainer off;
    they are noticed if the doctor names them from the log. runs_dir: keeps the runs; default: a temporary folder. trainer: one of
    TRAINERS. With trl, "none" always runs, because a warning counts only if the run without a fault does not log it.
    Raises UserError for an unknown name.
    """
    if trainer not in TRAINERS:
        raise UserError(f"unknown trainer {trainer!r}; choose from {', '.join(TRAINERS)}")
    known: dict[str, Fault | Planted] = {**FAULTS, NONE.name: NONE}
    if trainer == "rstar-lab":
        known |= {name: fault for name, fault in PLANTED.items() if name not in known}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"unknown fault {unknown[0]!r}; choose from {', '.join(known)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = runs_dir or Path(temporary)
        first = load_recipe(recipe, {"runs": str(folder), "name": "faults"})
        async with RunSession.open(resolve(first), reporter) as opened:
            _, model = await fine_tune(opened)
        without_fault = _run_trl(recipe, NONE, model) if trainer == "trl" else None
        findings = []
        for name in names:
            fault = known[name]
            reporter.print_line(f"{name}: {fault.meaning}")
            if isinstance(fault, Planted):
                findings.append(await _run_planted(recipe, fault, model, folder, reporter))
            elif without_fault:
                findings.append(_check_trl(recipe, fault, model, without_fault))
            else:
                findings.append(await _run(recipe, fault, model, folder, reporter))
            reporter.emit("fault", **asdict(findings[-1]))
        return findings


def _run_trl(recipe: str, fault: Fault, model: Path) -> TrlRun:
    loaded = load_recipe(recipe)
    held_out = [problem for section in loaded.evaluate.sets.values() for problem in read_problems(section)]
    training = list(read_stage_problems(loaded, loaded.stages[0], held_out))[:TRL_PROBLEMS]
    if fault.problems is not None:
        training = fault.problems(training, held_out)[-TRL_PROBLEMS:]  # the added problems are at the end
    return run_trl(
        fault.name, model, training, held_out, steps=MAX_STEPS,
        max_tokens=loaded.rl.limits.max_response_tokens, max_turns=loaded.rl.limits.max_turns,
        timeout_s=loaded.sandbox.timeout_s,
    )  # fmt: skip


def _check_trl(recipe: str, fault: Fault, model: Path, without_fault: TrlRun) -> FaultResult:
    """Train with a fault in TRL. An error, or a warning that the run without a fault does not log, notices it."""
    if reason := NOT_APPLICABLE.get(fault.name):
        return FaultResult(fault.name, None, None, None, reason)
    run = without_fault if fault is NONE else _run_trl(recipe, fault, model)
    if run.error:
        return FaultResult(fault.name, True, run.steps + 1, "error", run.error, run.metrics)
    if new := [text for text in run.warnings if text not in without_fault.warnings]:
        return FaultResult(fault.name, True, None, "warning", new[0], run.metrics)
    return FaultResult(fault.name, False, None, None, f"no error and no warning in {run.steps} steps", run.metrics)


async def _run(recipe: str, fault: Fault, model: Path, folder: Path, reporter: Reporter) -> FaultResult:
    """Train with a fault and return the first check that notices it."""
    overrides: dict[str, Any] = {
        "runs": str(folder), "name": f"faults-{fault.name}", "model": str(model.resolve()), "sft": None,
        "stages.0.steps": MAX_STEPS,
    }  # fmt: skip
    loaded = load_recipe(recipe, overrides)
    loaded = loaded.model_copy(update={"stages": loaded.stages[:1]})
    if fault.problems is not None:
        overrides |= _write_problems(loaded, fault.problems, folder / fault.name)
        for finding in preflight(recipe, "laptop", overrides):
            if finding.status in (Status.FAIL, Status.WARN):
                return FaultResult(fault.name, True, 0, f"preflight: {finding.check}", finding.message)
        return FaultResult(fault.name, False, None, None, "preflight passed")
    with fault.patch():
        try:
            async with RunSession.open(resolve(loaded), reporter) as opened:
                await train(opened, model)
        except UserError as error:
            run = folder / f"{loaded.name}-rl"
            step = len(RunReader(run).metrics()) + 1 if (run / "run.json").exists() else 0
            return FaultResult(fault.name, True, step, type(error).__name__, str(error))
    alerts = find_alerts(open_runs(folder, run_ids=[f"{loaded.name}-rl"]))
    if alerts.empty:
        return FaultResult(fault.name, False, None, None, f"no check fired in {MAX_STEPS} steps")
    alert = alerts.iloc[0]
    return FaultResult(fault.name, True, int(alert.step), f"alert: {alert.alert}", str(alert.evidence))


async def _run_planted(recipe: str, fault: Planted, model: Path, folder: Path, reporter: Reporter) -> FaultResult:
    """Train with a planted fault and return the finding of the doctor that names it."""
    name = f"faults-{fault.name}"
    start = {} if fault.sft else {"model": str(model.resolve()), "sft": None}
    keys = {"runs": str(folder), "name": name, "stages.0.steps": DOCTOR_STEPS, "engine.mismatch_limit": 1e9, **start}
    loaded = load_recipe(recipe, keys | dict(fault.keys(fault.usual)))
    loaded = loaded.model_copy(update={"stages": loaded.stages[:1]})
    with unchecked(), fault.planted(fault.usual):
        try:
            async with RunSession.open(resolve(loaded), reporter) as opened:
                await (fine_tune(opened) if fault.sft else train(opened, model))
        except (UserError, RuntimeError, ValueError) as error:
            return FaultResult(fault.name, True, None, type(error).__name__, str(error))
    found = doctor(folder / f"{name}-{'sft' if fault.sft else 'rl'}").findings
    for finding in found:
        if finding.rule.name in fault.named_by:
            step = min(finding.evidence.steps, default=None)
            return FaultResult(fault.name, True, step, f"doctor: {finding.rule.name}", finding.evidence.text)
    others = ", ".join(finding.rule.name for finding in found) or "nothing"
    return FaultResult(fault.name, False, None, None, f"the doctor finds {others}")


def _write_problems(
    recipe: Recipe, change: Callable[[Sequence[Problem], Sequence[Problem]], list[Problem]], folder: Path
) -> dict[str, Any]:
    """Write changed training problems and the evaluation problems to files. Returns the overrides that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [problem for section in recipe.evaluate.sets.values() for problem in read_problems(section)]
    training = change(read_stage_problems(recipe, recipe.stages[0], held_out), held_out)
    renamed = [problem.model_copy(update={"problem_id": f"p{number}"}) for number, problem in enumerate(training)]
    write_problems(folder / "training.jsonl", renamed)
    write_problems(folder / "evaluation.jsonl", held_out)
    return {
        "stages.0.problems": {"file": str(folder / "training.jsonl")},
        "evaluate.sets": {"held_out": {"file": str(folder / "evaluation.jsonl")}},
    }


def print_findings(findings: Sequence[FaultResult], trainer: str, as_json: bool) -> int:
    """Print the findings as a table or as JSON. Return 1 if a fault is not noticed or a check fires without a fault; for TRL only
    if it fails without a fault."""
    if as_json:
        print(to_json(findings))
    else:
        table = Table("fault", "noticed", "step", "check", "message")
        for found in findings:
            step = "" if found.step is None else "before the first" if found.step == 0 else str(found.step)
            noticed = {True: "yes", False: "no", None: "cannot occur"}[found.noticed]
            table.add_row(found.fault, noticed, step, found.check or "", plain(found.message))
        Console().print(table)
    wrong = [found.fault for found in findings if found.noticed == (found.fault == NONE.name)]
    return int(NONE.name in wrong if trainer == "trl" else bool(wrong))


def to_json(findings: Sequence[FaultResult]) -> str:
    """Return the findings as the last line of `rstar-lab inject --json`. of: number of faults that the trainer can have."""
    faults = [finding for finding in findings if finding.fault != NONE.name and finding.noticed is not None]
    return json.dumps(
        {
            "faults": [asdict(finding) for finding in findings],
            "noticed": sum(finding.noticed for finding in faults),
            "of": len(faults),
        }
    )


def trl_table(findings: Sequence[dict[str, Any]]) -> str:
    """Return the findings of `rstar-lab inject --trainer trl --json` as a Markdown table, with metrics of the last step."""
    lines = [
        "| fault | noticed by TRL | mean reward | groups with equal rewards | gradient norm |",
        "|---|---|---|---|---|",
    ]
    for finding in findings:
        meaning = FAULTS[finding["fault"]].meaning if finding["fault"] in FAULTS else "no fault"
        noticed = {True: "yes", False: "no", None: "cannot occur"}[finding["noticed"]]
        metrics = finding["metrics"] or {}
        cells = [f"{metrics[key]:.2f}" if key in metrics else "–" for key in TRL_METRICS]
        lines.append(f"| {meaning} | {noticed} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
