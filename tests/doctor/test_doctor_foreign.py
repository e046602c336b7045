"""Logs of other tools in the forms that these tools write: faults are named, and honest runs of other shapes are healthy."""

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.cases import read_cases

from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.doctor.answers import _stated, compare
from rstar_lab.doctor.rules.calls import _ERROR

WORDS = ("we", "add", "the", "numbers", "then", "check", "each", "step", "and", "carry", "one", "over")
CHAT = "system\nYou are a helpful assistant.\nuser\n{}\nassistant\n"


def world(steps=12, problems=4, group=8):
    """Yield (step, problem, sample, question, true answer, answer, right, text) of a run that learns."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        for problem in range(problems):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            rate = min(0.95, max(0.05, rng.betavariate(2, 2) + 0.02 * step))
            for sample in range(group):
                right = rng.random() < rate
                answer = a + b if right else a + b + rng.randint(1, 9)
                text = f"{' '.join(rng.choice(WORDS) for _ in range(14))} so \\boxed{{{answer}}}"
                yield step, problem, sample, f"What is {a} + {b}?", a + b, answer, right, text


def write_lines(file: Path, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def verl(change):
    """Return a writer of verl's rollout_data_dir. change(row, answer, right) returns the changed fields of a row."""

    def write(folder):
        steps = {}
        for step, problem, sample, question, truth, answer, right, text in world():
            row = {"input": CHAT.format(question), "output": text, "gts": str(truth), "score": float(right), "step": step,
                   "acc": float(right), "data_source": "x", "uid": f"{problem}_{sample}_0"}  # fmt: skip
            steps.setdefault(step, []).append(row | change(row, answer, right))
        for step, rows in steps.items():
            write_lines(folder / f"{step}.jsonl", rows)

    return write


def one_of(options, instruction):
    """Return a change of `verl` to problems with few answers, which the prompt names."""

    def change(row, answer, right):
        truth = int(row["gts"]) % len(options)
        given = options[truth if right else (truth + 1) % len(options)]
        question, output = row["input"].replace("?", f"? {instruction}"), row["output"].replace(str(answer), given)
        return {"input": question, "gts": options[truth], "pred": given, "output": output}

    return change


def verl_metrics(change, steps=12):
    def write(folder):
        known = {
            s: {"actor/entropy": 0.5, "actor/lr": 1e-6, "critic/score/mean": 0.3 + 0.03 * s}
            for s in range(1, steps + 1)
        }
        write_lines(
            folder / "experiment.jsonl", [{"step": str(s), "data": row | change(s)} for s, row in known.items()]
        )

    return write


def trl(change, weights=None):
    """Return a writer of TRL's completions. change(truth, sample) returns more columns."""

    def write(folder):
        rows = [
            {"step": step, "prompt": [{"role": "user", "content": question}], "group": (step, problem),
             "completion": [{"role": "assistant", "content": text}], "accuracy": float(right)} | change(truth, sample)
            for step, problem, sample, question, truth, _, right, text in world()
        ]  # fmt: skip
        table = pd.DataFrame(rows)
        total = sum(weight * table[name] for name, weight in (weights or {"accuracy": 1.0}).items())
        table["advantage"] = total - total.groupby(table.group).transform("mean")
        for step, part in table.drop(columns="group").groupby("step"):
            (folder / "completions").mkdir(parents=True, exist_ok=True)
            part.to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")

    return write


def verifiers(change):
    """Return a writer of prime-rl's rollouts with rows of verifiers. change(number, right) returns the changed fields of a row."""

    def write(folder):
        for number, (step, problem, _, question, truth, _, right, text) in enumerate(world()):
            row = {"example_id": 10 * step + problem, "task": "sums", "prompt": [{"role": "user", "content": question}],
                   "answer": str(truth),
                   "completion": [{"role": "assistant", "content": text}], "reward": float(right), "error": None, "is_truncated": False,
                   "stop_condition": "is_completed", "timing": {"generation_ms": 9.0}, "token_usage": {"output_tokens": 50.0}}  # fmt: skip
            file = folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.write(json.dumps(row | change(number, right)) + "\n")

    return write


def episodes(change):
    """Return a writer of the episodes of verifiers v1 in prime-rl's layout. change(number, trace) returns the changed fields."""

    def write(folder):
        for number, (step, problem, _, question, truth, _, right, text) in enumerate(world()):
            data = {"idx": problem, "prompt": question, "answer": str(truth)}
            task = {"type": "Sums", "data": data, "key": f"{step}-{problem}"}
            nodes = [
                {"message": {"role": "user", "content": question}, "sampled": False},
                {"message": {"role": "assistant", "content": "an abandoned branch"}, "parent": 0, "sampled": True},
                {"message": {"role": "assistant", "content": text}, "parent": 0, "sampled": True, "advantages": [right - 0.5]},
            ]  # fmt: skip
            call = {"node": 2, "finish_reason": "stop", "usage": {"prompt_tokens": 9, "completion_tokens": 50}}
            trace = {"task": task, "agent": {"trainable": True}, "nodes": nodes, "calls": [call], "ok": True, "errors": [],
                     "rewards": {"right": {"score": float(right), "weight": 1.0}}, "stop_condition": "agent_completed"}  # fmt: skip
            judge = trace | {"agent": {"name": "judge", "trainable": False}}
            episode = {"id": f"e{number}", "env": {"id": "sums"}, "task": task, "ok": True, "errors": [], "traces": [trace, judge],
                       "run": {"type": "train", "work": {"type": "train", "step": step}}}  # fmt: skip
            for subset in ("all", "effective"):
                file = folder / "rollouts" / f"step_{step}" / "train" / subset / "traces.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a") as opened:
                    opened.write(json.dumps(episode | change(number, trace)) + "\n")

    return write


def lines(change, messages=False):
    """Return a writer of JSON lines of prompts and completions, or of messages. change(number, row) returns the changed fields of a row."""

    def write(folder):
        rows = []
        for number, (step, _, sample, question, truth, _, right, text) in enumerate(world()):
            row = {"prompt": question, "completion": text}
            if messages:
                row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}
            row |= {"reward": float(right), "step": step, "ground_truth": str(truth), "sample_index": sample}
            rows.append(row | change(number, row))
        write_lines(folder / "log.jsonl", rows)

    return write


def agent(end):
    """Return a writer of conversations with a tool. end(number, last): the messages after its output."""

    def change(number, row):
        question, last = row["messages"]
        used, more = last | {"content": last["content"][:60]}, end(number, last)
        output = {"role": "tool", "name": "python", "content": "7"}
        return {"messages": [question, used, output, *more], "reward": row["reward"] * bool(more)}

    return lines(change, messages=True)


SUBMIT = [{"role": "assistant", "content": "done"}, {"role": "tool", "name": "submit", "content": "ok"}]
HONEST = {
    "some submit their answer by a call": agent(lambda number, last: SUBMIT if number % 3 else [last]),
    "costs": verl(lambda row, answer, right: {"score": right - 1 - 0.01 * (len(row["output"]) % 7), "pred": str(answer)}),
    "a list with the true answer": verl(lambda row, answer, right: {"gts": [row["gts"]], "pred": str(answer)}),
    "a list of one true answer in JSON": verl(lambda row, a, right: {"gts": json.dumps([row["gts"]]), "pred": str(a)}),
    "several true answers": verl(lambda row, answer, right: {"gts": {"target": [row["gts"], "x"]}, "pred": str(answer)}),
    "yes or no": verl(one_of(["yes", "no"], "Answer: yes or no.")),
    "another metric of the evaluation": verl_metrics(
        lambda s: {"val-aux/a/score/std@4": 0.2 + 0.01 * (s % 2), "val-core/a/acc/mean@4": 0.2 + 0.03 * s}
    ),
    "KL after a warm-up": verl_metrics(lambda s: {"actor/kl_loss": 2 * (s / 40) ** 4 if s < 40 else 2 + s / 20}, steps=80),
    "weights of rewards": trl(lambda truth, sample: {"length": -50.0 * (sample % 3)}, {"accuracy": 1.0, "length": 0.001}),
    "solved in the end": verl(
        lambda row, a, right: {"output": row["output"].replace(str(a), row["gts"]), "score": 1.0, "acc": 1.0} if row["step"] > 6 else {}
    ),
    "rounded answers": verl(lambda row, answer, right: {"gts": f"{int(row['gts']) / 7:.5f}", "pred": f"{answer / 7:.2f}"}),
    "ids of rollouts": lines(lambda number, row: {"id": f"cmpl-{number}"}),
    "episodes": episodes(lambda number, trace: {}),
}  # fmt: skip
FAULTS = {
    "rollouts end without a last turn": agent(lambda number, last: [last] if number % 3 else []),
    "texts do not depend on the question": verl(lambda row, answer, right: {"output": "so \\boxed{42}", "score": 0.0, "acc": 0.0}),
    "length collapse": verl(lambda row, answer, right: {"output": row["output"][-12 :] if row["step"] > 6 else row["output"]}),
    "the prompt changes": verl(lambda row, a, r: {"input": row["input"].replace("helpful", "rude" if row["step"] > 6 else "helpful")}),
    "truncated rollouts are rewarded": verifiers(lambda number, right: {"is_truncated": right and number % 4 == 0}),
    "the KL to the reference explodes": verl_metrics(lambda s: {"actor/kl_loss": 0.02 if s < 8 else 9.0}),
    "environments fail": verifiers(
        lambda number, right: {"error": {"error": "SandboxError"}, "completion": None, "reward": 0.0} if number % 6 == 0 else {}
    ),
    "right answers get no reward": lines(lambda number, row: {"reward": 0.0} if number % 3 == 0 else {}, messages=True),
    "an engine produces nothing": lines(
        lambda number, row: {"worker": row["sample_index"] % 2 if row["step"] < 7 else 0}, messages=True
    ),
    "truncation": lines(lambda number, row: {"finish_reason": "length" if number % 2 else "stop", "reward": float(number % 2 == 0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_log_of_another_shape_is_healthy(name, tmp_path):
    HONEST[name](tmp_path / "log")
    assert [finding.rule.name for finding in doctor(tmp_path / "log").findings] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_log_of_another_tool_is_named(fault, tmp_path):
    FAULTS[fault](tmp_path / "log")
    diagnosis = doctor(tmp_path / "log")
    assert fault in {finding.rule.name for finding in diagnosis.findings}
    assert len(diagnosis.logs) == 1


def test_episodes_of_verifiers_are_read_once(tmp_path):
    failed = {"traces": [], "errors": [{"type": "E"}], "ok": False}
    episodes(lambda number, trace: failed if number % 5 == 0 else {})(tmp_path)
    diagnosis = doctor(tmp_path)
    (log,) = diagnosis.logs
    assert log.source == "prime-rl" and len(log.rollouts) == 384 and log.rollouts.step.nunique() == 12
    assert {finding.rule.name for finding in diagnosis.findings} == {"environments fail"}
    known = log.rollouts[log.rollouts.stop_reason == "agent_completed"]
    assert len(known) == 384 - 77 and known.answer.notna().all() and known.response_tokens.eq(50).all()
    assert known.advantage.abs().eq(0.5).all() and known.group_id.nunique() == 48
    assert not log.texts().own.str.contains("abandoned").any()


def test_what_is_read_in_part_has_a_note(tmp_path):
    HONEST["several true answers"](tmp_path / "verl")
    text = doctor(tmp_path / "verl").to_text()
    for note in ("not read: data_source", "384 true answers not compared", "a quarter of their characters"):
        assert note in text
    HONEST["a list of one true answer in JSON"](tmp_path / "json")
    assert doctor(tmp_path / "json").logs[0].right.notna().all()
    HONEST["weights of rewards"](tmp_path / "trl")
    assert "the sum that the advantages follow: 1 accuracy, 0.001 length" in doctor(tmp_path / "trl").to_text()
    HONEST["another metric of the evaluation"](tmp_path / "metrics")
    assert "score is val-core/a/acc/mean@4; 1 other" in doctor(tmp_path / "metrics").to_text()
    write_lines(tmp_path / "d.jsonl", [{"messages": {"role": "user"}, "step": 1, "reward": 1.0}])
    with pytest.raises(UserError, match="field 'messages' is not a list"):
        doctor(tmp_path / "d.jsonl")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match="no log_history can be read"):
        doctor(tmp_path / "state")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("divisor", ["none", "group", "batch"])
def test_a_float_column_beside_the_reward_of_trl_is_not_added_to_it(share, divisor, tmp_path):
    """In a group, advantages are proportional to the reward, however rare right answers are and whatever they are divided by."""
    rng = np.random.default_rng(int(100 * share))
    for step in range(12):
        reward_GR = (rng.random((4, 8)) < share).astype(float)
        advantage_GR = reward_GR - reward_GR.mean(1, keepdims=True)
        advantage_GR /= {
            "none": 1,
            "group": reward_GR.std(1, ddof=1, keepdims=True) + 1e-4,
            "batch": reward_GR.std() + 1e-4,
        }[divisor]
        rows = {
            "step": step, "prompt": np.repeat([f"{step}+{n}?" for n in range(4)], 8), "completion": "so \\boxed{5}",
            "accuracy": reward_GR.ravel(), "num_chars": rng.integers(20, 400, 32).astype(float), "advantage": advantage_GR.ravel(),
        }  # fmt: skip
        pd.DataFrame(rows).to_parquet(tmp_path / f"completions_{step:05d}.parquet")
    assert set(doctor(tmp_path).logs[0].rollouts.reward) == {0.0, 1.0}


def test_waste_without_lengths_adds_up_and_an_evaluation_has_none(tmp_path):
    verl(lambda row, answer, right: {"output": "x" * 40, "score": float(right if int(row["gts"]) % 2 else 0)})(
        tmp_path / "log"
    )
    diagnosis = doctor(tmp_path / "log")
    rewards = diagnosis.logs[0].rollouts.groupby("group_id").reward
    assert sum(diagnosis.waste["log"].values()) == pytest.approx((rewards.max() == rewards.min()).mean())
    verl(lambda row, answer, right: {"input": row["input"].replace("?", f" {random.random()}?")})(tmp_path / "single")
    assert sum(doctor(tmp_path / "single").waste["single"].values()) == 0, (
        "a group of one rollout is no group with equal rewards"
    )
    write_lines(
        tmp_path / "results.jsonl", [{"prompt": f"q{i % 4}", "completion": "text", "reward": 1.0} for i in range(16)]
    )
    assert doctor(tmp_path / "results.jsonl").waste == {}


def test_rollouts_of_an_evaluation_are_no_run_of_training(tmp_path):
    verl(lambda *_: {})(tmp_path / "rollouts")
    verl(lambda *_: {"score": 0.0})(tmp_path / "validation")
    verl_metrics(lambda s: {})(tmp_path)
    diagnosis = doctor(tmp_path)
    assert diagnosis.findings == [] and len(diagnosis.logs) == 1 and diagnosis.logs[0].has("steps.entropy")
    assert "validation: rollouts of an evaluation are not read" in diagnosis.to_text()


def test_logs_of_one_name_are_told_apart(tmp_path):
    for name, change in (("good", lambda *_: {}), ("bad", lambda *_: {"score": 0.0})):
        verl(change)(tmp_path / name / "rollouts")
    diagnosis = doctor(tmp_path / "good" / "rollouts", tmp_path / "bad" / "rollouts")
    assert [log.name for log in diagnosis.logs] == ["rollouts", "rollouts-2"] and len(diagnosis.waste) == 2
    assert {finding.run for finding in diagnosis.findings} == {"rollouts-2"}


def test_texts_of_models_and_tools_are_read_as_they_are_meant():
    cases = read_cases(__file__, "texts.yaml")
    answers, truths, equal = zip(*cases["comparisons"], strict=True)
    assert compare(answers, truths) == list(equal)
    assert [_stated(text) for text, _ in cases["stated"]] == [answer for _, answer in cases["stated"]]
    assert [bool(_ERROR.search(output)) for output, _ in cases["outputs"]] == [error for _, error in cases["outputs"]]
