"""One step on the same scripted rollouts through every driver of this process. verl: verl/test_verl_trainer.py."""

import math
import re
from pathlib import Path

import pytest
from helpers.scripted_training import TOKENIZER, Player, problem, recipe_of, tiny, train

import rstar_lab
from rstar_lab.common.progress import Reporter
from rstar_lab.doctor.logs import read_logs
from rstar_lab.rl import TrainingLoop
from rstar_lab.rl.algorithm.advantages import group_advantages
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.models.model import save_model
from rstar_lab.rl.renderers.base import PROMPT_FORMATS
from rstar_lab.rl.rollout.plan import draw_problems
from rstar_lab.rl.session import RunSession
from rstar_lab.runs.reader import RunReader

PACKAGE = Path(rstar_lab.__file__).parent
FAMILIES = ("hermes", "qwen", "llama", "mistral", "gemma", "deepseek", "harmony")
pytestmark = pytest.mark.slow
POOL = [problem("mixed", 0.5), problem("solved", 1.0), problem("hard", 0.3)]
OPTIONS = {
    "problems_per_step": 3, "tools": [], "warmup_steps": 4, "retire_from": 1.0,
    "method": {"roc": {"oversample": 2}, "add": [
        {"type": "overlong_filter"}, {"type": "void_turns"}, {"type": "sdpo", "weight": 0.1},
    ]},
}  # fmt: skip
ONLY_IN_BACKGROUND = {
    "staleness_mean", "staleness_max", "dropped_groups", "dropped_share", "dropped_share_long", "dropped_share_hard",
    "stale_tokens", "policy_gap",
}  # fmt: skip


def line_of(run_dir):
    return RunReader(run_dir).metrics()[0]


def without_times(line):
    timing = ("stage", "generated_tokens_per_s", "engine_busy_s")
    return {key: value for key, value in line.items() if not key.endswith("_s") and key not in timing}


async def trained(tmp_path, **rl):
    _, run_dir = await train(tmp_path, [{"name": "one", "steps": 1}], {"one": POOL}, **(OPTIONS | rl))
    return line_of(run_dir)


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """Return an open loop whose engine is scripted and whose model is that of the trainer."""
    save_model(tmp_path / "model", tiny(), TOKENIZER)
    player = Player()

    async def engines(session, model_dir):
        return EngineGroup([player], tmp_path, 64)

    monkeypatch.setattr(RunSession, "engines", engines)
    recipe = recipe_of([{"name": "one", "steps": 1}], **OPTIONS)
    with TrainingLoop(recipe, tmp_path / "model", runs_dir=tmp_path / "loop", reporter=Reporter(True)) as opened:
        yield opened


def drawn():
    return draw_problems(POOL, 0, 3, seed=0, stage="one")[0]


def same(ours, theirs):
    """Return the keys of a line whose values differ in another line."""
    return {key for key in ours if key not in theirs or not close(ours[key], theirs[key])}


def close(a, b):
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6))


async def test_the_loop_stores_the_numbers_of_the_trainer(tmp_path, loop):
    line = await trained(tmp_path / "sync")
    assert line["class/trained"] and line["equal_groups"] == 1 and line["retired"] == 1 and line["teacher_kl"] != 0
    assert {"groups", "solved_groups", "retried", "teacher_s"} <= line.keys()
    loop.run_step(drawn())
    own = line_of(loop.run_dir)
    assert {key for key in line if key not in own} <= {"store_s"}
    assert same(without_times(line), without_times(own)) <= {"retired"}, "a loop draws no problems"


async def test_the_background_modes_store_the_same_numbers(tmp_path):
    line = without_times(await trained(tmp_path / "sync"))
    for kind, more in (("one_step_off", {}), ("async", {"buffer_groups": 3, "max_staleness": 1})):
        schedule = {"type": kind, "allow_uncorrected": True} | more
        other = without_times(await trained(tmp_path / kind, schedule=schedule))
        assert line.keys() <= other.keys() and other.keys() - line.keys() == ONLY_IN_BACKGROUND
        assert same(line, other) == set()


def test_no_method_and_no_prompt_format_is_named_where_the_step_is():
    methods = {path.stem for path in (PACKAGE / "rl/methods").glob("*.py")}
    methods -= {"__init__", "base", "method", "user", "user_functions", "samplers"}
    names = re.compile(
        "|".join(rf"(?<![a-z]){name}(?![a-z])" for name in sorted({*methods, *PROMPT_FORMATS, *FAMILIES} - {"model"}))
    )
    for file in ("training/trainer", "algorithm/selection", "rollout/agent_loop", "step", "verl/trainer"):
        text = (PACKAGE / f"rl/{file}.py").read_text().lower()
        # The algorithm, its penalties, and a number that a method has the name of.
        for allowed in ("grpo-roc", "rl.algorithm.roc", "`control_tokens`", '"control_tokens"'):
            text = text.replace(allowed, "")
        assert names.findall(text) == [], file


def test_own_rollouts_and_advantages_are_counted_like_the_recipes(tmp_path, loop):
    rollouts = loop.sample(drawn(), n=loop.rl.rollouts_per_group)
    kept = loop.resample(rollouts)
    loop.update(kept, group_advantages([t.reward for t in kept], [t.group_id for t in kept]))
    line = line_of(loop.run_dir)
    classes = {key: value for key, value in line.items() if key.startswith("class/")}
    assert (
        sum(classes.values()) == len(rollouts) == line["rollouts"] and line["equal_groups"] == 1 and line["groups"] == 3
    )
    assert line["class/trained"] == 8 and line["class/equal_group"] == 4 and line["class/roc"] == 12
    assert loop.learner.optimizer.param_groups[0]["lr"] == pytest.approx(loop.rl.lr / 4), "warm-up"
    (log,) = read_logs(loop.run_dir, tmp_path)
    assert log.steps["equal_share"].tolist() == [pytest.approx(1 / 3)]
