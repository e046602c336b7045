"""Rollouts leave a run and come back without loss; training data are exactly what was sampled."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers.analysis_runs import make_run

from rstar_lab.analysis import (
    curves,
    export_atif,
    export_preferences,
    export_sft,
    import_atif,
    import_messages,
    inspect,
    open_runs,
)
from rstar_lab.analysis.report import report_html
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.rl.renderers.conversations import read_conversations
from rstar_lab.runs import CALLS, TRAJECTORIES, TRANSCRIPTS
from rstar_lab.runs.reader import RunReader

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"
PLACE = {"run_id", "attempt"}


def rows(path, level, schema):
    names = [name for name in schema.names if name not in PLACE]
    order = "traj_id" if level != "calls" else 'traj_id, turn, "index"'
    quoted = ", ".join(f'"{name}"' for name in names)
    found = open_runs(path).arrow(f"SELECT {quoted} FROM {level} ORDER BY {order}").to_pylist()
    for row in found:
        if "messages" in row:
            row["messages"] = [{k: v for k, v in m.items() if v is not None} for m in json.loads(row["messages"])]
    return [repr(row) for row in found]  # NaN is equal to itself


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "runs", "tiny-rl", steps=2)


def test_a_round_trip_through_atif_keeps_everything(run_dir, tmp_path):
    runs = open_runs(run_dir)
    exported = export_atif(runs, tmp_path / "atif")
    assert exported.written == len(runs.trajectories()) and not exported.left_out
    back = import_atif(tmp_path / "atif", tmp_path / "other")
    assert back.name == "tiny-rl"
    for level, schema in (("trajectories", TRAJECTORIES), ("transcripts", TRANSCRIPTS), ("calls", CALLS)):
        assert rows(back, level, schema) == rows(run_dir, level, schema), level
    traj_id = runs.trajectories().traj_id[0]
    assert list(open_runs(back).tokens(traj_id).text) == list(runs.tokens(traj_id).text)
    assert RunReader(back).metrics() == RunReader(run_dir).metrics()
    again = import_atif(tmp_path / "atif", tmp_path / "runs", run_id="copy")
    assert set(open_runs(again).trajectories().traj_id) != set(runs.trajectories().traj_id), (
        "ids stay unique in a folder"
    )


@pytest.mark.parametrize(("reward", "known"), [("verify", True), ("tests", True), ("my_parts:own", False)])
def test_whether_a_reward_is_a_correct_answer_survives_the_round_trip(reward, known, run_dir, tmp_path):
    info = json.loads((run_dir / "run.json").read_text())
    info["recipe"]["rl"]["reward"] = reward
    (run_dir / "run.json").write_text(json.dumps(info))
    export_atif(open_runs(run_dir), tmp_path / "atif", "step = 1")
    for path in (run_dir, import_atif(tmp_path / "atif", tmp_path / "other")):
        rows = open_runs(path).trajectories("step = 1")
        assert rows.correct.isna().any() != known and (not known or (rows.correct == (rows.reward > 0)).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_fast-rl", "tiny_fast-eval-base"])
def test_runs_of_models_come_back_as_they_were(name, tmp_path):
    source = GOLDEN / name
    export_atif(open_runs(source), tmp_path / "atif")
    back = import_atif(tmp_path / "atif", tmp_path / "other")
    for level, schema in (("trajectories", TRAJECTORIES), ("transcripts", TRANSCRIPTS), ("calls", CALLS)):
        assert rows(back, level, schema) == rows(source, level, schema), level


def test_documents_are_valid_for_the_models_of_the_format(run_dir, tmp_path):
    atif = pytest.importorskip("atif")
    export_atif(open_runs(run_dir), tmp_path / "atif", where={"errors": True})
    files = sorted((tmp_path / "atif").glob("0*.json"))
    assert files
    for path in files:
        document = atif.Trajectory.model_validate_json(path.read_text())
        assert document.steps[0].source == "user" and document.steps[0].step_id == 1


FOREIGN = {
    "schema_version": "ATIF-v1.5",
    "session_id": "s1",
    "agent": {"name": "other", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "6*7?"},
        {
            "step_id": 2, "source": "agent", "message": "I compute.", "reasoning_content": "plan",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "python", "arguments": {"code": "print(42)"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "42"}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]},
        },
        {"step_id": 3, "source": "user", "message": "copied", "is_copied_context": True},
        {
            "step_id": 4, "source": "agent", "message": [{"type": "text", "text": "42"}, {"type": "image"}],
            "metrics": {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6], "logprobs": [-1.0]},
        },
    ],
    "final_metrics": {"extra": {"reward": 1.0}},
}  # fmt: skip


def test_documents_of_other_agents_are_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(FOREIGN))
    runs = open_runs(import_atif(tmp_path / "a.json", tmp_path / "runs"))
    row = runs.trajectories().iloc[0]
    assert (row.turns, row.calls, row.reward) == (2, 1, 1.0)
    assert RunReader(tmp_path / "runs" / "a").metrics()[0]["reward"] == 1.0
    record = runs.record(row.traj_id)
    assert list(record["response_ids"]) == [3, 4, 5, 6] and list(record["loss_mask"]) == [True, True, False, True]
    messages = json.loads(record["messages"])
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert "<think>\nplan" in messages[1]["content"] and messages[2]["tool"] == "python"
    assert messages[3]["content"] == "42[image]"


def test_a_rewritten_history_has_no_single_sequence(tmp_path):
    document = json.loads(json.dumps(FOREIGN))
    document["steps"][3]["metrics"]["prompt_token_ids"] = [9, 9]
    (tmp_path / "a.json").write_text(json.dumps(document))
    runs = open_runs(import_atif(tmp_path / "a.json", tmp_path / "runs"))
    assert runs.record(runs.trajectories().traj_id[0])["response_ids"] is None


def test_continued_documents_are_joined(tmp_path):
    first = FOREIGN | {"steps": FOREIGN["steps"][:2], "continued_trajectory_ref": "b.json"}
    second = FOREIGN | {
        "steps": [{"step_id": 1, "source": "user", "message": "6*7?", "is_copied_context": True}, FOREIGN["steps"][3]]
    }
    (tmp_path / "a.json").write_text(json.dumps(first))
    (tmp_path / "b.json").write_text(json.dumps(second))
    assert list(open_runs(import_atif(tmp_path, tmp_path / "runs")).trajectories().turns) == [2]


DOCUMENTS = (
    Path(__file__).parent / "atif_documents"
)  # with the structure of those of OpenHands (1.5) and Terminus 2 (1.7)


@pytest.mark.parametrize("path", sorted(DOCUMENTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_document_of_openhands_or_terminus_is_one_rollout(path, tmp_path):
    pytest.importorskip("atif").Trajectory.model_validate_json(path.read_text())
    run = import_atif(path, tmp_path / "runs")
    runs = open_runs(run)
    row = runs.trajectories().iloc[0]
    steps = [step for step in json.loads(path.read_text())["steps"] if not step.get("is_copied_context")]
    turns = [step for step in steps if step["source"] == "agent"]
    assert len(runs.trajectories()) == 1 and row.turns == len(turns)
    assert row.model_tokens == sum(step["metrics"]["completion_tokens"] for step in turns)
    record = runs.record(row.traj_id)
    assert "greeting.txt" in record["question"]
    tools = [message["content"] for message in json.loads(record["messages"]) if message["role"] == "tool"]
    assert len(tools) == sum("observation" in step for step in turns) and all(tools)
    (log,) = doctor(run).logs
    assert len(log.rollouts) == 1
    assert curves(runs, ["turns"]).turns.tolist() == [len(turns)] and len(inspect(runs).rows()) == 1
    assert report_html(run, sample=1)


def test_a_folder_of_documents_is_one_run(tmp_path):
    run = import_atif(DOCUMENTS, tmp_path / "runs", run_id="all")
    assert len(open_runs(run).trajectories()) == 4 and not doctor(run).findings
    export_atif(open_runs(run), tmp_path / "again")
    back = import_atif(tmp_path / "again", tmp_path / "other")
    for level, schema in (("trajectories", TRAJECTORIES), ("transcripts", TRANSCRIPTS), ("calls", CALLS)):
        assert rows(back, level, schema) == rows(run, level, schema), level
    # Under the name that the first document gives for its continuation, both are one rollout.
    (tmp_path / "joined").mkdir()
    for name in ("trajectory", "trajectory.cont-1"):
        (tmp_path / "joined" / f"{name}.json").write_text((DOCUMENTS / f"terminus_2.{name}.json").read_text())
    assert open_runs(import_atif(tmp_path / "joined", tmp_path / "runs")).trajectories().turns.tolist() == [7]


def test_groups_of_two_runs_stay_apart_in_one_import(tmp_path):
    for name in ("one", "two"):
        export_atif(open_runs(make_run(tmp_path / "runs", name, steps=1)), tmp_path / "atif" / name)
    run = import_atif(tmp_path / "atif", tmp_path / "runs")
    for source in ("one", "two"):
        expected = open_runs(tmp_path / "runs" / source).trajectories().groupby("group_id").size()
        own = open_runs(run).trajectories().query(f"group_id.str.startswith('{source}/')").groupby("group_id").size()
        assert own.tolist() == expected.tolist() and len(own)
    ids = open_runs(tmp_path / "runs").trajectories().traj_id
    assert ids.is_unique and not ids.str.startswith("None/").any()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "x"}, {"steps": [1]}, {"steps": [{"source": "agent", "tool_calls": 3}]},
        {"steps": [{"source": "agent", "observation": {"results": ["x"]}}]},
        {"steps": [{"source": "agent", "metrics": {"completion_token_ids": ["a"], "prompt_token_ids": [1]}}]},
        {"extra": {"rstar_lab": {"trajectory": {"traj_id": "t", "outcomes": ["unknown"]}}}},
        {"extra": {"rstar_lab": {"trajectory": {"traj_id": "t", "step": "one"}}}},
    ],
)  # fmt: skip
def test_a_damaged_document_is_an_error_and_leaves_no_run(change, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(FOREIGN | change))
    with pytest.raises(UserError, match=r"a\.json"):
        import_atif(tmp_path / "a.json", tmp_path / "runs")
    assert not (tmp_path / "runs" / "a").exists()


def test_a_document_cannot_choose_a_folder_outside_of_the_runs(run_dir, tmp_path):
    export_atif(open_runs(run_dir), tmp_path / "atif", "step = 1")
    for path in (tmp_path / "atif").glob("0*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"session_id": "../outside"}))
    with pytest.raises(UserError, match=r"run id '\.\./outside' is not a valid folder's name"):
        import_atif(tmp_path / "atif", tmp_path / "runs2")
    assert not (tmp_path / "outside").exists()


def test_errors_name_the_file(run_dir, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json is not an ATIF document"):
        import_atif(tmp_path / "x.json", tmp_path / "other")
    with pytest.raises(UserError, match="selects no rollout"):
        export_atif(open_runs(run_dir), tmp_path / "new", where={"step": 99})
    with pytest.raises(UserError, match="is not an empty folder"):
        export_atif(open_runs(run_dir), tmp_path)


# --- training data -----------------------------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def golden():
    return open_runs(GOLDEN / "tiny_fast-rl")


STEP = {"steps": (1, 2)}


def test_tokens_and_labels_are_those_of_the_rollouts(golden, tmp_path):
    where = STEP | {"rewarded": True}
    exported = export_sft(golden, tmp_path / "a.jsonl", where, tokens=True)
    rows = lines(tmp_path / "a.jsonl")
    assert exported.written == len(rows) > 20
    for row in rows[:20]:
        record = golden.record(row["traj_id"])
        assert row["input_ids"] == [*record["prompt_ids"], *record["response_ids"]]
        own = [token for token, mine in zip(record["response_ids"], record["loss_mask"], strict=True) if mine]
        assert [label for label in row["labels"] if label != -100] == own
        assert row["reward"] > 0 and row["run_id"] == "tiny_fast-rl" and len(row["recipe"]) == 16


def test_messages_are_what_the_model_read_and_wrote(golden, tmp_path):
    export_sft(golden, tmp_path / "a.jsonl", STEP | {"rewarded": True, "ranges": {"calls": (1, None)}})
    row = lines(tmp_path / "a.jsonl")[0]
    roles = [message["role"] for message in row["messages"]]
    assert roles[:3] == ["system", "user", "assistant"] and roles[-1] == "assistant" and "tool" in roles
    assert row["tools"][0]["function"]["name"] == "execute_python_code_with_standard_io"
    system, user, first = row["messages"][:3]
    assert system["content"].startswith("You solve problems") and "# Tools" not in system["content"]
    assert "\\boxed{result}" in user["content"] and first["content"].startswith("<reason>")
    assert first["tool_calls"][0]["function"]["arguments"]["code"] and "<tool_call>" not in first["content"]
    assert row["messages"][3]["tool_call_id"] == first["tool_calls"][0]["id"]


def test_the_conversations_are_read_back_token_by_token_for_sft(golden, tmp_path):
    """Rejection-sampling fine-tuning: what SFT trains on are the tokens that were sampled."""
    export_sft(golden, tmp_path / "a.jsonl", STEP | {"rewarded": True, "errors": 0})
    exact = {row["traj_id"]: row for row in lines(tmp_path / "a.jsonl")}
    same = compared = 0
    for conversation, row in zip(read_conversations(tmp_path / "a.jsonl"), exact.values(), strict=True):
        text = "".join(piece for piece, _ in conversation.segments())
        record = golden.record(row["traj_id"])
        if record["prompt_ids"] is None:
            continue
        compared += 1
        sampled = "".join(golden.texts("tiny_fast-rl", [*record["prompt_ids"], *record["response_ids"]]))
        same += text.rstrip("\n") == sampled.rstrip("\n")
    assert same == compared > 20


def test_pairs_come_from_one_group(golden, tmp_path):
    exported = export_preferences(golden, tmp_path / "pairs.jsonl", STEP)
    rows = lines(tmp_path / "pairs.jsonl")
    assert exported.written == len(rows) > 10
    for row in rows:
        assert row["chosen_group_id"] == row["rejected_group_id"] and row["chosen_step"] == row["rejected_step"]
        assert row["chosen_reward"] > 0 >= row["rejected_reward"]
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"
    assert len({row["chosen_traj_id"] for row in rows}) == len(rows)


def test_evaluation_questions_never_enter_training_data(golden, tmp_path):
    with pytest.raises(UserError, match="rollout of an evaluation: "):
        export_sft(open_runs(GOLDEN / "tiny_fast-eval-rl"), tmp_path / "a.jsonl")
    question = golden.transcript(golden.trajectories(STEP).traj_id[0]).content[0]
    kept = export_sft(golden, tmp_path / "a.jsonl", STEP, against={"mine": [question]})
    assert kept.left_out["question of the evaluation set mine"] >= 16
    card = (tmp_path / "a.md").read_text()
    assert "mine (1 question)" in card and "`tiny_fast-rl`" in card


def test_parquet_files_have_the_same_rows(golden, tmp_path):
    export_sft(golden, tmp_path / "a.jsonl", STEP)
    export_sft(golden, tmp_path / "a.parquet", STEP)
    assert list(read_conversations(tmp_path / "a.parquet")) == list(read_conversations(tmp_path / "a.jsonl"))
    cards = [(tmp_path / name).read_text().partition("\n")[0] for name in ("a.md", "a.parquet.md")]
    assert cards == ["# a.jsonl", "# a.parquet"]
    with pytest.raises(UserError, match=r"\.jsonl or \.parquet"):
        export_sft(golden, tmp_path / "a.csv", STEP)


def test_no_export_replaces_a_file(golden, tmp_path):
    export_sft(golden, tmp_path / "a.jsonl", STEP)
    before = (tmp_path / "a.jsonl").read_bytes()
    for again in (export_sft, export_preferences):
        with pytest.raises(UserError, match=r"a\.jsonl exists; choose another file"):
            again(golden, tmp_path / "a.jsonl", STEP)
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.md exists"):
        export_sft(golden, tmp_path / "notes.jsonl", STEP)
    assert (tmp_path / "a.jsonl").read_bytes() == before and (tmp_path / "notes.md").read_text() == "mine"
    (tmp_path / "link.md").symlink_to(tmp_path / "elsewhere")
    export_sft(golden, tmp_path / "link.jsonl", STEP)
    assert not (tmp_path / "elsewhere").exists() and (tmp_path / "link.md").is_file()


def test_parquet_files_hold_different_arguments_as_text(tmp_path):
    def messages(name, arguments):
        call = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        return [{"role": "user", "content": name}, {"role": "assistant", "content": call}]

    rows = [{"messages": messages(*call), "reward": 1} for call in (("f", {"a": 1}), ("g", {"b": "x"}), ("h", {}))]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    runs = open_runs(import_messages(tmp_path / "in.jsonl", tmp_path / "runs"))
    exported = export_sft(runs, tmp_path / "a.parquet")
    assert any("arguments are JSON text" in note for note in exported.notes)
    stored = pq.read_table(tmp_path / "a.parquet").to_pylist()
    functions = [row["messages"][1]["tool_calls"][0]["function"] for row in stored]
    assert {function["arguments"] for function in functions} == {'{"a": 1}', '{"b": "x"}', "{}"}
    export_sft(runs, tmp_path / "a.jsonl")
    assert list(read_conversations(tmp_path / "a.parquet")) == list(read_conversations(tmp_path / "a.jsonl"))
