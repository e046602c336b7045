"""The hooks by which methods turn rollouts into streams. `selection.select_rollouts` calls them; `rl/methods` implements them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one problem.

    Attributes:
        rollouts: those that `select` kept.
        rewards: shaped reward of each, (rollouts,) float64.
        generated: all rollouts of the group that may be trained on, before the selection.
    """

    rollouts: list[Trajectory]
    rewards: np.ndarray
    generated: list[Trajectory]


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Results of a forward pass of the policy, one array (response length,) per rollout, NaN outside of the loss mask.

    Attributes:
        log_probs: log-prob of each token.
        entropies: entropy in nats.
        squares: sum of the squared probabilities of the vocabulary.
    """

    log_probs: list[np.ndarray]
    entropies: list[np.ndarray]
    squares: list[np.ndarray]


class Exclusion(NamedTuple):
    """Why `score_rollout` leaves rollouts out. reason: their class is `masked/<reason>`. metric: name of the metric of their number;
    None: only the class."""

    reason: str
    metric: str | None = None


@dataclass(frozen=True)
class ModelServer:
    """The server of another model. name: what the model is, for `MethodHooks.wrap_slots` and errors. key: recipe key of the URL."""

    name: str
    url: str
    key: str


class ForwardPasses(Protocol):
    """Forward passes that a method may request before the update. max_tokens: context of the policy."""

    max_tokens: int

    async def statistics(self, rollouts: Sequence[Trajectory]) -> TokenStatistics:
        """Return log-probs, entropies and squares of the rollouts under the policy."""

    async def log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return the log-probs of the responses under the policy, NaN outside of the loss mask."""

    async def teacher_log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return the log-probs of the responses under the teacher; NaN where it returned none."""

    def prompt_ids(self, rollout: Trajectory, question: str) -> list[int]:
        """Return the token ids of the prompt of a rollout with another question."""


class MethodHooks:
    """A part of the algorithm. A method overrides the hooks that it needs.

    Attributes:
        equal_groups: what happens to a group whose selected rewards are all equal, so that its advantages are 0. `drop`:
            it is left out. `cross_entropy`: it is kept for the cross-entropy only. `train`: it is kept in all terms.
        unselected: class of the rollouts that `select` leaves out.
        excluded: reason of the rollouts that `score_rollout` leaves out, and the metric of their number.
        forward_phase: name of the metric of the seconds that `forward` takes. None: the method has no `forward`.
        reads_texts: whether a hook reads tokens or texts of the rollouts. verl's trainer process has numbers only, unless
            a method reads texts.
        reads_outputs: whether a hook reads `Turn.outputs`, which are recorded only then.
        not_with_verl: why verl does not support the method, and what to do; empty: it does.
    """

    equal_groups: ClassVar[Literal["drop", "cross_entropy", "train"]] = "drop"
    unselected: ClassVar[str] = "roc"
    excluded: ClassVar[Exclusion] = Exclusion("own")
    forward_phase: ClassVar[str | None] = None
    reads_texts: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = False
    not_with_verl: ClassVar[str] = ""

    def servers(self, engine: Any) -> Sequence[ModelServer]:
        """Return the servers of other models that the method needs. They are connected before the first step. engine: the section
        `engine` of the recipe."""
        return ()

    def wrap_slots(self, slots: Any, tasks: Sequence[Any], servers: Mapping[str, Any]) -> Any:
        """Return the engine slots of rollouts, (index, task) -> slot, such as `engine.SlotWrapper`.

        Args:
            slots: The slots of the methods before this one.
            tasks: Tasks of the rollouts.
            servers: Engines of the servers that the methods need, by name.
        """
        return slots

    def select(self, rollouts: list[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
        """Return the rollouts of a group to train on. rng: generator of this group and step."""
        return rollouts

    def shape_reward(self, rollout: Trajectory) -> float:
        """Return the number that is added to the reward before the advantages are computed."""
        return 0.0

    def score(self, groups: Sequence[Group], streams: list[list[Streams]]) -> list[list[Streams]]:
        """Return the streams of all groups of a step. Calls `score_group` for each group."""
        return [self.score_group(group, before) for group, before in zip(groups, streams, strict=True)]

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        """Return the streams of the rollouts of a group. streams: those of the methods before this one."""
        return streams

    def score_rollout(self, rollout: Trajectory, streams: Streams) -> Streams | None:
        """Return the streams of a rollout; None leaves it out of the update. Called after `score`, so that the advantages are
        those of the whole group. streams: those of the methods before this one."""
        return streams

    async def forward(
        self, selection: Any, rollouts: Sequence[Trajectory], passes: ForwardPasses
    ) -> Any:  # selection.Selection
        """Return the selection with streams that need further forward passes. rollouts: all rollouts of the step."""
        return selection

    def loss_options(self, config: LossConfig) -> LossConfig:
        """Return the options of the loss that this method needs."""
        return config

    def metrics(self, rollouts: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return metrics of a step. rollouts: all rollouts of the step."""
        return {}
