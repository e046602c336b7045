"""Tests of SFT data: six public schemas become one, and every row that is left out is counted with its reason."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import read_cases
from transformers.utils.chat_template_utils import render_jinja_template
from typer.testing import CliRunner

from rstar_lab import tool_calls as parser
from rstar_lab.cli.data import app
from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.converters import CONVERTERS, ConversionReport, convert
from rstar_lab.rl.data.lint import lint
from rstar_lab.rl.data.mix import MixEntry, read_mix
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.conversations import Conversation, Message, read_conversations, reply, write_conversations

FILE = read_cases(__file__, "conversations.yaml")
ROWS = FILE["rows"]
GLAIVE = ROWS["glaive_v2"]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for name in ROWS for text, _ in one(name).segments()]
    return train_tokenizer(texts, 700)


def one(name: str, row=None) -> Conversation:
    report = ConversionReport(name)
    found = list(convert(name, [(1, ROWS[name] if row is None else row)], "x.jsonl", report))
    assert found, report.refused
    return found[0]


def refusal(name: str, row) -> str:
    report = ConversionReport(name)
    assert not list(convert(name, [(1, row)], "x.jsonl", report))
    ((reason, count),) = report.refused.items()
    assert count == 1 and "x.jsonl row 1" in report.examples[reason]
    return reason


def changed(name: str, change: dict) -> dict:
    """Return a row with other columns. The value of `COLUMN and` is appended to that of the column."""
    row = dict(ROWS[name])
    for key, value in change.items():
        column = key.removesuffix(" and")
        row[column] = value if key == column else row[column] + value
    return row


@pytest.mark.parametrize("name", CONVERTERS)
def test_every_schema_gives_a_clean_conversation(name, tokenizer):
    conversation = one(name)
    assert conversation.source == name and lint(conversation) == []
    messages = [message.model_dump() for message in conversation.messages]
    rendered, _ = render_jinja_template(
        [messages], tools=list(conversation.tools) or None, chat_template=chat.CHAT_TEMPLATE
    )
    assert "".join(text for text, _ in conversation.segments()) == rendered[0]


def test_toolace():
    conversation = one("toolace")
    roles = ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert [message.role for message in conversation.messages] == roles
    first, second = parser.parse_tool_calls(conversation.messages[1].content)
    assert (first.name, first.arguments) == ("get weather/v2", {"place": 'Rome (Italy), "centre"', "days": 2})
    assert (second.name, second.arguments) == ("book.table", {"who": ["Ann", "Bo"], "late": True, "at": {"h": 8}})
    assert json.loads(conversation.messages[3].content)["results"] == {"ok": 1}
    parameters = conversation.tools[0]["function"]["parameters"]
    assert parameters["type"] == "object" and parameters["properties"]["days"]["type"] == "integer"


def test_glaive():
    conversation = one("glaive_v2")
    assert [tool["function"]["name"] for tool in conversation.tools] == ["rate", "fee"]
    call = conversation.messages[1].content
    assert call.startswith("<reason>Let me see.</reason>\n<tool_call>")
    assert parser.parse_tool_calls(call)[0].arguments == {"to": "dollar's"}
    assert [message.role for message in conversation.messages[4:]] == ["user", "assistant", "tool", "assistant"]
    plain = one(
        "glaive_v2", {"system": "SYSTEM: No functions here.", "chat": "USER: Hi\n\n\nASSISTANT: Hello. <|endoftext|>"}
    )
    assert plain.messages[0] == Message(role="system", content="No functions here.") and not plain.tools


def test_magicoder_answers_in_json():
    conversation = one("magicoder")
    answer = conversation.messages[1].content.removeprefix("<reason></reason>\n<answer>").removesuffix("</answer>")
    assert json.loads(answer) == {"code": "def f(x):\n    return 2 * x", "explanation": "Here it is:\n\nIt multiplies."}


@pytest.mark.parametrize(("name", "change", "reason"), FILE["refused"])
def test_what_cannot_be_read_is_refused_with_a_reason(name, change, reason):
    assert reason in refusal(name, changed(name, change))


@pytest.mark.parametrize("shape", FILE["shapes"])
def test_the_shapes_of_the_public_sets(shape):
    name, change, roles = FILE["shapes"][shape]
    conversation = one(name, changed(name, change))
    assert lint(conversation) == []
    letters = [
        "A" if message.role == "assistant" and "<answer>" in message.content else message.role[0]
        for message in conversation.messages
    ]
    assert "".join(letters) == roles and all("None" not in message.content for message in conversation.messages)


def test_rows_that_are_no_objects():
    assert all(refusal(name, row) for name in CONVERTERS for row in (None, [], "text", {}))


# --- files, mix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_round_trip(tmp_path, suffix):
    conversations = [one(name) for name in ROWS]
    assert write_conversations(tmp_path / f"c{suffix}", iter(conversations)) == len(conversations)
    assert list(read_conversations(tmp_path / f"c{suffix}")) == conversations


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "nulls",
    [
        {"tools": None}, {"tools": ""}, {"tools": "null"}, {"tools": "[]"}, {"tools": [None]},
        {"messages": [{"role": "user", "content": "q", "tool_calls": None, "name": None},
                      {"role": "assistant", "content": reply("a"), "tool_calls": None, "name": None}]},
    ],
)  # fmt: skip
def test_nulls_of_parquet_count_as_absent(tmp_path, suffix, nulls):
    row = {"conversation_id": "a", "source": "s", "tools": [], **nulls}
    row.setdefault("messages", [{"role": "user", "content": "q"}, {"role": "assistant", "content": reply("a")}])
    path = tmp_path / f"c{suffix}"
    if suffix == ".jsonl":
        path.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    (conversation,) = read_conversations(path)
    assert conversation.tools == () and len(conversation.messages) == 2 and lint(conversation) == []


def test_rows_of_others_need_messages_only(tmp_path):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"messages": own, "reward": 1.0}) for own in (messages, json.dumps(messages))))
    found = list(read_conversations(path))
    assert [one.conversation_id for one in found] == ["c-1", "c-2"] and found[0].source == "c"
    assert found[0].messages == found[1].messages and '<tool_call>\n{"name": "f"' in found[0].messages[1].content
    for own in ([messages], "hello", None):
        path.write_text(json.dumps({"messages": own}))
        with pytest.raises(UserError, match=r"c\.jsonl row 1: field 'messages'"):
            list(read_conversations(path))


def test_bad_files_of_conversations(tmp_path):
    (tmp_path / "c.jsonl").write_text(
        '{"conversation_id": "a", "source": "s", "messages": [{"role": "judge", "content": "x"}]}'
    )
    with pytest.raises(UserError, match=r"c\.jsonl row 1, field 'messages\.0\.role'"):
        list(read_conversations(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match=r"\.csv"):
        write_conversations(tmp_path / "c.csv", [])


def test_mix(tmp_path):
    for name, count in (("one", 5), ("two", 30)):
        few = [
            one("tulu3_if").model_copy(update={"conversation_id": f"{name}-{n}", "source": name}) for n in range(count)
        ]
        write_conversations(tmp_path / f"{name}.jsonl", few)
    entries = [MixEntry(file=tmp_path / "one.jsonl"), MixEntry(file=tmp_path / "two.jsonl", count=10)]
    mixed = read_mix(entries, seed=1)
    assert [one.source for one in mixed].count("two") == 10 and len({one.conversation_id for one in mixed}) == 15
    assert mixed == read_mix(entries, seed=1) != read_mix(entries, seed=2)
    lines: list[str] = []
    assert len(read_mix([MixEntry(file=tmp_path / "one.jsonl", count=6)], on_count=lines.append)) == 5
    assert lines == ["one: 5 of 6"]
    with pytest.raises(UserError, match="5 conversations, but the mix requests exactly 6"):
        read_mix([MixEntry(file=tmp_path / "one.jsonl", count=6, exact=True)])


def test_a_recipe_trains_on_a_mix_of_files(tmp_path, tokenizer):
    """Conversations alone: no problems, no sandbox, and a model of the user's."""
    write_conversations(tmp_path / "c.jsonl", [one("toolace"), one("glaive_v2")])
    entry = {"file": str(tmp_path / "c.jsonl"), "count": 2}
    recipe = parse_recipe({"model": "tiny", "sft": {"conversations": [entry]}})
    assert recipe.sft is not None and len(read_mix(recipe.sft.conversations)) == 2
    with pytest.raises(UserError, match="give problems, conversations or both"):
        parse_recipe({"model": "tiny", "sft": {}})
    with pytest.raises(UserError, match="unknown key; did you mean count"):
        parse_recipe({"model": "tiny", "sft": {"conversations": [{**entry, "counts": 2}]}})


@pytest.mark.slow
def test_convert_and_lint_from_the_command_line(tmp_path):
    source, out = tmp_path / "glaive.json", tmp_path / "glaive.jsonl"
    source.write_text(
        json.dumps([GLAIVE, {**GLAIVE, "chat": "USER: q\n\n\nASSISTANT: <functioncall> {} <|endoftext|>"}])
    )
    run = CliRunner().invoke
    ended = run(app, ["convert", "glaive_v2", str(source), "--out", str(out), "--json"])
    line = json.loads(ended.stdout)
    assert ended.exit_code == 0 and (line["rows"], line["converted"], sum(line["refused"].values())) == (2, 1, 1)
    assert "1 rejected" in run(app, ["convert", "glaive_v2", str(source), "--out", str(out)]).stdout
    assert run(app, ["lint", str(out)]).exit_code == 0
    roles = ("user", "user", "assistant")  # two user messages in a row are a fault
    messages = tuple(Message(role=role, content=reply("a") if role == "assistant" else "q") for role in roles)
    write_conversations(out, [Conversation(conversation_id="c", source="s", messages=messages)])
    ended = run(app, ["lint", str(out), "--json"])
    finding, last = map(json.loads, ended.stdout.splitlines())
    assert ended.exit_code == 1 and finding["rule"] == "roles" and last == {"conversations": 1, "faulty": 1}
    unknown = run(app, ["convert", "alpaca", str(source), "--out", str(out)])
    assert isinstance(unknown.exception, UserError) and "choose from toolace" in str(unknown.exception)
