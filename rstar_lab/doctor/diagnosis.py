"""The diagnosis of a run: findings ordered by cost, what was judged, and what the log does not show."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.doctor.logs import read_logs
from rstar_lab.doctor.rule import SUPERVISED, WINDOW, Evidence, Log, Rule
from rstar_lab.doctor.rules import RULES
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.untrusted.text import counted, duration, html

if TYPE_CHECKING:
    from rstar_lab.analysis.inspector.inspector import Inspector
    from rstar_lab.hardware.profiles import Hardware

RATES_FILE = Path(__file__).parent / "rates.json"
RATES: dict[str, list[int]] = json.loads(RATES_FILE.read_text())  # measured rates by rule, see docs/doctor.md
MOST_LISTED = 40  # rules that are listed with the columns that they need


@dataclass(frozen=True)
class Finding:
    """A rule that fired on a run."""

    run: str
    rule: Rule
    evidence: Evidence

    @property
    def measured(self) -> tuple[int, int]:
        """(runs with a planted fault, runs) among the measured runs with this finding; (0, 0) if no measured run had it."""
        right, runs = RATES.get(self.rule.name, (0, 0))
        return right, runs

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        rule, evidence, (right, runs) = self.rule, self.evidence, self.measured
        return {
            "run": self.run, "rule": rule.name, "cause": rule.cause, "evidence": evidence.text,
            "numbers": {name: float(value) for name, value in evidence.numbers.items()},
            "steps": [int(step) for step in evidence.steps], "trajectories": list(evidence.trajectories),
            "cost": round(float(evidence.cost), 3), "confidence": right / runs if runs else None,
            "confidence_runs": runs, "remedy": rule.remedy, "source": rule.source,
        }  # fmt: skip

    def to_text(self, number: int, named: bool) -> str:
        """Return the finding for a terminal. named: with the name of its run."""
        seen, opened = _steps(self.evidence.steps), ", ".join(self.evidence.trajectories[:3])
        right, runs = self.measured
        known = f"{right} of {runs} measured runs with this finding had a planted fault" if runs else "not measured"
        return (
            f"{number}. {self.rule.name}{f' ({self.run})' if named else ''}\n"
            f"   what: {self.evidence.text}{f', steps {seen}' if seen else ''}\n   why: {self.rule.cause}\n"
            f"   do: {self.rule.remedy}\n   confidence: {known}\n   source: {self.rule.source}\n{f'   open: {opened}' if opened else ''}"
        ).rstrip()


@dataclass(frozen=True)
class Diagnosis:
    """Result of `doctor`.

    Args:
        findings: Rules that fired, the most costly first.
        silent: Names of the rules that were applied to a log and did not fire, which does not exclude their faults.
        unchecked: Rules that could not be checked, with the columns that the logs lack.
        too_few: Rules for which no log has enough data, with what it has and what the rule needs.
        judged: By run, shares of the rollouts with a reward, with an answer, and with an answer that could be compared with the true one.
        waste: Share of the generated tokens that trained nothing, by reason, per run.
        lost: What these tokens cost per run: hours of generation, gpu_hours and cost, as far as they are known.
        logs: The logs that were read.
        files: Folder of imported rollouts, which exists as long as the diagnosis.
    """

    findings: list[Finding]
    silent: list[str]
    unchecked: dict[str, list[str]]
    too_few: dict[str, str]
    judged: dict[str, dict[str, float]]
    waste: dict[str, dict[str, float]]
    lost: dict[str, dict[str, float]]
    logs: list[Log]
    files: LockedFolder | None = None

    def inspect(self, number: int = 1) -> "Inspector":
        """Return an inspector with the rollouts of a finding, also for logs of other tools. number: of the finding, from 1."""
        from rstar_lab.analysis.inspector.inspector import inspect

        if not 0 < number <= len(self.findings):
            raise UserError(f"finding {number} does not exist; there are {len(self.findings)}")
        finding = self.findings[number - 1]
        runs = next(log.runs for log in self.logs if log.name == finding.run)
        if runs is None:
            raise UserError(f"{finding.run} has metrics only, no rollouts to open")
        named, steps = list(finding.evidence.trajectories), list(finding.evidence.steps)
        return inspect(runs, where={"traj_id": named} if named else {"step": steps} if steps else None)

    @property
    def verdict(self) -> str:
        """The diagnosis in one or two sentences: the most costly fault, or what was judged without finding one."""
        if self.findings:
            first, others = self.findings[0], len(self.findings) - 1
            more = f" ({counted(others, 'more finding')})" if others else ""
            return f"{first.rule.cause[0].upper()}{first.rule.cause[1:]}: {first.evidence.text}{more}."
        rules = len(self.silent) + len(self.unchecked) + len(self.too_few)
        found = f"No fault was found by {len(self.silent)} of {rules} rules; the others lack columns ({len(self.unchecked)}) or data"
        found += f" ({len(self.too_few)})."
        if short := [log.name for log in self.logs if log.training and len(log.steps) < WINDOW]:
            found += f" Too short for a verdict: {', '.join(short)} has fewer than {WINDOW} steps."
        parts = [text for run, shares in self.judged.items() if (text := _judged(shares))]
        return f"{found} Judged: {'; '.join(parts)}." if parts else f"{found} No rollouts were judged."

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {
            "verdict": self.verdict, "fault_found": bool(self.findings), "findings": [finding.as_dict() for finding in self.findings],
            "waste": self.waste, "lost": self.lost, "judged": self.judged,
            "did_not_fire": self.silent, "not_checked": self.unchecked, "not_enough_data": self.too_few,
            "sources": [
                {"run": log.name, "format": log.source, "steps": len(log.steps), "rollouts": len(log.rollouts),
                 "not_understood": list(log.notes)} for log in self.logs
            ],
        }  # fmt: skip

    def to_text(self) -> str:
        """Return the diagnosis for a terminal."""
        return f"{self.verdict}\n\n{self._after_verdict()}".rstrip()

    def _after_verdict(self) -> str:
        """Return the findings, then what was judged, waste, what was not understood, and what could not be checked."""
        parts = [finding.to_text(number, len(self.logs) > 1) for number, finding in enumerate(self.findings, 1)]
        judged = self.judged if self.findings or len(self.judged) > 1 else {}  # otherwise the verdict says it
        lines = [f"Judged in {run}: {text}" for run, shares in judged.items() if (text := _judged(shares))]
        for run, wasted in self.waste.items():
            named = ", ".join(f"{name} {value:.0%}" for name, value in wasted.items() if value >= 0.005)
            lines.append(f"Tokens that trained nothing in {run}: {named or 'none'}{_cost(self.lost.get(run, {}))}")
        if any(finding.evidence.trajectories for finding in self.findings):
            lines.append("To read the rollouts of a finding in a notebook: doctor(PATH).inspect(1)")
        lines += [f"Note on {log.name}: {note}" for log in self.logs for note in log.notes]
        columns = {name: ", ".join(lacking) for name, lacking in self.unchecked.items()}
        left = {"Not checked, because the log does not have these columns": columns, "Not enough data": self.too_few}
        for title, reasons in left.items():
            by_reason: dict[str, list[str]] = {}
            for name, reason in reasons.items():
                by_reason.setdefault(reason, []).append(name)
            if len(reasons) > MOST_LISTED:
                lines.append(f"{title}: {len(reasons)} rules; `rstar-lab doctor PATH --json` names them")
            elif by_reason:
                parts_of = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in by_reason.items())
                lines.append(f"{title}: {parts_of}")
        return "\n\n".join([*parts, "\n".join(lines)])

    def to_html(self) -> str:
        """Return the diagnosis as one HTML page without scripts."""
        from rstar_lab.analysis.inspector.export import closed_page

        style = "body{font:16px/1.5 sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}"
        style += "h1{font-size:1.3rem}pre{white-space:pre-wrap}"
        body = html("<h1>{}</h1><pre>{}</pre>", self.verdict, self._after_verdict())
        return closed_page("Diagnosis", body, style, [])

    def _repr_html_(self) -> str:
        style = "white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
        return html("<div><b>{}</b><pre style='{}'>{}</pre></div>", self.verdict, style, self._after_verdict())


def doctor(*paths: str | Path, rules: Sequence[str] = (), profile: str | Path | None = None) -> Diagnosis:
    """Say why runs do not learn, from their logs.

    Args:
        paths: Runs of this project or logs of other trainers, see `logs.FORMATS`.
        rules: Rules of your own, as `module:NAME` of a `Rule`.
        profile: Hardware profile of the runs, for the GPU-hours and the cost of lost compute.

    Returns:
        The diagnosis.

    Raises:
        UserError: If a path holds no known log, or a rule or a profile cannot be loaded.
    """
    from rstar_lab.hardware.profiles import load_profile

    chosen = (*RULES, *(_own_rule(name) for name in rules))
    hardware = load_profile(profile).hardware if profile else None
    files = LockedFolder("doctor")
    logs: list[Log] = []
    for number, path in enumerate(paths):
        for log in read_logs(Path(path), files.path / str(number)):
            known = {other.name for other in logs}
            names = (log.name, *(f"{log.name}-{again}" for again in range(2, len(logs) + 3)))
            logs.append(replace(log, name=next(name for name in names if name not in known)))
    return replace(diagnose(logs, chosen, hardware), files=files)


def diagnose(logs: Sequence[Log], rules: Sequence[Rule] = RULES, hardware: "Hardware | None" = None) -> Diagnosis:
    """Apply rules to logs. hardware: that of the runs, for the cost of lost compute."""
    findings, silent = list[Finding](), list[str]()
    unchecked, too_few = dict[str, list[str]](), dict[str, str]()
    for rule in rules:
        lacking, needs, checked = list[str](), list[str](), False
        for log in logs:
            if not log.training and not rule.evaluations:
                continue
            if missing := log.missing(rule.reads):
                lacking += missing if SUPERVISED.issuperset(missing) or not log.supervised else []
            elif few := log.lacks(rule):
                needs.append(few)
            else:
                checked = True
                if evidence := rule.check(log):
                    if not evidence.steps and not evidence.trajectories:  # something is absent in the whole run
                        evidence = replace(evidence, steps=log.steps.step.astype(int).tolist())
                    findings.append(Finding(log.name, rule, evidence))
        if not checked and (needs or not lacking):
            too_few[rule.name] = next(iter(needs), "rollouts that train a policy")
        elif not checked:
            unchecked[rule.name] = sorted({name.partition(".")[2] or name for name in lacking})
        elif not any(finding.rule is rule for finding in findings):
            silent.append(rule.name)
    findings.sort(key=lambda finding: -finding.evidence.cost)
    waste = {log.name: parts for log in logs if (parts := wasted_tokens(log))}
    lost = {log.name: parts for log in logs if (parts := lost_compute(log, waste.get(log.name, {}), hardware))}
    judged = {log.name: judged_shares(log) for log in logs}
    return Diagnosis(findings, silent, unchecked, too_few, judged, waste, lost, list(logs))


def judged_shares(log: Log) -> dict[str, float]:
    """Return the number of rollouts and, of them, the shares with a reward, with an answer, and with an answer that texts, numbers or the
    grader could compare with the true one; empty for a log without rollouts."""
    if log.rollouts.empty:
        return {}
    parts = {"reward": log.rollouts.reward, "answer": log.rollouts.answer, "compared answer": log.right}
    return {"rollouts": len(log.rollouts)} | {name: float(values.notna().mean()) for name, values in parts.items()}


def _judged(shares: Mapping[str, float]) -> str:
    """Return "384 rollouts: reward 100%, answer 95%, compared answer 90%"."""
    parts = ", ".join(f"{name} {value:.0%}" for name, value in shares.items() if name != "rollouts")
    return f"{counted(int(shares['rollouts']), 'rollout')}: {parts}" if shares else ""


def wasted_tokens(log: Log) -> dict[str, float]:
    """Return the share of the generated tokens that trained nothing, by reason; empty without lengths, rewards or training."""
    rollouts = log.rollouts
    tokens = pd.to_numeric(rollouts.response_tokens, errors="coerce").fillna(0.0) if len(rollouts) else pd.Series()
    total = float(tokens.sum())
    if not total or rollouts.reward.isna().all() or not log.training:
        return {}
    rewards = rollouts.groupby("group_id").reward
    spread = (rewards.transform("max") - rewards.transform("min")).where(rewards.transform("size") > 1)
    kept = rollouts.kept.fillna(True).astype(bool)
    failed = rollouts.stop_reason.isin(UNUSABLE) & ~kept
    still = log.steps.step[log.steps.grad_norm == 0] if log.has("steps.grad_norm") else log.steps.step.head(0)
    dead = rollouts.step.isin(still) & ~failed
    equal = (spread == 0) & ~failed & ~dead
    again = float(log.steps.retried.sum()) / len(rollouts) if "retried" in log.steps else 0.0
    parts = {
        "groups with equal rewards": float(tokens[equal].sum()) / total,
        "dropped by resampling": float(tokens[~equal & ~kept & ~failed & ~dead].sum()) / total,
        "failed rollouts": float(tokens[failed].sum()) / total,
        "steps without gradient": float(tokens[dead].sum()) / total,
    }
    return {name: value / (1 + again) for name, value in parts.items()} | {"retries": again / (1 + again)}


def lost_compute(log: Log, waste: dict[str, float], hardware: "Hardware | None") -> dict[str, float]:
    """Return the hours, gpu_hours and cost of the tokens that trained nothing, as far as the log and the profile tell them."""
    if not waste or not log.has("steps.generate_s"):
        return {}
    hours = float(log.steps.generate_s.sum()) / 3600 * sum(waste.values())
    gpus, price = (hardware.gpus, hardware.price_per_gpu_hour) if hardware else (log.gpus, None)
    found = {"hours": hours} | ({"gpu_hours": hours * gpus} if gpus else {})
    return found | ({"cost": hours * gpus * price} if gpus and price is not None else {})


def _cost(lost: dict[str, float]) -> str:
    """Return ": 3.1 h of generation, 24.8 GPU-hours, cost 62.00"."""
    hours = f"{duration(3600 * lost.get('hours', 0))} of generation"
    forms = {"hours": hours, "gpu_hours": "{:,.1f} GPU-hours", "cost": "cost {:,.2f}"}
    return "".join(f"{', ' if i else ': '}{forms[name].format(value)}" for i, (name, value) in enumerate(lost.items()))


def _own_rule(name: str) -> Rule:
    from rstar_lab.rl.plugins import load_named

    rule = load_named(name, "--rule")
    if not isinstance(rule, Rule):
        raise UserError(f"--rule {name}: is not a rstar_lab.doctor.Rule")
    return rule


def _steps(steps: Sequence[int]) -> str:
    """Return steps as "3, 5-9"."""
    known = np.unique(np.asarray(steps, int))
    parts = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    shown = [f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts if len(part)]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
