"""A trainer with scripted rollouts and real updates.

The question controls the rollouts. `chance 0.5, answer 7`: half of the seeds answer correctly. `chance 0.5, answer 7, brief
from 2`: rollouts of policy versions below 2 exceed every limit.
"""

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.scripted_engine import ScriptedEngine
from rstar_lab.rl.engine import Completion, Sampling
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.environments.mixture import RunEnvironment
from rstar_lab.rl.models.model import build_tiny, load_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.section import merged
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.training.trainer import Evaluate, Trainer
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

TOKENIZER = train_tokenizer(["chance 0.5, answer 7</reason><answer>\\boxed{7}</answer>"], 300)
RL = {
    "problems_per_step": 2,
    "group_size": 4,
    "method": {"roc": {"oversample": 1}},
    "limits": {"max_response_tokens": 120, "max_turns": 2},
    "lr": 1e-3,
    "warmup_steps": 0,
    "schedule": {"lockstep": True},
    "checkpoint_every": 1,
}


class Player(ScriptedEngine):
    """An engine that answers correctly or not, as the question and the seed determine."""

    def __init__(self, slow_s: float = 0.0) -> None:
        """slow_s: time that a tenth of the completions takes."""
        super().__init__(TOKENIZER, lambda prompt, turn: "")
        self.versions: list[int] = []
        self.slow_s = slow_s

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        found = re.search(r"chance ([\d.]+), answer (\d+)(?:, brief from (\d+))?", self.tokenizer.decode(prompt_ids))
        assert found
        rng = random.Random(sampling.seed)
        answer = found[2] if rng.random() < float(found[1]) else "0"
        words = 10_000 if self.versions[-1] < int(found[3] or 0) else rng.randrange(8)
        response = f"so{' so' * words}</reason><answer>\\boxed{{{answer}}}</answer>"
        self.script = lambda prompt, turn: response
        completion = replace(await super().generate(prompt_ids, sampling), policy_version=self.versions[-1])
        if self.slow_s and rng.random() < 0.1:
            await asyncio.sleep(self.slow_s)
        return completion

    async def load_weights(self, path: Path, version: int) -> None:
        self.versions.append(version)


def problem(name: str, chance: float, more: str = "") -> Problem:
    return Problem(problem_id=name, question=f"chance {chance}, answer 7{more}", answer="7")


def right(text: str, answer: str) -> float:
    return float(f"boxed{{{answer}}}" in text)


def tiny(seed: int = 0) -> Any:
    """Return the model of the runs: random, two layers, 64 dimensions."""
    return build_tiny(TOKENIZER, seed=seed, hidden_size=64, layers=2, heads=2, kv_heads=1)


def recipe_of(stages: list[dict[str, Any]], **rl: Any):
    stages = [{"problems": {"synthetic": {"count": 1}}, **stage} for stage in stages]
    return parse_recipe(
        {"name": "s", "model": "tiny", "rl": merged(RL, rl), "stages": stages, "engine": {"mismatch_limit": 1e9}}
    )


class Stop(Exception):
    """Raised to stop a run between two steps."""


async def train(
    runs_dir: Path,
    stages: list[dict[str, Any]],
    problems: Mapping[str, Sequence[Problem]],
    *,
    stop_after: int | None = None,
    trainer_class: type[Trainer] = Trainer,
    slow_s: float = 0.0,
    engine: Player | None = None,
    tools: Mapping[str, Tool] | None = None,
    environments: Mapping[str, RunEnvironment] | None = None,
    servers: Mapping[str, ScriptedEngine] | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    **rl: Any,
) -> tuple[Trainer, Path]:
    """Run a recipe, or resume it. stop_after: step after which the run is stopped. environments: by name."""
    recipe = recipe_of(stages, **rl)
    during = recipe.evaluate.during.model_copy(update={"every": evaluate_every})
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"during": during})})
    model = tiny()

    def on_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] == stop_after:
            raise Stop

    with RunWriter.open(runs_dir, "s-rl", kind="train", recipe=recipe.model_dump(mode="json"), seed=0) as writer:
        engines = EngineGroup([engine or Player(slow_s)], runs_dir, 64)  # type: ignore[list-item]
        trainer = trainer_class(
            recipe, model=model, tokenizer=TOKENIZER, engines=engines, tools=tools or {}, reward=right, writer=writer,
            problems=problems, on_step=on_step, environments=environments, servers=servers, evaluate=evaluate,
        )  # fmt: skip
        try:
            await trainer.run()
        except Stop:
            pass
        return trainer, writer.run_dir


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in load_model(folder).state_dict().items()}


def metrics_without_times(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step without those that differ between equal runs."""
    lines = RunReader(run_dir).metrics()
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]
