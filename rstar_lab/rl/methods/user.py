"""A method of the user: a function, or a class with hooks.

A function of (rewards, trajectories) returns the advantages of all rollouts of a step that are trained on. A class has any
of the hooks `select`, `shape_reward`, `score_group`, `score_rollout`, `forward` and `metrics`; see docs/extending.md.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.hooks import ForwardPasses, Group, MethodHooks, ModelServer
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams, check_streams
from rstar_lab.rl.methods.grpo import Grpo
from rstar_lab.rl.methods.method import Method
from rstar_lab.rl.methods.opd import teacher_server
from rstar_lab.rl.plugins import calling, finite_number, load_function, load_named
from rstar_lab.rl.section import Function
from rstar_lab.rl.trajectory import Trajectory

HOOKS = ("select", "shape_reward", "score_group", "score_rollout", "forward", "metrics")


class UserMethod(Method):
    """Your own method (docs/extending.md)."""

    type: Function
    """`module:function` of (rewards, trajectories) that returns the advantages, or `module:Class` with hooks."""

    def servers(self, engine: Any) -> Sequence[ModelServer]:
        return teacher_server(engine)

    def bound(self, rl: Any) -> MethodHooks:  # type: ignore[override]
        return user_hooks(self.type, "rl.method.type")


def user_hooks(name: str, key: str) -> MethodHooks:
    """Return the hooks of the method `module:name`. key: the recipe key that names it. Raises UserError, which starts with the
    key."""
    target = load_named(name, key)
    if not inspect.isclass(target):
        return UserAdvantages(load_function(name, key, ("rewards", "trajectories")), f"{key}: {name}")
    with calling(f"{key}: {name}()"):
        instance = target()
    if not any(callable(getattr(instance, hook, None)) for hook in HOOKS):
        raise UserError(f"{key}: {name} has none of the hooks {', '.join(HOOKS)}")
    return UserHooks(instance, f"{key}: {name}")


class UserAdvantages(MethodHooks):
    """Advantages of a user's function."""

    reads_texts = True
    reads_outputs = True

    def __init__(self, function: Callable[..., Any], where: str):
        self.function, self.where = function, where

    def score(self, groups: Sequence[Group], streams: list[list[Streams]]) -> list[list[Streams]]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return streams
        rewards = np.concatenate([group.rewards for group in groups])
        scored = iter(as_streams(self.function(rewards, rollouts), rollouts, self.where))
        return [[next(scored) for _ in group.rollouts] for group in groups]


class UserHooks(MethodHooks):
    """Hooks of a user's class. Without `score_group`, the advantages are those of GRPO."""

    reads_texts = True
    reads_outputs = True

    def __init__(self, target: Any, where: str):
        self.target, self.where = target, where
        self.equal_groups = getattr(target, "equal_groups", "drop")  # type: ignore[misc]
        if self.equal_groups not in ("drop", "cross_entropy", "train"):
            raise UserError(f"{where}: equal_groups must be drop, cross_entropy or train, got {self.equal_groups!r}")
        self.forward_phase = "forward_s" if hasattr(target, "forward") else None  # type: ignore[misc]

    def _call(self, hook: str, *arguments: Any) -> Any:
        with calling(f"{self.where}.{hook}"):
            return getattr(self.target, hook)(*arguments)

    def select(self, rollouts: list[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
        if not hasattr(self.target, "select"):
            return rollouts
        found = self._call("select", rollouts, rng)
        indices = np.asarray(found)
        wrong = indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu")
        if wrong or len({*indices.tolist()} & {*range(len(rollouts))}) < len(indices):
            raise UserError(f"{self.where}.select returned {found!r}; expected different indices below {len(rollouts)}")
        return [rollouts[i] for i in indices]

    def shape_reward(self, rollout: Trajectory) -> float:
        if not hasattr(self.target, "shape_reward"):
            return 0.0
        return finite_number(self._call("shape_reward", rollout), f"{self.where}.shape_reward")

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        if not hasattr(self.target, "score_group"):
            return Grpo().score_group(group, streams)
        found = self._call("score_group", group.rollouts, group.rewards)
        return as_streams(found, group.rollouts, f"{self.where}.score_group")

    def score_rollout(self, rollout: Trajectory, streams: Streams) -> Streams | None:
        if not hasattr(self.target, "score_rollout"):
            return streams
        found = self._call("score_rollout", rollout, streams)
        return None if found is None else as_streams([found], [rollout], f"{self.where}.score_rollout")[0]

    async def forward(self, selection: Selection, rollouts: Sequence[Trajectory], passes: ForwardPasses) -> Selection:
        with calling(f"{self.where}.forward"):
            found = await self.target.forward(selection, rollouts, passes)
        as_streams(found.streams, found.trajectories, f"{self.where}.forward")
        return found

    def metrics(self, rollouts: Sequence[Trajectory]) -> Mapping[str, float]:
        if not hasattr(self.target, "metrics"):
            return {}
        found = self._call("metrics", rollouts)
        return {f"metrics/{name}": finite_number(value, f"{self.where}.metrics") for name, value in found.items()}


def as_streams(found: Any, rollouts: Sequence[Trajectory], where: str) -> list[Streams]:
    """Return the result of a user's hook as streams, one per rollout.

    An advantage is a number, one number per turn of the model, one per token of the response, or a `Streams` object.
    Raises UserError for anything else.
    """
    values = list(found) if np.iterable(found) else [found]
    if len(values) != len(rollouts):
        raise UserError(f"{where} returned {found!r}; expected {len(rollouts)} finite numbers, or arrays of them")
    streams = []
    for value, rollout in zip(values, rollouts, strict=True):
        try:
            scored = value if isinstance(value, Streams) else Streams(_advantage(value, rollout))
            streams.append(check_streams(rollout, scored, where))
        except (TypeError, ValueError):
            turns, tokens = len(rollout.turns), len(rollout.response_ids)
            raise UserError(
                f"{where} returned {found!r}; expected {len(rollouts)} finite numbers, or for rollout {rollout.traj_id} one "
                f"number per turn ({turns}) or per token ({tokens})"
            ) from None
    return streams


def _advantage(value: Any, rollout: Trajectory) -> np.ndarray | float:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        return float(array)
    if array.shape == (len(rollout.turns),) and len(array) != len(rollout.response_ids):
        advantage_T = np.zeros(len(rollout.response_ids))
        for turn, of_turn in zip(rollout.turns, array, strict=True):
            advantage_T[turn.start : turn.end] = of_turn
        return advantage_T
    return array
