"""Tests of the import of verl, TRL, OpenAI-style and inspect_ai rollouts."""

import json
import re

import pandas as pd
import pytest

from rstar_lab.analysis import failed_rollouts, inspect, watch
from rstar_lab.analysis.inspector.transcript import segments
from rstar_lab.analysis.metrics import measure
from rstar_lab.analysis.report import report_html
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.exchange.importers import _score_number, import_inspect, import_messages, import_trl, import_verl
from rstar_lab.runs import RunStoreError


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def value(runs, name):
    return measure(runs, [name])["value"][0]


def test_verl_dump_becomes_steps_of_groups(tmp_path):
    for step in (2, 10):
        rows = [
            {"input": f"q{i // 2}", "output": f"answer {i}", "gts": "7", "score": float(i % 2), "step": step, "acc": 1}
            for i in range(4)
        ]
        jsonl(tmp_path / "dump" / f"{step}.jsonl", rows)
    run = import_verl(tmp_path / "dump", tmp_path / "runs", run_id="verl")
    runs = open_runs(run)
    rows = runs.trajectories(order_by="traj_id")
    assert rows.step.tolist() == [2] * 4 + [10] * 4
    assert rows.groupby(["step", "group_id"]).size().tolist() == [2] * 4
    assert rows.problem_id.nunique() == 2 and rows["sample"].tolist() == [0, 1] * 4
    assert (value(runs, "pass1"), rows.truth.unique().tolist()) == (0.5, ["7"])
    assert runs.transcript(rows.traj_id[1]).content.tolist() == ["q0", "answer 1"]
    for name in ("tool_error_rate", "response_tokens", "entropy", "truncation_rate"):
        assert pd.isna(value(runs, name)), name
    assert runs.runs().kind[0] == "import"
    with pytest.raises(RunStoreError, match="exists already"):
        import_verl(tmp_path / "dump", tmp_path / "runs", run_id="verl")


CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call>'


@pytest.mark.parametrize("special_tokens", [False, True])
def test_verl_multi_turn_output_is_split_into_turns_and_calls(tmp_path, special_tokens):
    """The dump contains text that verl decodes, with or without special tokens."""
    end, start = ("<|im_end|>", "<|im_start|>") if special_tokens else ("", "")
    response = (
        f"Let me check.\n{CALL}\n{CALL}{end}\n{start}user\n<tool_response>\n1\n</tool_response>\n<tool_response>\nerror:"
        f" user\n</tool_response>{end}\n{start}assistant\nWait, that is wrong.\n{CALL}{end}\n{start}user\n"
        f"<tool_response>\n2\n</tool_response>{end}\n{start}assistant\nThe user is right: 2{end}"
    )
    cut = f"once\n{CALL}{end}\n{start}user\n<tool_response>\n3"
    rows = [{"input": "q", "output": text, "gts": "2", "score": 1.0, "step": 1, "acc": 1.0} for text in (response, cut)]
    runs = open_runs(import_verl(jsonl(tmp_path / "1.jsonl", rows), tmp_path / "runs", run_id="v"))
    found = runs.trajectories(order_by="sample")
    assert found.turns.tolist() == [3, 1] and found.calls.tolist() == [3, 1]
    assert found.reflection_tokens.tolist() == [3, 0]  # check, wait, wrong; tool output does not count
    assert found.outcomes.isna().all() and found.errors.isna().all()
    transcript = runs.transcript(found.traj_id[0])
    assert transcript.role.tolist() == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert transcript.content.tolist()[2:5] == ["1", "error: user", f"Wait, that is wrong.\n{CALL}"]
    assert transcript.content.tolist()[6] == "The user is right: 2"
    assert transcript.tool.dropna().tolist() == ["run"] * 3
    assert runs.transcript(found.traj_id[1]).content.tolist()[2] == "3"
    assert runs.calls({"traj_id": found.traj_id[0]}).turn.tolist() == [0, 0, 1]
    assert runs.rewards().acc.tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_file_written_by_verl_is_imported(tmp_path):
    trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    extra = {"acc": [1.0, 0.0], "pred": ["2", "3"]}
    outputs = [f"a\n{CALL}\nuser\n<tool_response>\n1\n</tool_response>\nassistant\nb", "c"]
    trainer.RayPPOTrainer._write_generations(["q", "q"], outputs, ["2", "2"], [1.0, 0.0], extra, str(tmp_path / "d"), 7)
    rows = open_runs(import_verl(tmp_path / "d", tmp_path / "runs")).trajectories(order_by="sample")
    assert rows.step.tolist() == [7, 7] and rows.turns.tolist() == [2, 1] and rows.calls.tolist() == [1, 0]
    assert rows.answer.tolist() == ["2", "3"] and rows.reward.tolist() == [1.0, 0.0]


def test_bad_row_is_named_and_nothing_is_written(tmp_path):
    path = jsonl(tmp_path / "1.jsonl", [{"input": "q", "output": "a", "score": 1.0}, {"input": "q", "score": 0.0}])
    with pytest.raises(UserError, match=r"1.jsonl, line 2: field 'output' is missing"):
        import_verl(path, tmp_path / "runs")
    path.write_text('{"input": "q"\n')
    with pytest.raises(UserError, match=r"1.jsonl, line 1: not JSON"):
        import_verl(path, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"no .jsonl files"):
        import_verl(tmp_path / "nowhere", tmp_path / "runs")


def test_trl_completions_keep_all_reward_columns(tmp_path):
    table = {
        "step": [1, 1, 2],
        "prompt": ["2+2?", "2+2?", "3+3?"],
        "completion": ["4", "5", "6"],
        "accuracy_reward": [1.0, 0.0, 1.0],
        "advantage": [0.7, -0.7, 0.0],
    }
    (tmp_path / "c").mkdir()
    pd.DataFrame(table).to_parquet(tmp_path / "c" / "completions_00002.parquet")
    runs = open_runs(import_trl(tmp_path / "c", tmp_path / "runs", run_id="trl"))
    rows = runs.trajectories(order_by="traj_id")
    assert rows.reward.tolist() == [1.0, 0.0, 1.0] and rows.advantage[1] == pytest.approx(-0.7)
    assert rows.truth.isna().all()
    prompts = [[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]] * 3
    completions = [[{"role": "assistant", "content": "a"}]] * 3
    chat = pd.DataFrame(table | {"prompt": prompts, "completion": completions, "format_reward": [0.5] * 3})
    chat.to_parquet(tmp_path / "chat.parquet")
    with pytest.raises(UserError, match="reward columns accuracy_reward, format_reward: choose one with reward="):
        import_trl(tmp_path / "chat.parquet", tmp_path / "runs")
    runs = open_runs(import_trl(tmp_path / "chat.parquet", tmp_path / "runs", reward="format_reward"))
    assert runs.runs().run_id[0] == "chat"
    assert runs.transcript("chat/000001/0").role.tolist() == ["system", "user", "assistant"]
    assert value(runs, "reward") == 0.5
    assert runs.rewards().set_index("traj_id").loc["chat/000001/0"].to_dict() == {
        "accuracy_reward": 1.0, "format_reward": 0.5, "run_id": "chat"
    }  # fmt: skip
    assert runs.sql("SELECT avg(accuracy_reward) AS mean FROM rewards")["mean"][0] == pytest.approx(2 / 3)


def test_trl_rows_of_several_completions_and_without_one_are_read(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [
        {"step": 1, "prompt": chat, "completion": ["a", "b"], "accuracy": [1.0, 0.0]},
        {"step": 1, "prompt": chat, "completion": None, "accuracy": None},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "completions_1.parquet")
    runs = open_runs(import_trl(tmp_path, tmp_path / "runs", run_id="t"))
    found = runs.trajectories(order_by="traj_id")
    assert found.reward.tolist()[:2] == [1.0, 0.0] and found.turns.tolist() == [1, 1, 0]
    assert [runs.transcript(one).content.tolist() for one in found.traj_id] == [
        ["s", "q", *text] for text in ("a", "b", "")
    ]


def test_openai_messages_keep_calls_and_given_outcomes(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"code": "print(1)"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "done"},
    ]
    with_outcomes = [message | ({"outcome": "timeout"} if message["role"] == "tool" else {}) for message in messages]
    rows = [
        {"messages": messages, "problem_id": "p", "reward": 1},
        {"messages": with_outcomes, "problem_id": "p", "score": 0, "answer": 3, "truth": 4},
    ]
    runs = open_runs(import_messages(jsonl(tmp_path / "chat.jsonl", rows), tmp_path / "runs"))
    found = runs.trajectories(order_by="sample")
    assert found.calls.tolist() == [1, 1] and found.turns.tolist() == [2, 2]
    assert pd.isna(found.errors[0]) and found.errors[1] == 1
    assert found.answer.tolist()[1] == "3" and found.truth.tolist()[1] == "4"
    assert value(runs, "tool_error_rate") == 1.0
    assert runs.calls().to_dict("records")[0]["tool"] == "run"
    transcript = runs.transcript(found.traj_id[0])
    assert transcript.content[0] == "go[image_url]" and '"code": "print(1)"' in transcript.content[1]
    cut = [{"messages": rows[1]["messages"][:2]}, {"messages": [*with_outcomes, messages[1]]}]
    found = open_runs(import_messages(jsonl(tmp_path / "cut.jsonl", cut), tmp_path / "runs")).trajectories(
        order_by="traj_id"
    )
    assert found.calls.tolist() == [1, 2] and found.errors.isna().all(), "a last call without a result counts"
    text = import_messages(jsonl(tmp_path / "text.jsonl", [{"messages": json.dumps(messages)}]), tmp_path / "runs")
    assert open_runs(text).trajectories().turns.tolist() == [2]
    for given, words in (
        ([{"content": "x"}], "a message has no role"),
        ([messages], "field 'messages' is not a list of messages"),
    ):
        with pytest.raises(UserError, match=rf"bad.jsonl, line 1: {words}"):
            import_messages(jsonl(tmp_path / "bad.jsonl", [{"messages": given}]), tmp_path / "runs")


@pytest.mark.slow
def test_inspect_log_keeps_scores_outcomes_and_token_usage(tmp_path):
    pytest.importorskip("inspect_ai")
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, write_eval_log
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser, ModelUsage
    from inspect_ai.scorer import Score
    from inspect_ai.tool import ToolCall, ToolCallError

    def sample(number, value, **more):
        call = ToolCall(id="x", function="python", arguments={"code": "1"})
        messages = [
            ChatMessageUser(content=f"what is {number}?"),
            ChatMessageAssistant(content="let me see", tool_calls=[call]),
            ChatMessageTool(content="out", function="python", tool_call_id="x"),
            ChatMessageTool(content="", function="python", tool_call_id="x", error=ToolCallError("timeout", "slow")),
        ]
        scores = {"match": Score(value=value, answer="4")} if value else {}
        fields = {"id": f"s{number}", "epoch": 1, "input": f"what is {number}?", "target": "4"}
        usage = {"some/model": ModelUsage(input_tokens=50, output_tokens=20 + number, total_tokens=70 + number)}
        return EvalSample(**fields, messages=messages, scores=scores, model_usage=usage, **more)

    spec = EvalSpec(
        created="2026-01-01T00:00:00+00:00", task="t", dataset=EvalDataset(), model="some/model", config=EvalConfig()
    )
    log = EvalLog(eval=spec, status="success", samples=[sample(0, "C"), sample(1, "I"), sample(2, None)])
    path = tmp_path / "log.eval"
    write_eval_log(log, str(path))
    runs = open_runs(import_inspect(path, tmp_path / "runs"))
    rows = runs.trajectories(order_by="problem_id")
    assert rows.problem_id.tolist() == ["s0", "s1", "s2"] and rows.reward.tolist()[:2] == [1.0, 0.0]
    assert pd.isna(rows.reward[2]) and pd.isna(rows.response_tokens[0])
    assert rows.outcomes.map(list).tolist() == [["ok", "timeout"]] * 3
    assert rows.engine.unique().tolist() == ["some/model"] and rows.truth.tolist() == ["4"] * 3
    assert value(runs, "tool_error_rate") == 0.5
    assert rows.model_tokens.tolist() == [20, 21, 22] and rows.turns.tolist() == [1, 1, 1]
    assert runs.transcript(rows.traj_id[0]).role.tolist() == ["user", "assistant", "tool", "tool"]
    with pytest.raises(UserError, match="has no scorer 'f1'; it has match"):
        import_inspect(path, tmp_path / "runs", run_id="other", scorer="f1")
    (tmp_path / "torn.eval").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(UserError, match="is not an inspect_ai log"):
        import_inspect(tmp_path / "torn.eval", tmp_path / "runs")


def test_rollouts_without_a_reward_are_neither_right_nor_wrong(tmp_path):
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": conversation, "reward": reward} for reward in (None, 1, 0)]
    run = import_messages(jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "runs")
    runs = open_runs(run)
    assert runs.trajectories().correct.astype(object).tolist() == [pd.NA, True, False]
    assert (runs.count({"correct": True}), runs.count({"correct": False}), runs.count({"reward": None})) == (1, 1, 1)
    assert value(runs, "pass1") == 0.5 and list(failed_rollouts(runs).kind) == ["no answer"]
    inspector = inspect(runs)
    choices = inspector.source.choices()
    assert choices["unscored"] and not choices["own_reward"]
    pages = [inspector.markdown(traj_id) for traj_id in runs.trajectories(columns=["traj_id"]).traj_id]
    assert ["**not scored**" in page for page in pages] == [True, False, False]
    assert not any("dropped" in page or "selection not recorded" in page for page in pages)
    assert "1 of 2 correct, 1 not scored" in inspector.markdown(runs.trajectories().traj_id[0])
    page = report_html(run)
    assert "None tokens" not in page and not re.search(r"\bnan\b", page.split("<script>")[0])


def test_calls_as_text_and_as_parts_of_anthropic_are_calls(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
    use = {"type": "tool_use", "id": "c", "name": "python", "input": {"code": "1"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]}
    rows = [
        [{"role": "assistant", "content": "x", "tool_calls": json.dumps([call])}, {"role": "tool", "content": "2"}],
        [
            {"role": "assistant", "content": [{"type": "text", "text": "x"}, use]},
            {"role": "user", "content": [result]},
        ],
        [
            {"role": "assistant", "content": 'x<|python_tag|>{"name": "python", "parameters": {"code": "1"}}'},
            {"role": "ipython", "content": "2"},
        ],
    ]
    file = tmp_path / "chats.jsonl"
    lines = "\n".join(json.dumps({"messages": messages}) for messages in rows)
    file.write_text("\ufeff" + lines, encoding="utf-8")
    runs = open_runs(import_messages(file, tmp_path / "runs"))
    for traj_id in runs.trajectories().traj_id:
        parts = segments(runs.record(traj_id))
        assert [(part.kind, part.text) for part in parts] == [("text", "x"), ("code", "1"), ("tool", "2")]
    assert runs.trajectories().calls.tolist() == [1, 1, 1]


def test_two_rows_with_one_id_are_two_trajectories(tmp_path):
    rows = [{"id": "p1", "messages": [{"role": "user", "content": text}]} for text in ("first", "second")]
    runs = open_runs(import_messages(jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "runs"))
    ids = runs.trajectories().traj_id
    assert ids.is_unique and {runs.transcript(traj_id).content[0] for traj_id in ids} == {"first", "second"}


@pytest.mark.parametrize(
    "score, reward",
    [("C", 1), ("I", 0), ("P", 0.5), ("N", 0), (True, 1), (0.25, 0.25), ("0.5", 0.5), (float("nan"), None),
     ({"a": 1.0, "b": 0.0}, None), ([1, 0], None), ("excellent", None), (None, None)],
)  # fmt: skip
def test_a_score_that_is_not_one_number_is_no_reward(score, reward):
    assert _score_number(score) == reward


def test_the_live_page_shows_a_run_whose_only_step_is_0(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "q"}]}]
    run = import_messages(jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "runs")
    assert watch(run).refresh() == "finished"
