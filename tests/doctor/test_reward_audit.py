"""The audit of a reward: it finds the mistakes of bad rewards, and `verify` passes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.doctor.audit import audit, response_of
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import RewardInputs, make_reward

GOLDEN = Path(__file__).parent.parent / "golden" / "runs" / "tiny_fast-eval-rl"
ANSWERS = ["1", r"\frac{1}{2}", "12", "7", "$x+1$", "0.25", r"\sqrt{2}", "no solution", "(1,2)", r"\$36", "$27+38 i$"]
PROBLEMS = [Problem(problem_id=f"p{n}", question=f"What is {n} of them?", answer=a) for n, a in enumerate(ANSWERS)]

REWARDS = r"""
import random, re, time

def contains(text, answer):
    return float(bool(text) and answer.strip("$") in text)

def exact(text, answer):
    boxes = re.findall(r"\\boxed\{(.*)\}", text)
    return float(bool(boxes) and boxes[-1] == answer)

def generous(text, answer):
    return 1.0

def crashes(text, answer):
    return 1.0 / len(text)

def random_reward(text, answer):
    return random.random()

def box(text):
    boxes = re.findall(r"\\boxed\{(.*)\}", text)
    return boxes[-1].strip(" $.\\") if boxes else ""

def blind_to_signs(text, answer):
    return float(box(text).lstrip("-") == answer.lstrip("-"))

def short_only(text, answer):
    return float(len(text) < 10_000 and box(text) == answer)

def nothing(text, answer):
    return 0.0

def ends(text, answer):
    raise SystemExit(0)

def logs(prompts, completions, answer, log_extra, log_metric):
    log_extra("answer", answer)
    log_metric("one", 1.0)
    return [float(box(row[0]["content"]) == truth) for row, truth in zip(completions, answer)]

def hangs(text, answer):
    time.sleep(600)

def hangs_on_long(text, answer):
    return time.sleep(600) if len(text) > 100_000 else float(box(text) == answer)

calls = 0

def counts(text, answer):
    global calls
    calls += 1
    return float(calls % 2)

def trl(completions, answer, **columns):
    return [float(row[0]["content"].count("<answer>") == 1 and truth in row[0]["content"]) for row, truth in
            zip(completions, answer)]
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path, monkeypatch):
    (tmp_path / "audited.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("answer", ["tagged", "boxed", "last_number"])
def test_verify_passes(answer):
    numbers = [problem for problem in PROBLEMS if problem.answer.replace(".", "").isdigit()]
    found = audit("verify", numbers if answer == "last_number" else PROBLEMS, answer=answer)
    assert [check for check in found.checks if check.failed] == []
    assert found.passed and found.problems >= 4 and found.slowest_s > 0


@pytest.mark.parametrize(
    ("reward", "failed"),
    [
        ("contains", {"hedged", "shotgun", "replaced"}),
        ("exact", {"reformatted"}),
        ("generous", {"empty", "null", "wrong", "echoed", "hedged", "shotgun", "replaced", "injected", "long"}),
        ("crashes", {"crash"}),
        ("random_reward", {"deterministic", "order", "wrong"}),
        ("counts", {"deterministic"}),
        ("trl", {"hedged", "shotgun"}),
    ],
)
def test_mistakes_of_a_reward_are_found(reward, failed):
    found = audit(f"audited:{reward}", PROBLEMS)
    assert failed <= {check.check for check in found.checks if check.failed}
    assert not found.passed
    assert all(check.example for check in found.checks if check.failed)


NUMBERS = [problem for problem in PROBLEMS if problem.answer.isdigit()]


@pytest.mark.parametrize(
    ("reward", "failed"),
    [
        ("logs", set()),
        ("nothing", {"gold", "reformatted", "long right"}), ("ends", {"crash"}),
        ("blind_to_signs", {"near"}), ("short_only", {"long right"}),
    ],
)  # fmt: skip
def test_rewards_of_other_forms_are_judged(reward, failed):
    assert {check.check for check in audit(f"audited:{reward}", NUMBERS).checks if check.failed} == failed


def test_a_reward_that_hangs_is_not_waited_for_in_every_call(monkeypatch):
    monkeypatch.setattr("rstar_lab.doctor.audit.LIMIT_S", 1.0)
    monkeypatch.setattr("rstar_lab.doctor.audit.SLOW_S", 0.9)
    monkeypatch.setattr("rstar_lab.doctor.audit.PATIENCE", 2)
    checks = {check.check: check for check in audit("audited:hangs", NUMBERS).checks}
    assert checks["crash"].failed == checks["crash"].n == 2 and checks["time"].failed == 2
    checks = {check.check: check for check in audit("audited:hangs_on_long", NUMBERS).checks}
    assert checks["crash"].failed == 2 and checks["gold"].failed == 0 and "long" not in checks


def test_the_command(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps({"q": p.question, "answer": p.answer}) for p in PROBLEMS))
    arguments = ["--problems", str(file), "--fields", "question=q", "--json"]
    done = CliRunner().invoke(app, ["audit", "verify", *arguments])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0 and lines[-1]["passed"] is True and lines[-1]["problems"] == len(PROBLEMS)
    done = CliRunner().invoke(app, ["audit", "audited:generous", *arguments])
    assert done.exit_code == 1 and json.loads(done.stdout.splitlines()[-1])["passed"] is False


def test_problems_with_one_answer_cannot_be_audited():
    with pytest.raises(UserError, match="at least two different answers"):
        audit("verify", PROBLEMS[:1] * 3)


ENVIRONMENTS = """
from rstar_lab.rl.environments.base import Environment, Observation
from rstar_lab.verify import verify

class Strict(Environment):
    async def reset(self, problem, seed):
        self.problem = problem
        return problem.question

    def score(self, trajectory):
        return {"right": float(verify(trajectory.text, self.problem.answer)), "tokens": 0.0}

class Lenient(Strict):
    def step(self, message):
        return Observation(reward=0.5 * ("answer" in message.text), done=True)

class Broken(Strict):
    def score(self, trajectory):
        raise KeyError("grader")
"""


@pytest.mark.parametrize(
    ("name", "failed"), [("Strict", set()), ("Lenient", {"wrong", "hedged"}), ("Broken", {"crash"})]
)
def test_the_reward_of_an_environment_is_audited(name, failed, tmp_path):
    (tmp_path / "audited_environments.py").write_text(ENVIRONMENTS)
    found = audit(f"audited_environments:{name}", PROBLEMS)
    checks = {check.check for check in found.checks if check.failed}
    assert failed <= checks and found.passed is not bool(failed)


SCORERS = """
from inspect_ai.scorer import Score, answer, includes, mean, scorer

last_line = answer("line")
anywhere = includes()

@scorer(metrics={"right": [mean()], "short": [mean()]})
def parts():
    async def score(state, target):
        right = state.output.completion.endswith(f"ANSWER: {target.text}")
        return Score(value={"right": "C" if right else "I", "short": len(state.output.completion) < 100})
    return score

@scorer(metrics=[mean()])
def of(field):
    return last_line
"""


def test_scorers_of_inspect_are_rewards_and_are_audited(tmp_path):
    pytest.importorskip("inspect_ai")
    (tmp_path / "audited_scorers.py").write_text(SCORERS)
    numbers = [problem for problem in PROBLEMS if problem.answer.isdigit()]
    for name, passes in (("last_line", True), ("parts", True), ("anywhere", False)):
        failed = {check.check for check in audit(f"audited_scorers:{name}", numbers).checks if check.failed}
        assert ("gold" not in failed) and (not failed & {"wrong", "shotgun"}) is passes, (name, failed)
    reward = make_reward("audited_scorers:parts")
    right = RewardInputs(numbers[0])
    assert reward.score(response_of("1", "tagged"), "1", right) == (1.0, {"parts/right": 1.0, "parts/short": 1.0})
    with pytest.raises(UserError, match="requires the argument field"):
        make_reward("audited_scorers:of")
