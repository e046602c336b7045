"""Tests of the doctor: each planted fault is named, honest logs are healthy, and logs of other trainers are read."""

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import Evidence, Log, Rule, doctor
from rstar_lab.doctor.diagnosis import diagnose
from rstar_lab.doctor.logs import COLUMNS
from rstar_lab.doctor.rules import RULES
from rstar_lab.hardware.profiles import load_profile

GOLDEN = Path(__file__).parents[1] / "golden" / "runs"
STEPS, PROBLEMS, GROUP = 12, 8, 8


def honest(seed: int = 0) -> Log:
    """Return the log of a run that learns."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(1, STEPS + 1):
        for problem in range(PROBLEMS):
            rate = np.clip(rng.beta(2, 2) + 0.02 * step, 0.05, 0.95)
            rewards = (rng.random(GROUP) < rate).astype(float)
            for sample, reward in enumerate(rewards):
                centred = reward - rewards.mean()
                rows.append(
                    {
                        "traj_id": f"{step}-{problem}-{sample}", "step": step, "group_id": f"{step}-{problem}",
                        "problem_id": f"p{step * PROBLEMS + problem}", "sample": sample, "reward": reward,
                        "advantage": centred if rewards.std() else np.nan, "kept": bool(rewards.std()), "calls": 1 + sample % 2,
                        "errors": int(rng.random() < 0.1), "outcomes": ["ok"] * (1 + sample % 2), "response_tokens": 200,
                        "model_tokens": 150,
                        "truncated": not reward and bool(rng.random() < 0.05), "answer": "42" if reward else f"{sample}", "truth": "42",
                        "stop_reason": "answered",
                        "engine_log_prob": -0.3, "generate_s": 1.0, "queue_s": 0.01, "engine": f"vllm-{sample % 2}",
                    }
                )  # fmt: skip
    rollouts = pd.DataFrame(rows)
    for name in COLUMNS:
        if name not in rollouts:
            rollouts[name] = np.nan
    noise = lambda scale: 1 + scale * rng.standard_normal(STEPS)  # noqa: E731
    steps = pd.DataFrame(
        {
            "step": range(1, STEPS + 1), "reward": 0.3 + 0.04 * np.arange(STEPS) + 0.01 * rng.standard_normal(STEPS),
            "held_out": 0.25 + 0.04 * np.arange(STEPS) + 0.005 * rng.standard_normal(STEPS), "entropy": 0.8 * noise(0.05),
            "grad_norm": 0.5 * noise(0.1), "lr": 1e-6, "clip_share": 0.02, "ratio_max": 5.0, "mismatch": 1e-4 * noise(0.1),
            "response_tokens": 200 * noise(0.05), "equal_share": 0.2, "staleness": 0.5, "kl_k3": 0.01 * noise(0.1),
        }
    )  # fmt: skip
    return Log("honest", "test", steps, rollouts, mini_batches=2)


def set_steps(**values):
    def plant(log: Log) -> Log:
        return replace(log, steps=log.steps.assign(**values))

    return plant


def set_rollouts(change):
    def plant(log: Log) -> Log:
        frame = log.rollouts.copy()
        change(frame)
        return replace(log, rollouts=frame)

    return plant


def column(name, value, where=lambda frame: slice(None)):
    def change(frame):
        frame[name] = frame[name].astype(object)
        frame.loc[where(frame), name] = value
        frame[name] = frame[name].infer_objects()

    return set_rollouts(change)


def some_outcomes(frame):
    frame["outcomes"] = [["sandbox_error"] if i % 5 == 0 else row for i, row in enumerate(frame.outcomes)]


def some_truths(frame):
    """Give each problem an answer of its own, and a third of them another true one."""
    frame["answer"] = np.where(frame.answer == "42", frame.problem_id, frame.answer)
    frame["truth"] = frame.problem_id + np.where(frame.problem_id.str.endswith(("1", "4", "7")), "0", "")


def length_as_reward(frame):
    frame["response_tokens"] = 100 + 37 * (np.arange(len(frame)) * 31 % 97)
    frame["reward"] = frame.response_tokens / 4000


def stuck(frame):
    again = np.where(frame.group_id.str[-1].isin(list("0246")), "p8", "p9")
    frame["problem_id"] = frame.problem_id.where(frame.step < 5, again)


def cut(frame):
    lost = (frame.reward <= 0) & (frame["sample"] < 6)
    frame["ending"], frame["answer"] = np.where(lost, "unfinished", "model"), frame.answer.mask(lost)


LATE = lambda frame: frame.step > STEPS - 5  # noqa: E731
FALLING = np.geomspace(1.0, 0.01, STEPS)
PLANTED = {
    "all rollouts wrong": column("reward", 0.0),
    "all rollouts right": column("reward", 1.0, LATE),
    "few groups train the policy": set_steps(equal_share=0.9),
    "no progress": set_steps(reward=0.3 + 0.01 * np.sin(np.arange(STEPS))),
    "reward up, held-out flat": set_steps(held_out=0.25 + 0.005 * np.cos(np.arange(STEPS))),
    "progress within noise": set_steps(held_out=0.3 + 0.05 * np.sin(2.1 * np.arange(STEPS))),
    "entropy collapse": set_steps(entropy=FALLING),
    "entropy explosion": set_steps(entropy=np.geomspace(0.3, 6, STEPS)),
    "length collapse": set_steps(response_tokens=200 * FALLING),
    "length growth": set_steps(
        response_tokens=200 * np.geomspace(1, 8, STEPS), reward=0.3 + 0.04 * np.sin(np.arange(STEPS))
    ),
    "gradient spikes": set_steps(grad_norm=[0.5] * (STEPS - 1) + [80.0]),
    "clipping of most tokens": set_steps(clip_share=[0.02] * (STEPS - 2) + [0.5] * 2),
    "engine and trainer disagree": set_steps(mismatch=0.2),
    "mismatch grows": set_steps(mismatch=np.geomspace(1e-4, 0.04, STEPS)),
    "importance weights far from 1": set_steps(ratio_max=1e5),
    "no gradient": set_steps(grad_norm=0.0),
    "learning rate too small": set_steps(lr=1e-10),
    "truncation": column("truncated", True, LATE),
    "truncation jumps after an update": column("truncated", True, LATE),
    "truncated rollouts are rewarded": column(
        "truncated", True, lambda frame: (frame.reward > 0) & (frame["sample"] < 4)
    ),
    "answers in another format": column("answer", None, lambda frame: frame.reward <= 0),
    "right answers get no reward": column("answer", "$42$", lambda frame: frame["sample"] < 4),
    "true answers look wrong": set_rollouts(some_truths),
    "wrong answers are rewarded": column("answer", "41 or 42", lambda frame: frame["sample"] < 4),
    "tools are not used": column("calls", 0, LATE),
    "most tool calls fail": column("errors", 1),
    "tools fail through our fault": set_rollouts(some_outcomes),
    "an engine produces nothing": column("engine", "vllm-0", LATE),
    "an engine is slow": column("generate_s", 9.0, lambda frame: frame.engine == "vllm-1"),
    "advantages have the wrong sign": set_rollouts(lambda frame: frame.__setitem__("advantage", -frame.advantage)),
    "rollouts are old": set_steps(staleness=8.0),
    "waiting for tools": column("queue_s", 5.0),
    "environments fail": column("stop_reason", "environment_error", lambda frame: frame["sample"] == 7),
    "requests to engines fail": column("stop_reason", "engine_error", lambda frame: frame["sample"] == 7),
    "the engine returns no log-probs": column("engine_log_prob", 0.0),
    "updates change nothing": set_steps(kl_k3=1e-12, ratio_max=1.0 + 1e-7),
    "updates are too large": set_steps(kl_k3=0.8),
    "the KL to the reference explodes": set_steps(kl=np.geomspace(1e-3, 50, STEPS)),
    "an update moves the policy too far": set_steps(update_kl=np.geomspace(0.001, 5, STEPS)),
    "the reward collapses": set_steps(reward=0.5 * np.linspace(1, 0, STEPS)),
    "the held-out score never changes": set_steps(held_out=0.375),
    "a metric stops changing": set_steps(entropy=[0.8, 0.7, 0.75, 0.71, 0.69, 0.66] + [0.65] * (STEPS - 6)),
    "the policy goes back": set_steps(
        reward=np.tile(np.linspace(0.1, 0.7, STEPS // 2), 2), entropy=np.tile(np.linspace(0.9, 0.3, STEPS // 2), 2)
    ),
    "steps become slow": set_steps(step_s=np.geomspace(10, 300, STEPS)),
    "the gradient grows": set_steps(grad_norm=np.geomspace(0.5, 500, STEPS)),
    "a metric is not finite": lambda log: replace(log, not_finite={"grad_norm": [9, 10, 11, 12]}),
    "a metric has an impossible value": set_steps(entropy=-0.8),
    "advantages do not follow the rewards": set_rollouts(
        lambda frame: frame.__setitem__("advantage", np.roll(frame.advantage, 3))
    ),
    "the baseline is wrong": set_rollouts(
        lambda frame: frame.__setitem__(
            "advantage", frame.advantage + frame.groupby("group_id").reward.transform("mean")
        )
    ),
    "rollouts have no score": column("reward", np.nan, lambda frame: frame["sample"] == 3),
    "the grader fails at some steps": column("reward", 0.0, lambda frame: frame.step.isin([5, 6])),
    "the sampler repeats a few problems": set_rollouts(stuck),
    "rollouts end without a last turn": set_rollouts(cut),
    "the scale of the reward changes": set_rollouts(
        lambda frame: frame.__setitem__("reward", frame.reward.where(frame.step < 7, 10 * frame.reward - 5))
    ),
    "the reward measures the length": set_rollouts(length_as_reward),
    "rollouts without an answer are rewarded": column(
        "answer", None, lambda frame: (frame.reward > 0) & (frame["sample"] < 3)
    ),
    "lists of answers are rewarded": column(
        "candidates", 9.0, lambda frame: (frame.reward > 0) & (frame["sample"] < 3)
    ),
    "equal answers have different rewards": set_rollouts(
        lambda frame: frame.__setitem__("reward", np.roll(frame.reward, 3))
    ),
    "log-probs are impossible": column("engine_log_prob", 0.3, lambda frame: frame["sample"] < 3),
    "the SFT loss does not fall": lambda log: sft_log([6.9] * 6),
    "the SFT loss rises": lambda log: sft_log([6.8, 6.5, 4.9, 21.8, 12.5, 5.0, 3.0]),
}


def sft_log(losses):
    return Log(
        "sft", "test", pd.DataFrame({"step": range(1, len(losses) + 1), "loss": losses}), honest().rollouts.head(0)
    )


@pytest.mark.parametrize(
    "losses", [[6.8, 6.1, 5.2, 3.1, 2.4, 2.6, 2.2], [1.2, 1.5, 1.1, 1.6, 1.0, 1.4, 0.9], [6.8, 2.2]]
)
def test_an_honest_sft_has_no_finding(losses):
    diagnosis = diagnose([sft_log(losses)])
    assert diagnosis.findings == [] and "rules; `rstar-lab doctor PATH --json` names them" in diagnosis.to_text()


def names(log: Log) -> set[str]:
    return {finding.rule.name for finding in diagnose([log]).findings}


@pytest.mark.parametrize("seed", range(6))
def test_an_honest_run_has_no_finding(seed):
    assert names(honest(seed)) == set()
    one_update = replace(PLANTED["updates change nothing"](honest()), mini_batches=1)
    assert names(one_update) == set(), "it does not move the policy within the step"
    next_stage = column("stage", "next", LATE)(column("truncated", True, LATE)(honest(seed)))  # has limits of its own
    assert "truncation jumps after an update" not in names(next_stage)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_with_evidence(fault):
    log = PLANTED[fault](honest())
    if fault == "answers in another format":
        log = column("reward", 0.0, lambda frame: frame["sample"] > 1)(log)
        log = column("answer", None, lambda frame: frame.reward <= 0)(log)
    diagnosis = diagnose([log])
    (finding,) = [found for found in diagnosis.findings if found.rule.name == fault]
    assert finding.evidence.text and 0 < finding.evidence.cost <= 1
    assert 0 <= finding.measured[0] <= finding.measured[1]
    assert finding.evidence.steps or finding.evidence.trajectories, "something to open"
    assert set(finding.evidence.trajectories) <= set(log.rollouts.traj_id)
    json.dumps(diagnosis.as_dict(), allow_nan=False)


def test_every_rule_without_texts_has_a_planted_fault():
    assert {rule.name for rule in RULES if not {"texts", "tokens", "reward_parts"} & set(rule.reads)} == set(PLANTED)
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.cause and rule.remedy and rule.source and rule.reads for rule in RULES)


def test_the_page_lists_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = page.split("<!-- rules -->")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    listed = [(name, columns) for columns, names in cells for name in names.split("; ")]
    read = lambda rule: ", ".join(column.partition(".")[2] or column for column in rule.reads)  # noqa: E731
    assert sorted(listed) == sorted((rule.name, read(rule)) for rule in RULES)


def write_verl(folder: Path, change=lambda row, step, i: row, steps: int = 6) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        lines = []
        for i in range(32):
            right = rng.random() < 0.3 + 0.05 * step
            words = " ".join(str(number) for number in rng.integers(0, 1000, 12))
            row = {
                "input": f"What is {i // 8 + step * 4} + 1?", "output": f"{words} so <answer>{7 if right else 8}</answer>",
                "gts": "7", "score": float(right), "step": step, "pred": "7" if right else "8",
            }  # fmt: skip
            lines.append(json.dumps(change(row, step, i)))
        (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


TEXT_FAULTS = {
    "empty rollouts count as failures": lambda row, step, i: row | ({"output": "", "score": 0.0} if i % 4 == 0 else {}),
    "control tokens in the text": lambda row, step, i: row | {"output": row["output"] + "<|im_start|>" * (i % 3 == 0)},
}


def test_dumps_of_verl_are_healthy_unless_their_texts_have_a_fault(tmp_path):
    diagnosis = doctor(write_verl(tmp_path / "dump"))
    assert [log.source for log in diagnosis.logs] == ["verl"] and diagnosis.findings == []
    for n, (fault, change) in enumerate(TEXT_FAULTS.items()):
        assert fault in {finding.rule.name for finding in doctor(write_verl(tmp_path / str(n), change)).findings}
    assert "rollouts are old" in diagnosis.unchecked and diagnosis.unchecked["rollouts are old"] == ["staleness"]


def test_no_answers_are_read_if_the_reward_has_parts(tmp_path):
    def change(row, step, i):
        return {k: v for k, v in row.items() if k != "pred"} | {"score": row["score"] + 0.1 * (i % 3)}

    log = doctor(write_verl(tmp_path / "dump", change)).logs[0]
    assert log.rollouts.answer.isna().all() and any("more than four values" in note for note in log.notes)


def event(step: int, **values: float) -> bytes:
    """Return one record of a TensorBoard file."""
    summary = Summary(
        value=[Summary.Value(tag=tag.replace("__", "/"), simple_value=own) for tag, own in values.items()]
    )
    stream = io.BytesIO()
    RecordWriter(stream).write(Event(step=step, summary=summary).SerializeToString())
    return stream.getvalue()


def test_tensorboard_events_are_read_up_to_a_torn_record(tmp_path):
    data = b"".join(event(step, actor__entropy=0.9 * 0.5**step) for step in range(1, 10))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(data + event(10, actor__entropy=1.0)[:-6])
    diagnosis = doctor(tmp_path)
    assert [finding.rule.name for finding in diagnosis.findings] == ["entropy collapse"]
    assert diagnosis.logs[0].steps.step.tolist() == list(range(1, 10))


def test_metrics_that_no_rule_reads_are_counted(tmp_path):
    rows = [
        {"_step": step, "actor/entropy": 0.9 * 0.5**step, "actor/grad_norm": 0.0, "own/x": 1.0} for step in range(1, 9)
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run-1.wandb").write_bytes(b":W&B")
    diagnosis = doctor(tmp_path)
    assert {finding.rule.name for finding in diagnosis.findings} == {"entropy collapse", "no gradient"}
    assert diagnosis.logs[0].steps.step.tolist() == list(range(1, 9))
    assert "1 of 3 metrics are read by no rule, such as own/x" in diagnosis.to_text()
    with pytest.raises(UserError, match=r"run-1\.wandb: not read; write the rows of wandb\.Api\(\)"):
        doctor(tmp_path / "run-1.wandb")


def test_rollouts_of_prime_rl_are_read(tmp_path):
    for step in range(1, 7):
        folder = tmp_path / "prime" / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True)
        rows = [
            {"prompt": f"q{i // 4}", "completion": [{"role": "assistant", "content": f"text {step} {i}"}], "answer": "7",
             "example_id": i // 4, "reward": 0.0} for i in range(16)
        ]  # fmt: skip
        (folder / "train_rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{torn")
    diagnosis = doctor(tmp_path / "prime")
    assert diagnosis.findings[0].rule.name == "all rollouts wrong" and diagnosis.logs[0].source == "prime-rl"
    assert len(diagnosis.logs[0].rollouts) == 96 and diagnosis.logs[0].rollouts.step.nunique() == 6
    assert "left out: 1 line without a JSON object, first line 17" in diagnosis.to_text()
    assert diagnosis._repr_html_().count(diagnosis.verdict) == 1, "a notebook shows the first sentence once"


def test_a_reward_that_rises_through_its_format_only_is_named(tmp_path):
    rows = [
        {"step": step, "prompt": f"q{i // 8}", "completion": f"text {step} {i} of several more words here",
         "format": float(i % 12 < step), "correct": float(i % 3 == 0)}
        for step in range(1, 13) for i in range(24)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    (finding,) = [f for f in doctor(tmp_path).findings if f.rule.name == "only a side reward rises"]
    assert finding.evidence.numbers["format"] > 0.5 and abs(finding.evidence.numbers["correct"]) < 0.01
    for row in rows:
        row["correct"], row["format"] = row["format"], 0.5 + 0.5 * (row["step"] % 2)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    assert "only a side reward rises" not in {f.rule.name for f in doctor(tmp_path).findings}


def test_files_of_several_runs_are_never_mixed(tmp_path):
    for name, factor in (("falls", 0.5), ("steady", 1.0)):
        (tmp_path / "events" / name).mkdir(parents=True)
        lines = b"".join(event(step, actor__entropy=0.9 * factor**step) for step in range(1, 10))
        (tmp_path / "events" / name / "events.out.tfevents.1.host").write_bytes(lines)
    diagnosis = doctor(tmp_path / "events")
    assert sorted(log.name for log in diagnosis.logs) == ["falls", "steady"]
    assert [(f.rule.name, f.run) for f in diagnosis.findings] == [("entropy collapse", "falls")]
    write_verl(tmp_path / "projects" / "good" / "rollouts")
    write_verl(tmp_path / "projects" / "bad" / "rollouts", lambda row, step, i: row | {"score": 0.0})
    for name in ("good", "bad"):
        lines = [json.dumps({"step": step, "data": {"actor/grad_norm": float(name == "good")}}) for step in range(1, 7)]
        (tmp_path / "projects" / name / "metrics.jsonl").write_text("\n".join(lines))
    logs = {log.name: log for log in doctor(tmp_path / "projects").logs}
    assert set(logs) == {"good-rollouts", "bad-rollouts"}
    assert logs["good-rollouts"].steps.grad_norm.min() == 1 and logs["bad-rollouts"].steps.grad_norm.max() == 0
    for step in (3, 6):  # the state of a later checkpoint repeats that of an earlier one
        (tmp_path / "trl" / f"checkpoint-{step}").mkdir(parents=True)
        state = {"log_history": [{"step": n, "reward": 0.1 * n, "grad_norm": 1.0} for n in range(1, step + 1)]}
        (tmp_path / "trl" / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    (log,) = doctor(tmp_path / "trl").logs
    assert log.steps.step.tolist() == [1, 2, 3, 4, 5, 6]


def test_what_is_understood_in_part_is_read_with_a_note(tmp_path):
    lines = (write_verl(tmp_path / "whole") / "1.jsonl").read_text().splitlines()
    (tmp_path / "torn.jsonl").write_text("\n".join([*lines[:20], lines[20][:30]]))
    diagnosis = doctor(tmp_path / "torn.jsonl")
    assert len(diagnosis.logs[0].rollouts) == 20
    assert "torn.jsonl: left out: 1 line without a JSON object, first line 21" in diagnosis.to_text()
    mixed = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "reward": 1}]
    mixed += [{"messages": "none"}, {"messages": [{"role": "user"}], "reward": 1}, {**mixed[0], "reward": "high"}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    assert "mixed.jsonl: left out: 2 rows" in doctor(tmp_path / "mixed.jsonl").to_text()
    for name in ("prompts", "gz"):
        (tmp_path / name).mkdir()
        for file in (tmp_path / "whole").glob("*.jsonl"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            renamed = [{"prompts": row["input"], "responses": row["output"], "ground_truth": row["gts"],
                        "reward": row["score"], "global_step": row["step"]} for row in rows]  # fmt: skip
            text = "\n".join(json.dumps(row) for row in (rows if name == "gz" else renamed))
            if name == "gz":
                (tmp_path / name / f"{file.name}.gz").write_bytes(gzip.compress(text.encode()))
            else:
                (tmp_path / name / file.name).write_text(text)
        (log,) = doctor(tmp_path / name).logs
        assert len(log.rollouts) == 192 and log.rollouts.reward.notna().all() and log.rollouts.truth.eq("7").all()
        assert log.rollouts.step.nunique() == 6
    (tmp_path / "sharegpt.jsonl").write_text(json.dumps({"conversations": [], "id": 3}))
    with pytest.raises(
        UserError, match=r"no log was recognised \(.*keys conversations, id\)\. The doctor reads .*TensorBoard"
    ):
        doctor(tmp_path / "sharegpt.jsonl")


def test_rollouts_of_a_finding_are_named_by_line_and_can_be_opened(tmp_path):
    diagnosis = doctor(write_verl(tmp_path / "dump", TEXT_FAULTS["empty rollouts count as failures"]))
    (number,) = [n for n, f in enumerate(diagnosis.findings, 1) if f.rule.name == "empty rollouts count as failures"]
    assert diagnosis.findings[number - 1].evidence.trajectories[0].startswith("dump/000006/6.jsonl:")
    opened = diagnosis.inspect(number).rows()
    assert set(opened.traj_id) == set(diagnosis.findings[number - 1].evidence.trajectories)
    with pytest.raises(UserError, match="finding 9 does not exist"):
        diagnosis.inspect(9)


def test_lost_compute_is_given_in_gpu_hours_and_money(tmp_path):
    log = honest()
    log = replace(log, rollouts=log.rollouts.assign(kept=True), steps=log.steps.assign(generate_s=3600.0))
    hardware = load_profile("h100x8").hardware.model_copy(update={"price_per_gpu_hour": 2.0})
    diagnosis = diagnose([log], hardware=hardware)
    share = sum(diagnosis.waste["honest"].values())
    assert 0 < share < 1
    lost = {"hours": 12 * share, "gpu_hours": 96 * share, "cost": 192 * share}
    assert diagnosis.lost["honest"] == pytest.approx(lost)
    assert "GPU-hours, cost" in diagnosis.to_text() and diagnosis.as_dict()["lost"]["honest"]["cost"] > 0
    assert diagnose([log]).lost["honest"] == pytest.approx({"hours": 12 * share})


def test_the_golden_run_is_healthy_and_its_waste_is_counted():
    diagnosis = doctor(GOLDEN / "tiny_fast-rl")
    assert diagnosis.findings == [] and len(diagnosis.to_text()) < 1000 and diagnosis.to_text().count("Judged") == 1
    (waste,) = diagnosis.waste.values()
    assert 0 < waste["groups with equal rewards"] < 1 and sum(waste.values()) < 1
    assert doctor(GOLDEN).unchecked["only a side reward rises"] == ["reward_parts"], "an SFT log has no rewards"
    assert diagnose([sft_log([6.8, 6.1])]).too_few["no progress"] == "rollouts that train a policy"


def test_the_command_prints_json_writes_html_and_has_an_exit_code(tmp_path):
    bad = write_verl(tmp_path / "bad", lambda row, step, i: row | {"score": 0.0})
    ran = CliRunner().invoke(app, ["doctor", str(bad), "--json", "--html", str(tmp_path / "page.html")])
    result = json.loads(ran.stdout)
    assert ran.exit_code == 1 and result["fault_found"] and result["findings"][0]["rule"] == "all rollouts wrong"
    assert {"cause", "evidence", "remedy", "steps", "trajectories", "confidence"} <= set(result["findings"][0])
    assert "<script" not in (tmp_path / "page.html").read_text()
    assert CliRunner().invoke(app, ["doctor", str(GOLDEN / "tiny_fast-rl")]).exit_code == 0
    (tmp_path / "empty").mkdir()
    unknown = CliRunner().invoke(app, ["doctor", str(tmp_path / "empty")])
    assert unknown.exit_code == 2 and "no log was recognised" in unknown.output
    (tmp_path / "empty" / "log.jsonl").write_text('{"foo": 1}')
    unknown = CliRunner().invoke(app, ["doctor", str(tmp_path / "empty")])
    assert unknown.output.count("\n") == 1
    assert "(log.jsonl: not understood; the first row has the keys foo)" in unknown.output


def test_text_of_a_log_is_never_markup_or_a_control_sequence(tmp_path):
    nasty = "<script>alert(1)</script>\x1b]0;title\x07[/x]"
    texts = lambda row, step, i: row | {"score": 0.0, "input": nasty + row["input"], "output": nasty}  # noqa: E731
    bad = write_verl(tmp_path / "bad", texts)
    page = doctor(bad).to_html()
    assert "<script>" not in page
    assert "\x1b" not in CliRunner().invoke(app, ["doctor", str(bad)]).stdout


def check_always(log: Log) -> Evidence:
    return Evidence("seen", {"one": 1.0})


OWN = Rule("mine", ("steps.reward",), "my cause", "my remedy", "mine", check_always)


def test_a_rule_of_the_user_is_applied(tmp_path):
    found = doctor(write_verl(tmp_path / "dump"), rules=[f"{__name__}:OWN"]).findings
    assert [finding.rule.name for finding in found] == ["mine"]
    with pytest.raises(UserError, match="--rule: nowhere:RULE: no module nowhere"):
        doctor(GOLDEN / "tiny_fast-rl", rules=["nowhere:RULE"])
