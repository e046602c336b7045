"""GRPO-RoC on one machine: roll out, verify, resample, update, push the weights back. Read `Trainer.step` first.

Source: rStar2-Agent, sections 2 and 4. Nothing here draws from a global random state: every draw has a seed that is derived from
what it is for, so a run resumed from a checkpoint goes on as if it had never stopped.
"""

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rstar_lab.errors import UserError
from rstar_lab.rl.agent_loop import Codec, LoopLimits
from rstar_lab.rl.engine import derive_seed
from rstar_lab.rl.engines import EngineGroup
from rstar_lab.rl.model import save_model
from rstar_lab.rl.objective import group_advantages, group_normaliser, policy_loss
from rstar_lab.rl.policy import log_probs_and_entropy, micro_batches
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection
from rstar_lab.rl.records import Verdict, call_rows, trajectory_row, transcript_row
from rstar_lab.rl.roc import released_tool_error_penalty, resample
from rstar_lab.rl.rollout import RolloutTask, roll_out
from rstar_lab.rl.step_metrics import rollout_metrics
from rstar_lab.rl.tools import Tool
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.writer import RunWriter

FP32_MISMATCH = 1e-3


class MismatchError(UserError):
    """Engine and trainer disagree on the log-probs of the same tokens: what would be trained is not what was sampled."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What goes into the update, and how the rest was left out."""

    trajectories: list[Trajectory]
    advantages: list[float]
    equal_groups: int


def keep(trajectories: Sequence[Trajectory], rl: RlSection, seed: int) -> Kept:
    """RoC in every group, then the groups left with equal rewards are dropped: they have no gradient.

    With roc: none all of a group stay, which is plain GRPO.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.usable:
            groups[trajectory.group_id].append(trajectory)
    kept: list[Trajectory] = []
    equal = 0
    for group_id, group in groups.items():
        chosen = group
        if rl.roc != "none":
            indices = resample(
                [t.reward for t in group],
                [penalty(t, rl) for t in group],
                rl.group_size,
                rule=rl.roc,
                rng=np.random.default_rng(derive_seed(seed, "roc", group_id)),
            )
            chosen = [group[i] for i in indices]
        if len({t.reward for t in chosen}) < 2:
            equal += 1
        else:
            kept += chosen
    advantages = group_advantages([t.reward for t in kept], [t.group_id for t in kept], normalise_std=rl.normalise_std)
    return Kept(kept, [float(a) for a in advantages], equal)


def penalty(trajectory: Trajectory, rl: RlSection) -> float:
    """What RoC holds against a success. The released rule sees an error where a tool's text holds the word."""
    errors = trajectory.p_err
    if rl.roc == "released":
        errors = released_tool_error_penalty([call.response for call in trajectory.calls])
    parts = {"errors": errors, "format": trajectory.p_format}
    return sum(parts[part] for part in rl.roc_penalties)


class Trainer:
    """Steps of one run; `run` makes them all. Interrupted, the same call goes on from the last checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: PreTrainedModel,
        tokenizer: Any,
        engines: EngineGroup,
        tools: Mapping[str, Tool],
        reward: Callable[[str, str], float],
        writer: RunWriter,
        problems: Mapping[str, Sequence[Problem]],
        on_step: Callable[[dict[str, Any]], None],
    ):
        self.recipe, self.model, self.tokenizer, self.engines = recipe, model, tokenizer, engines
        self.tools, self.reward, self.writer, self.problems, self.on_step = tools, reward, writer, problems, on_step
        self.codec = Codec(tokenizer, tools)
        self.device = next(model.parameters()).device
        self.optimizer: torch.optim.AdamW | None = None

    # The run

    async def run(self) -> None:
        """All stages, from the last checkpoint on."""
        done = self.restore()
        await self.engines.load(self.model, done)
        step = 0
        for stage in self.recipe.stages:
            rl = self.recipe.settings(stage)
            self.model.train()
            for stage_step in range(stage.steps):
                step += 1
                if step <= done:
                    continue
                if self.optimizer is None:
                    self.optimizer = make_optimizer(self.model, rl)
                metrics = await self.step(stage.name, rl, step, stage_step)
                last = stage_step + 1 == stage.steps
                if last or step % rl.checkpoint_every == 0:
                    self.checkpoint(step, rl)
                self.on_step(metrics)
        self.writer.finish("finished")

    async def step(self, stage: str, rl: RlSection, step: int, stage_step: int) -> dict[str, Any]:
        """One step of GRPO-RoC; returns its metrics."""
        seed, clock = derive_seed(self.recipe.seed, "step", step), Clock()
        problems = self.draw_problems(stage, rl, stage_step)
        with clock("generate_s"):
            trajectories = await self.roll_out(problems, rl, step, seed)
        kept = keep(trajectories, rl, seed)
        with clock("update_s"):
            update = self.update(kept, rl, stage_step)
        with clock("weights_s"):
            await self.engines.load(self.model, step)
        metrics = (
            rollout_metrics(trajectories)
            | {"kept": len(kept.trajectories), "equal_groups": kept.equal_groups}
            | update.metrics
        )
        with clock("store_s"):
            rows = self.rows(trajectories, kept, update, rl)
        metrics |= clock.seconds | {"step_s": clock.total()}
        self.writer.write_step(stage, step, **rows, metrics=metrics)
        return {"stage": stage, "step": step} | metrics

    def draw_problems(self, stage: str, rl: RlSection, stage_step: int) -> list[Problem]:
        """The problems of a step: an order of the whole set for each pass through it, cut into steps."""
        pool = self.problems[stage]
        drawn = []
        for position in range(stage_step * rl.problems_per_step, (stage_step + 1) * rl.problems_per_step):
            epoch, place = divmod(position, len(pool))
            order = np.random.default_rng(derive_seed(self.recipe.seed, "order", stage, epoch)).permutation(len(pool))
            drawn.append(pool[order[place]])
        return drawn

    async def roll_out(self, problems: Sequence[Problem], rl: RlSection, step: int, seed: int) -> list[Trajectory]:
        count = rl.group_size * (1 if rl.roc == "none" else rl.oversample)
        run = self.writer.run_dir.name
        tasks = [
            RolloutTask(
                problem,
                traj_id=f"{run}-{step:06d}-{group:04d}-{sample:02d}",
                group_id=f"{step:06d}-{group:04d}",
                sample=sample,
                seed=derive_seed(seed, group, sample),
            )
            for group, problem in enumerate(problems)
            for sample in range(count)
        ]
        return await roll_out(
            tasks,
            seats=self.engines.seats(tasks, rl.rollout),
            codec=self.codec,
            tools=self.tools,
            reward=self.reward,
            limits=LoopLimits(rl.max_response_tokens, rl.max_turns, rl.max_tool_chars, rl.time_limit_s),
            temperature=rl.temperature,
        )

    # The update

    def update(self, kept: Kept, rl: RlSection, stage_step: int) -> "Update":
        """Mini-batches of the kept rollouts, in their order. An empty batch changes nothing."""
        assert self.optimizer is not None
        count = len(kept.trajectories)
        update = Update(count)
        if not count:
            return update
        for group in self.optimizer.param_groups:
            group["lr"] = rl.lr * min(1.0, (stage_step + 1) / max(1, rl.warmup_steps))
        trainer_old = rl.old_log_probs == "trainer" and rl.mini_batches > 1
        if trainer_old:
            self.measure(kept, rl, update)
        bounds = np.linspace(0, count, min(rl.mini_batches, count) + 1).astype(int)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            batch, advantages = kept.trajectories[start:end], kept.advantages[start:end]
            normaliser: float | torch.Tensor = len(batch)
            if rl.aggregation == "token-mean":
                normaliser = sum(t.model_tokens for t in batch)
            elif rl.aggregation == "group-token-mean":
                normaliser = group_normaliser([t.model_tokens for t in batch], [t.group_id for t in batch])
            for micro in micro_batches(batch, rl.micro_batch_tokens, self.device):
                log_probs, entropy = log_probs_and_entropy(self.model, micro, rl.temperature)
                prompts = [len(t.prompt_ids) for t in batch]
                if not trainer_old and number == 0:  # the weights are still those that rolled out
                    update.note(micro, prompts, batch, log_probs, entropy, start)
                if trainer_old:
                    old = micro.scatter([update.log_probs[start + i] for i in range(len(batch))], prompts)
                elif rl.old_log_probs == "trainer":
                    old = log_probs.detach()
                else:
                    old = micro.scatter([t.log_probs for t in batch], prompts)
                loss, stats = policy_loss(
                    log_probs,
                    old.to(self.device),
                    torch.tensor([advantages[i] for i in micro.index], device=self.device)[:, None].expand_as(
                        log_probs
                    ),
                    micro.mask_BT.float(),
                    clip_low=rl.clip_low,
                    clip_high=rl.clip_high,
                    variant=rl.variant,
                    aggregation=rl.aggregation,
                    normaliser=normaliser[micro.index] if isinstance(normaliser, torch.Tensor) else normaliser,
                    horizon=rl.max_response_tokens,
                )
                loss.backward()
                update.add(stats, float(loss.detach()), int(micro.mask_BT.sum()))
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), rl.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            update.grad_norms.append(float(norm))
        self.check_mismatch(kept, update)
        return update

    @torch.no_grad()
    def measure(self, kept: Kept, rl: RlSection, update: "Update") -> None:
        """Log-probs and entropy of all kept rollouts under the weights that rolled them out."""
        prompts = [len(t.prompt_ids) for t in kept.trajectories]
        for micro in micro_batches(kept.trajectories, rl.micro_batch_tokens, self.device):
            log_probs, entropy = log_probs_and_entropy(self.model, micro, rl.temperature)
            update.note(micro, prompts, kept.trajectories, log_probs, entropy, 0)

    def check_mismatch(self, kept: Kept, update: "Update") -> None:
        """Compare engine and trainer on the tokens that both have scored. Raises MismatchError past the limit."""
        gaps = [
            np.abs(np.asarray(measured) - np.asarray(t.log_probs))[np.asarray(t.loss_mask)]
            for t, measured in zip(kept.trajectories, update.log_probs, strict=True)
            if measured is not None
        ]
        if not gaps:
            return
        gap = np.concatenate(gaps)
        update.extra |= {"mismatch": float(gap.mean()), "mismatch_max": float(gap.max())}
        limit = self.recipe.engine.mismatch_limit
        if limit is None and self.recipe.engine.dtype == "float32":
            limit = FP32_MISMATCH
        if limit is not None and not gap.mean() <= limit:
            raise MismatchError(
                f"engine and trainer differ by {gap.mean():.2g} in the mean log-prob of a token, the limit is {limit:g}: "
                "stale weights, another precision or a bug; engine.mismatch_limit sets the limit"
            )

    # State

    def rows(self, trajectories: Sequence[Trajectory], kept: Kept, update: "Update", rl: RlSection) -> dict[str, list]:
        places = {t.traj_id: i for i, t in enumerate(kept.trajectories)}
        rows: dict[str, list[Any]] = {"trajectories": [], "calls": [], "transcripts": []}
        for trajectory in trajectories:
            i = places.get(trajectory.traj_id)
            verdict = Verdict(False)
            if i is not None:
                verdict = Verdict(True, kept.advantages[i], update.log_probs[i], update.entropies[i])
            arrays = rl.token_arrays == "all" or i is not None
            if rl.token_arrays == "sampled":
                arrays = trajectory.sample == 0
            rows["trajectories"].append(trajectory_row(trajectory, verdict))
            rows["calls"] += call_rows(trajectory)
            rows["transcripts"].append(transcript_row(trajectory, verdict, arrays=arrays))
        return rows

    def checkpoint(self, step: int, rl: RlSection) -> None:
        assert self.optimizer is not None
        with self.writer.checkpoint(step) as folder:
            save_model(folder, self.model, self.tokenizer)
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
            (folder / "trainer.json").write_text(json.dumps({"step": step}))
        self.writer.keep_checkpoints(rl.keep_checkpoints)

    def restore(self) -> int:
        """Go back to the newest checkpoint; returns its step, 0 without one. Later steps are cut from the run store."""
        found = self.writer.latest_checkpoint()
        if found is None:
            self.writer.cut(0)
            return 0
        step, folder = found
        self.writer.cut(step)
        from safetensors.torch import load_model as load_tensors

        load_tensors(self.model, str(folder / "model.safetensors"), device=str(self.device))
        self.optimizer = make_optimizer(self.model, self.recipe.rl)
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        return step


def make_optimizer(model: PreTrainedModel, rl: RlSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rl.lr, weight_decay=rl.weight_decay)


class Update:
    """What the update measured. log_probs, entropies: per kept rollout, over its response; None where not measured."""

    def __init__(self, count: int):
        self.log_probs: list[Any] = [None] * count
        self.entropies: list[Any] = [None] * count
        self.grad_norms: list[float] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self.extra: dict[str, float] = {}

    def note(self, micro, prompts, batch, log_probs, entropy, offset) -> None:
        """Take a micro-batch's log-probs and entropy apart into responses."""
        for row, i in enumerate(micro.index):
            span = slice(prompts[i], prompts[i] + len(batch[i].response_ids))
            outside = ~micro.mask_BT[row, span]
            for kind, values in ((self.log_probs, log_probs), (self.entropies, entropy)):
                kind[offset + i] = values[row, span].detach().masked_fill(outside, torch.nan).cpu().numpy()

    def add(self, stats: Mapping[str, float], loss: float, tokens: int) -> None:
        for name, value in stats.items():
            self._sums[name] += value * tokens
        self._tokens += tokens
        self._sums["loss"] += loss

    @property
    def metrics(self) -> dict[str, float]:
        if not self.grad_norms:
            return {}
        means = {name: value / self._tokens for name, value in self._sums.items() if name != "loss"}
        return (
            self.extra
            | means
            | {
                "loss": self._sums["loss"] / len(self.grad_norms),
                "grad_norm": float(np.mean(self.grad_norms)),
                "update_tokens": self._tokens,
            }
        )


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def __call__(self, name: str) -> "Clock":
        self._name, self._since = name, time.monotonic()
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.seconds[self._name] = time.monotonic() - self._since

    def total(self) -> float:
        return time.monotonic() - self._start
