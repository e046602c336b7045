"""Training data are exactly what was sampled."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rstar_lab.analysis import export_preferences, export_sft, import_messages, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.rl.renderers.conversations import read_conversations

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"


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
