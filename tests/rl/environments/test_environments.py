"""Tests of environments: what the model sees, rewards, groups, mixtures, and every way in which one can fail."""

import asyncio
import sys
from collections import Counter

import pytest
from helpers.scripted_engine import ScriptedEngine

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.environments.base import Environment, ModelMessage, Observation, RewardPart
from rstar_lab.rl.environments.loading import EnvironmentClass, load_environment
from rstar_lab.rl.environments.mixture import Mixture, RunEnvironment
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.plan import draw_problems
from rstar_lab.rl.rollout.records import messages
from rstar_lab.rl.rollout.run import run_rollouts, score_groups
from rstar_lab.rl.trajectory import StopReason

TOKENIZER = train_tokenizer(["guess the number, higher or lower"], 300)
PROBLEM = Problem(problem_id="seven", question="Guess the number.", answer="7", info={"secret": 7}, environment="game")
PEEK = f"</reason>\n{render_tool_call('peek', {'digit': 7})}"


class Guess(Environment):
    """Guess a number. The environment answers turns without a call, and a tool counts its calls."""

    open = 0  # instances that were not closed

    def __init__(self):
        self.peeks, self.fault = 0, None
        Guess.open += 1

    @property
    def tools(self):
        return [self.peek]

    def peek(self, digit: int) -> str:
        """Return whether the secret contains a digit.

        Args:
            digit: The digit.
        """
        self.peeks += 1
        return str(str(digit) in str(self.secret))

    def reset(self, problem: Problem, seed: int):
        self.secret, self.fault = problem.info["secret"], problem.info.get("fault")
        if self.fault == "reset raises":
            raise KeyError("no such level")
        return {"reset malformed": 3, "reset silent": ""}.get(self.fault, f"{problem.question} Peeks are allowed.")

    async def step(self, message: ModelMessage):
        if self.fault == "step raises":
            raise RuntimeError("lost the board")
        if self.fault == "step hangs":
            await asyncio.sleep(60)
        if self.fault == "step malformed":
            return {"text": "higher"}
        if self.fault == "step infinite":
            return Observation("higher", reward=float("nan"))
        if message.calls:
            return None
        guess = int(message.text.rpartition(" ")[2])
        if guess == self.secret:
            return Observation(reward=1.0, done=True)
        return Observation("higher" if guess < self.secret else "lower", reward=-0.1)

    async def score(self, trajectory):
        if self.fault == "score infinite":
            return {"won": float("inf")}
        if self.fault == "score malformed":
            return [1.0]
        return {"won": 1.0, "peeks": RewardPart(self.peeks, -0.5), "seen": RewardPart(self.peeks, 0)}

    async def close(self):
        Guess.open -= 1
        if self.fault == "close hangs":
            await asyncio.sleep(60)
        if self.fault == "close raises":
            raise OSError("a session is left")


class Ranked(Guess):
    async def score_group(self, trajectories):
        if any(t.problem_id == "unranked" for t in trajectories):
            return [{"rank": 1.0}]
        best = min(len(t.turns) for t in trajectories)
        return [{"rank": float(len(t.turns) == best)} for t in trajectories]


def context_of(made=Guess, **limits) -> RolloutContext:
    environment = EnvironmentClass("game", made, time_limit_s=0.5)
    context = RolloutContext(
        Codec(TOKENIZER, {}), {}, lambda text, answer: 1.0, LimitsSection(max_response_tokens=4000)
    )
    own = RunEnvironment(environment.tools, lambda text, answer: 0.0, environment, limits)
    return context.with_environments({"game": own})


async def roll(*turns: str, problem=PROBLEM, context=None, sample=0):
    engine = ScriptedEngine(TOKENIZER, lambda prompt, turn: turns[turn])
    task = RolloutTask(problem, f"t-{sample}", "g", sample, seed=1)
    return await run_rollout(task, engine, context or context_of()), engine


async def test_an_environment_writes_before_the_first_turn_and_after_each_turn():
    trajectory, engine = await roll("I say 3", PEEK, "I say 9", "I say 7")
    assert trajectory.stop_reason is StopReason.DONE and trajectory.environment == "game"
    last = TOKENIZER.decode(engine.prompts[-1])
    assert "Guess the number. Peeks are allowed." in last and '"name": "peek"' in last
    between = TOKENIZER.decode(trajectory.response_ids[trajectory.turns[0].end : trajectory.turns[1].start])
    assert between == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n<reason>"
    assert not any(trajectory.loss_mask[trajectory.turns[0].end : trajectory.turns[1].start])
    own = [i for i, mine in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mine]
    assert TOKENIZER.decode(own) == "".join(f"{t}<|im_end|>" for t in ("I say 3", PEEK, "I say 9", "I say 7"))
    assert [c.response for c in trajectory.calls] == ["True"]
    assert [turn.reward for turn in trajectory.turns] == [-0.1, None, -0.1, 1.0]
    assert trajectory.reward == pytest.approx(1.0 - 0.5 + 0.8)
    assert trajectory.metrics == {"won": 1.0, "peeks": 1.0, "seen": 1.0, "turns": pytest.approx(0.8)}
    said = messages(trajectory)
    assert "".join(m["role"][0] for m in said) == "uauataua"
    assert said[1]["reward"] == -0.1


async def test_the_limits_of_turns_and_tokens_hold():
    trajectory, _ = await roll("I say 3", "I say 3", context=context_of(max_turns=2))
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(trajectory.turns) == 2
    trajectory, _ = await roll("I say 3", context=context_of(max_response_tokens=15))
    assert trajectory.stop_reason is StopReason.LENGTH and all(trajectory.loss_mask)
    trajectory, _ = await roll("x" * 500, context=context_of(max_response_tokens=50))
    assert trajectory.truncated and len(trajectory.response_ids) == 50


async def test_a_wrong_call_of_a_tool_counts_against_the_model():
    trajectory, _ = await roll(f"</reason>\n{render_tool_call('peek', {'digit': 'x'})}", "I say 7")
    assert trajectory.calls[0].outcome is Outcome.INVALID_ARGUMENTS and trajectory.p_err == 1.0


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("reset raises", "reset raised KeyError: 'no such level'"),
        ("reset malformed", "reset returned 3; expected text"),
        ("reset silent", "reset returned no text"),
        ("step raises", "step raised RuntimeError: lost the board"),
        ("step hangs", "step did not return within 0.5 s"),
        ("step malformed", "step returned {'text': 'higher'}; expected text"),
        ("step infinite", "step returned the reward nan"),
        ("score infinite", "score returned inf with weight 1.0 for 'won'"),
        ("score malformed", "score returned [1.0]; expected a dict"),
    ],
)
async def test_a_failing_environment_ends_its_rollout_only(fault, cause, caplog):
    broken = PROBLEM.model_copy(update={"problem_id": "broken", "info": {"secret": 7, "fault": fault}})
    engine = ScriptedEngine(TOKENIZER, lambda prompt, turn: ["I say 3", "I say 7"][turn])
    engine.on_turn, engine.leave, engine.interrupt = lambda text, last: None, lambda: None, lambda: None
    tasks = [RolloutTask(p, f"t-{i}", "g", i, seed=i) for i, p in enumerate((broken, PROBLEM))]
    failed, fine = await run_rollouts(tasks, context_of(), slots=lambda index, task: engine)
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR and not failed.usable and failed.reward == 0.0
    assert failed.error.startswith(f"environment game, problem broken: {cause}")
    assert failed.error in caplog.text
    assert messages(failed)[-1] == {"role": "environment", "content": failed.error}
    assert fine.stop_reason is StopReason.DONE and fine.reward == pytest.approx(1.9)


@pytest.mark.parametrize("fault", ["close hangs", "close raises"])
async def test_an_environment_that_cannot_be_closed_is_named(fault, caplog):
    problem = PROBLEM.model_copy(update={"info": {"secret": 7, "fault": fault}})
    context = context_of()
    trajectory, _ = await roll("I say 7", problem=problem, context=context)
    assert trajectory.stop_reason is StopReason.DONE and trajectory.reward == 2.0
    assert "environment game, problem seven: close" in caplog.text
    assert not context.others["game"].environment.episodes


async def test_a_cancelled_rollout_closes_its_environment():
    context = context_of()
    Guess.open = 0
    problem = PROBLEM.model_copy(update={"info": {"secret": 7, "fault": "step hangs"}})
    running = asyncio.ensure_future(roll("I say 3", problem=problem, context=context))
    await asyncio.sleep(0.1)
    assert Guess.open == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert Guess.open == 0 and not context.others["game"].environment.episodes


async def test_group_relative_rewards_are_added():
    context = context_of(Ranked)
    tasks = [RolloutTask(PROBLEM, f"t-{i}", "g", i, seed=1) for i in range(2)]
    rollouts = [
        (await roll(*turns, context=context, sample=i))[0]
        for i, turns in enumerate((["I say 7"], ["I say 1", "I say 7"]))
    ]
    scored = await score_groups(rollouts, tasks, context)
    assert [t.metrics["rank"] for t in scored] == [1.0, 0.0]
    assert [b.reward - a.reward for a, b in zip(rollouts, scored, strict=True)] == [1.0, 0.0]
    unranked = PROBLEM.model_copy(update={"problem_id": "unranked"})
    rollouts = [(await roll("I say 7", problem=unranked, context=context, sample=i))[0] for i in range(2)]
    tasks = [RolloutTask(unranked, f"t-{i}", "g", i, seed=1) for i in range(2)]
    failed = await score_groups(rollouts, tasks, context)
    assert {t.stop_reason for t in failed} == {StopReason.ENVIRONMENT_ERROR}
    assert failed[0].error.endswith("score_group returned 1 scores for 2 rollouts")


def test_a_mixture_keeps_its_weights_in_every_batch():
    problems = [
        Problem(problem_id=f"{name}{i}", question="q", answer="1", environment=name) for name in "ab" for i in range(5)
    ]
    weights = {"a": 3.0, "b": 1.0}
    mixture = Mixture(problems, weights)
    drawn, position = draw_problems(mixture, 0, 40, seed=0, stage="s")
    for batch in zip(*[iter(drawn)] * 4, strict=True):
        assert Counter(problem.environment for problem in batch) == {"a": 3, "b": 1}
    assert Counter(p.problem_id for p in drawn) == {f"a{i}": 6 for i in range(5)} | {f"b{i}": 2 for i in range(5)}
    again, _ = draw_problems(Mixture(problems, weights), 20, 20, seed=0, stage="s")
    assert again == drawn[20:] and position == 40  # a resumed run continues where it stopped
    rest, _ = draw_problems(mixture, 0, 8, seed=0, stage="s", retired={f"a{i}" for i in range(5)})
    assert {p.environment for p in rest} == {"b"}


def test_errors_of_loading_name_the_key(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(
        "class Bare:\n    tools = ()\nclass Needy:\n    def __init__(self, path):\n        pass\n"
        "class Breaks:\n    def __init__(self):\n        raise OSError('no disk')\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    for name, message in {
        "Bare": "rl.environments: x: Bare has no method reset; inherit from",
        "Needy": r"rl.environments.x.environment: faulty:Needy must not require arguments \(path\)",
        "Breaks": "rl.environments: x: OSError: no disk",
        "number": "is a int; expected a class",
        "Missing": "has no Missing",
    }.items():
        with pytest.raises(UserError, match=message):
            load_environment("x", f"faulty:{name}", 1.0)


async def test_a_problem_of_an_unknown_environment_is_an_error():
    with pytest.raises(UserError, match=r"problem seven: rl\.environments has no entry 'game'; entries: none"):
        await roll(
            "I say 7",
            context=RolloutContext(Codec(TOKENIZER, {}), {}, lambda t, a: 1.0, LimitsSection(max_response_tokens=100)),
        )
