"""A step of GRPO-RoC: sample rollouts, select some of them, update the policy, send its weights to the engines.

`run_step` is the step, and `Step` what is known about it afterwards: the numbers and rows that are stored. The local trainer,
`TrainingLoop` and verl build the same `Step`. A number of a step gets its name here and nowhere else; statistics of the loss
keep the names that `algorithm.objective` gives them. Start reading at `run_step`.

Source: rStar2-Agent (arXiv 2508.20722), sections 2 and 4. This module imports no torch, vLLM or verl.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.hardware.processes import PeakMemory
from rstar_lab.rl.algorithm.hooks import ForwardPasses
from rstar_lab.rl.algorithm.selection import Selection, select_rollouts, solved_groups
from rstar_lab.rl.algorithm.streams import trained_mask
from rstar_lab.rl.methods.method import EXCLUSIONS
from rstar_lab.rl.methods.user_functions import user_metric
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.rollout.checks import check_rollouts
from rstar_lab.rl.rollout.records import TrainingLabels, step_rows
from rstar_lab.rl.trajectory import StopReason, Trajectory
from rstar_lab.verify import readable

Metrics = dict[str, Any]


class MismatchError(UserError):
    """Engine and trainer compute different log-probs for the same tokens, so the update would train on the wrong policy."""


@dataclass(frozen=True, slots=True)
class BufferedGroups:
    """The groups of a step that were generated in the background of the updates.

    Attributes:
        used: rollouts of each group that is trained on.
        dropped: rollouts of each complete group that is too old.
        staleness: for each used group, the updates since the weights that started it.
        ages_s: for each used group, the seconds from its end to its use.
        trimmed_tokens: share of the tokens that were left out because their weights are too old; None: not computed.
    """

    used: Sequence[Sequence[Trajectory]]
    dropped: Sequence[Sequence[Trajectory]]
    staleness: Sequence[int]
    ages_s: Sequence[float]
    trimmed_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rollouts of a step.

    Attributes:
        trajectories: all rollouts, before the selection.
        selection: those that are trained on.
        groups: number of groups that were started.
        retried: number of further attempts at failed rollouts.
        buffered: groups that were generated in the background; None: all were generated in this step.
    """

    trajectories: list[Trajectory]
    selection: Selection
    groups: int
    retried: int = 0
    buffered: BufferedGroups | None = None

    @property
    def dropped(self) -> list[Trajectory]:
        """Complete rollouts that are too old to be trained on. They are stored."""
        return [] if self.buffered is None else [t for group in self.buffered.dropped for t in group]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Absolute difference of the log-probs of engine and trainer on the tokens that are trained on.

    Attributes:
        mean, largest: over the tokens of the weights that the trainer scored with; None without such tokens.
        policy_gap: mean over all tokens, which grows as the policy moves on; None if all tokens have the same weights.
    """

    mean: float | None = None
    largest: float | None = None
    policy_gap: float | None = None

    @classmethod
    def of(cls, gaps: Sequence[np.ndarray], newest: Sequence[np.ndarray] | None) -> "Mismatch":
        """Return the mismatch of rollouts. gaps: of their trained tokens. newest: whether the scoring weights wrote each; None: all."""
        if not gaps:
            return cls()
        whole = np.concatenate(gaps)
        own = whole if newest is None else whole[np.concatenate(newest)]
        policy_gap = float(whole.mean(dtype=np.float64)) if newest is not None and len(whole) else None
        mean, largest = (float(own.mean(dtype=np.float64)), float(own.max())) if len(own) else (None, None)
        return cls(mean, largest, policy_gap)


@dataclass(frozen=True, slots=True)
class Update:
    """Measurements of an update. Without selected rollouts there is none, and the attributes keep their defaults.

    Attributes:
        statistics: of the loss, under the names of `algorithm.objective`.
        tokens: number of tokens in the policy loss.
        grad_norm: mean over the mini-batches, before clipping; None: no update.
        ratio_max: largest importance ratio; None: not measured.
        log_probs, entropies: arrays (response length,) per selected rollout, NaN outside of the loss mask; None: not computed.
        mismatch: of the engines.
        gpu_gb: largest memory allocated on a GPU, in 10^9 bytes; None: no GPU.
    """

    statistics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    grad_norm: float | None = None
    ratio_max: float | None = None
    log_probs: Sequence[Any] = ()
    entropies: Sequence[Any] = ()
    mismatch: Mismatch = Mismatch()
    gpu_gb: float | None = None

    @property
    def metrics(self) -> Metrics:
        """The numbers of the update; none if there was no update."""
        if self.grad_norm is None:
            return {}
        gaps = self.mismatch
        measured = {"policy_gap": gaps.policy_gap, "mismatch": gaps.mean, "mismatch_max": gaps.largest}
        measured |= {**self.statistics, "ratio_max": self.ratio_max}
        measured |= {"tokens": self.tokens, "update_tokens": self.tokens, "grad_norm": self.grad_norm}
        return {name: value for name, value in measured.items() if value is not None}


class Driver(Protocol):
    """What executes a step: the trainer of this process, or a scripted one.

    Attributes:
        rl: settings of the step.
        mismatch_limit: largest mean difference of the log-probs of engine and trainer; None: no limit.
        version: see `Step.version`.
    """

    rl: RlSection
    mismatch_limit: float | None
    version: int | None

    async def sample(self) -> Sampled:
        """Generate the rollouts of the step and select among them."""

    def passes(self) -> ForwardPasses:
        """Return the forward passes that methods may request."""

    async def update(self, selection: Selection) -> Update:
        """Update the policy. Nothing changes if no rollout is selected."""

    async def sync(self) -> None:
        """Send the weights of the policy to the engines."""


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step.

    Attributes:
        rl: its settings.
        sampled: its rollouts.
        selection: the rollouts that were trained on, with all streams.
        update: measurements of the update.
        seconds: by phase, such as `generate_s`.
        total_s: of the whole step.
        version: policy version at the start of the update if tokens can be of other versions; None: all have this one.
        retired: number of problems that are not drawn again.
        held_out: results of the evaluation after the step, by the name of the set.
        busy_s: mean seconds in which an engine was generating; None: not measured.
        backend: further numbers of the driver, under names of its own.
    """

    rl: RlSection
    sampled: Sampled
    selection: Selection
    update: Update
    seconds: Mapping[str, float]
    total_s: float
    version: int | None = None
    retired: int = 0
    held_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    busy_s: float | None = None
    backend: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def metrics(self) -> Metrics:
        """Return the numbers of the step, as in metrics.jsonl."""
        generated, sampled = self.sampled.trajectories, self.sampled
        metrics = rollout_metrics(generated, self.rl.metrics) | selection_metrics(self.selection) | self.update.metrics
        for name, found in self.held_out.items():
            metrics |= {f"eval/{name}/{key}": value for key, value in found.items()}
        metrics |= {"groups": sampled.groups, "retried": sampled.retried}
        if sampled.buffered is not None:
            metrics |= staleness_metrics(sampled.buffered)
        for method in self.rl.hooks:
            metrics |= method.metrics(generated)
        metrics |= {"solved_groups": solved_groups(generated), "retired": self.retired}
        metrics |= sequence_metrics(self.selection, generated)
        if self.version is not None:
            metrics["stale_tokens"] = stale_tokens(self.selection, self.version)
        if self.update.gpu_gb is not None:
            metrics["update_gpu_gb"] = self.update.gpu_gb
        metrics |= {**self.seconds, "step_s": self.total_s}
        # Rollouts in the background are generated during the whole step.
        generating_s = self.seconds.get("generate_s") if sampled.buffered is None else self.total_s
        if generating_s:
            metrics["generated_tokens_per_s"] = sum(t.model_tokens for t in generated) / generating_s
        if self.busy_s is not None:  # the rest of step_s is the idle time of the generator
            metrics["engine_busy_s"] = self.busy_s
        return metrics | {**self.backend}

    @property
    def labels(self) -> dict[str, TrainingLabels]:
        """Return what training adds to the rows of the selected rollouts, by traj_id."""
        chosen, nothing = self.selection.trajectories, [None] * len(self.selection.trajectories)
        columns = (self.update.log_probs or nothing, self.update.entropies or nothing)
        return {
            t.traj_id: TrainingLabels(True, advantage, log_probs, entropy)
            for t, advantage, log_probs, entropy in zip(chosen, self.selection.advantages, *columns, strict=True)
        }

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of the run store, by table."""
        return step_rows(self.sampled.trajectories + self.sampled.dropped, self.labels, self.rl.token_arrays)


async def run_step(driver: Driver, timer: "PhaseTimer") -> Step:
    """Run one step of GRPO-RoC and return it. timer: measures its phases.

    Raises UserError if the rollouts must not be trained on, MismatchError if engine and trainer differ too much.
    """
    rl = driver.rl
    with timer("generate_s"):
        sampled = await driver.sample()
        check_rollouts(sampled.trajectories)
    version, selection = driver.version, sampled.selection
    for method in rl.hooks:
        if method.forward_phase is not None and selection.trajectories:
            with timer(method.forward_phase):
                selection = await method.forward(selection, sampled.trajectories, driver.passes())
    with timer("update_s"):
        update = await driver.update(selection)
        mismatch = engine_mismatch(selection, update.log_probs, version)
        check_mismatch_limit(mismatch.mean, driver.mismatch_limit)
    with timer("weights_s"):
        await driver.sync()
    update = replace(update, mismatch=mismatch)
    return Step(rl, sampled, selection, update, timer.seconds, timer.total(), version)


def select(trajectories: Sequence[Trajectory], rl: RlSection, seed: int) -> Selection:
    """Return the rollouts of a step that are trained on, by the methods of its settings. seed: of the step."""
    return select_rollouts(trajectories, rl.hooks, seed, mask_failures=rl.on_infrastructure_failure != "keep")


def lr_scale(steps: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate in the step after `steps` steps of a stage."""
    return min(1.0, (steps + 1) / max(1, warmup_steps))


def check_mismatch_limit(mismatch: float | None, limit: float | None) -> None:
    """Raise MismatchError if the mean difference of the log-probs of engine and trainer exceeds the limit; None: no limit."""
    if mismatch is not None and limit is not None and not mismatch <= limit:
        raise MismatchError(
            f"log-probs of engine and trainer differ by {mismatch:.2g} per token on average, the limit is {limit:g}: "
            "the engine has stale weights or another precision; engine.mismatch_limit sets the limit"
        )


def engine_mismatch(selection: Selection, log_probs: Sequence[Any], version: int | None = None) -> Mismatch:
    """Compare the log-probs of engine and trainer on the tokens that are trained on.

    log_probs: of the trainer, (response length,) per rollout; None: not computed. version: of the weights that it scored with.
    """
    gaps, newest = list[np.ndarray](), list[np.ndarray]()
    for t, streams, measured in zip(selection.trajectories, selection.streams, log_probs, strict=False):
        if measured is not None:
            mask = trained_mask(t, streams)
            gaps.append(np.abs(np.asarray(measured) - np.asarray(t.log_probs))[mask])
            if version is not None:
                newest.append(np.asarray(t.token_versions)[mask] >= version)
    return Mismatch.of(gaps, None if version is None else newest)


# Numbers of a step


def error_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of tool calls that failed through the model's fault; None without calls."""
    counts = [t.errors_and_calls for t in trajectories]
    calls = sum(count for _, count in counts)
    return sum(errors for errors, _ in counts) / calls if calls else None


def rollout_metrics(trajectories: Sequence[Trajectory], own: Sequence[str] = ()) -> Metrics:
    """Return the metrics over all rollouts of a step, including dropped ones. `correct` and `reward` leave out the rollouts
    that a failure of the engine or the environment ended.

    `metrics/<name>`: mean of a user's metric over the rollouts that have it, or the value of a user's function of all rollouts.
    `env/<name>/...`: the main metrics of the rollouts of an environment. `correct_unrewarded`: share of rollouts whose answer
    equals the true answer as text, but whose reward is not above 0. `control_tokens`: share of rollouts in which the model
    wrote a misplaced control token. `ok_with_exception`: number of calls with `hides_exception`, if there are any. `used_tool`,
    `answered`: share of rollouts with a tool call, and with an answer in the asked format. `text_answers`: see `text_answers`.
    own: names of user functions, `module:name` (recipe key `rl.metrics`).
    """
    correct = [t for t in trajectories if t.reward > 0]
    outcomes = Counter(call.outcome for t in trajectories for call in t.calls)
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[f"metrics/{name}"].append(value)
    metrics = {
        "rollouts": len(trajectories),
        "reward": _mean([t.reward for t in trajectories if t.usable]),
        "correct": _mean([t.reward > 0 for t in trajectories if t.usable]),
        "error_rate": error_rate(trajectories),
        "error_rate_correct": error_rate(correct),
        "response_tokens": _mean([len(t.response_ids) for t in trajectories]),
        "response_tokens_correct": _mean([len(t.response_ids) for t in correct]),
        "turns": _mean([len(t.turns) for t in trajectories]),
        "calls": _mean([len(t.calls) for t in trajectories]),
        "truncated": _mean([t.truncated for t in trajectories]),
        "used_tool": _mean([bool(t.calls) for t in trajectories]),
        "answered": _mean([t.answer is not None for t in trajectories]),
        "correct_unrewarded": _mean(
            [t.reward <= 0 and (t.answer or "").strip() == t.truth.strip() for t in trajectories]
        ),
        "text_answers": text_answers((t.answer, t.truth) for t in trajectories),
        "duplicate_answers": _mean([t.text.count("<answer>") > 1 for t in trajectories]),
        "control_tokens": _mean([any(turn.control_token for turn in t.turns) for t in trajectories]),
        "sandbox_failures": sum(outcomes[outcome] for outcome in INFRASTRUCTURE_FAILURES),
        "engine_failures": sum(t.stop_reason is StopReason.ENGINE_ERROR for t in trajectories),
        "tool_s": sum(turn.tool_s for t in trajectories for turn in t.turns),
    } | {name: _mean(values[name]) for name in sorted(values)}
    rare = {
        "environment_failures": sum(t.stop_reason is StopReason.ENVIRONMENT_ERROR for t in trajectories),
        "ok_with_exception": sum(call.hides_exception for t in trajectories for call in t.calls),
        "undecided": sum(t.stop_reason is StopReason.UNDECIDED for t in trajectories),
    }
    metrics |= {name: count for name, count in rare.items() if count} | environment_metrics(trajectories)
    return metrics | {f"metrics/{name.partition(':')[2]}": user_metric(name)(trajectories) for name in own}


def text_answers(pairs: Iterable[tuple[str | None, str]]) -> float | None:
    """Return the share of pairs (answer, true answer) that `verify` compares as text, as it does not read one of them as a value."""
    return _mean([not (readable(answer) and readable(truth)) for answer, truth in pairs if answer and truth])


def environment_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return rollouts, reward, correct, error_rate, turns and p_err of each environment as `env/<name>/<metric>`.

    Rollouts that name no environment are left out. Means are over the rollouts whose environment did not fail.
    """
    by_name: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.environment:
            by_name[trajectory.environment].append(trajectory)
    metrics: Metrics = {}
    for name, every in sorted(by_name.items()):
        group = [t for t in every if t.usable]
        means: dict[str, list[float]] = {
            "reward": [t.reward for t in group],
            "correct": [float(t.reward > 0) for t in group],
            "turns": [len(t.turns) for t in group],
            "response_tokens": [len(t.response_ids) for t in group],
            "p_err": [t.p_err for t in group],
        }
        metrics |= {f"env/{name}/{key}": _mean(values) for key, values in means.items()}
        metrics[f"env/{name}/error_rate"] = error_rate(group)
        metrics[f"env/{name}/rollouts"] = len(every)
    return metrics


def selection_metrics(selection: Selection) -> dict[str, int]:
    """Return the number of rollouts of each class. The values of `class/...` add up to the rollouts of the step."""
    classes = Counter(selection.left_out.values())
    trained = sum(t.traj_id not in selection.left_out for t in selection.trajectories)
    return (
        {"kept": len(selection.trajectories), "equal_groups": selection.equal_groups}
        | {one.metric: classes[f"masked/{one.reason}"] for one in EXCLUSIONS if one.metric}
        | {"class/trained": trained}
        | {f"class/{name}": count for name, count in sorted(classes.items())}
    )


def sequence_metrics(selection: Selection, generated: Sequence[Trajectory]) -> dict[str, int]:
    """Return the tokens that go through forward and backward passes, prompts included: of the selected rollouts, and of all
    rollouts of their groups, which a step without the selection would train on."""
    groups = {t.group_id for t in selection.trajectories}
    tokens = {t.traj_id: len(t.prompt_ids) + len(t.response_ids) for t in generated if t.group_id in groups}
    return {
        "sequence_tokens_kept": sum(tokens.get(t.traj_id, 0) for t in selection.trajectories),
        "sequence_tokens_informative": sum(tokens.values()),
    }


def stale_tokens(selection: Selection, version: int) -> float | None:
    """Return the share of the trained tokens that were generated by weights older than `version`."""
    rollouts = zip(selection.trajectories, selection.streams, strict=True)
    versions = [np.asarray(t.token_versions)[trained_mask(t, streams)] for t, streams in rollouts]
    return float(np.mean(np.concatenate(versions) < version)) if versions else None


def staleness_metrics(groups: BufferedGroups) -> Metrics:
    """Return the metrics of groups that were generated in the background.

    staleness_mean, staleness_max: over the groups trained on. dropped_groups: number of groups that were too old;
    dropped_share: their share of the complete groups. dropped_share_long, dropped_share_hard: the same share among the
    third with the longest rollouts and the third with the lowest rewards; they show whether mainly slow or hard
    problems are dropped. buffer_age_s: mean time from the end of a group to its use.
    """
    complete = [*groups.used, *groups.dropped]
    is_dropped = np.array([False] * len(groups.used) + [True] * len(groups.dropped), dtype=float)
    lengths = [np.mean([len(t.response_ids) for t in group]) for group in complete]
    unsolved = [np.mean([t.reward <= 0 for t in group]) for group in complete]
    third = -(-len(complete) // 3)

    def share_of_top(values: Sequence[Any]) -> float | None:
        return float(is_dropped[np.argsort(values, kind="stable")[::-1][:third]].mean()) if complete else None

    metrics: Metrics = {
        "staleness_mean": _mean(groups.staleness),
        "staleness_max": max(groups.staleness, default=None),
        "dropped_groups": len(groups.dropped),
        "dropped_share": float(is_dropped.mean()) if complete else None,
        "dropped_share_long": share_of_top(lengths),
        "dropped_share_hard": share_of_top(unsolved),
        "buffer_age_s": _mean(groups.ages_s),
    }
    return metrics if groups.trimmed_tokens is None else metrics | {"trimmed_tokens": groups.trimmed_tokens}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


class PhaseTimer:
    """Measures the seconds of the phases of a step, `with timer("name_s"): ...`, and with `memory` the peak memory of this
    process and its descendants in each, as `name_gb` in 10^9 bytes."""

    def __init__(self, *, memory: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.memory_gb: dict[str, float] = {}
        self._measure_memory, self._start = memory, time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        since = time.monotonic()
        with PeakMemory() if self._measure_memory else nullcontext() as memory:
            yield
            self.seconds[name] = time.monotonic() - since
        if memory:
            self.memory_gb[name.removesuffix("_s") + "_gb"] = memory.gb

    def total(self) -> float:
        return time.monotonic() - self._start
