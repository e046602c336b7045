"""The server for assistants, asked by the client of the mcp package: in one process, and over standard streams."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.analysis_runs import make_run

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters
from typer.testing import CliRunner

from rstar_lab.analysis import compare, import_messages, inspect, measure, open_runs
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.exchange.mcp_server import ANSWER_CHARS, SKILL, TOOLS, make_server

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "runs"
RUN = "tiny_fast-rl"


@pytest.fixture(scope="module")
def server():
    return make_server(GOLDEN)


async def ask(server, name, **arguments):
    """Return the answer of a tool, or its error as text."""
    async with Client(server) as client:
        result = await client.call_tool(name, arguments)
    text = result.content[0].text
    return text if result.is_error else json.loads(text)


def strings(value):
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


async def test_tools_are_read_only_and_described(server):
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        prompt = await client.get_prompt("investigate")
    assert [tool.name for tool in tools] == [*TOOLS]
    assert all(tool.input_schema["additionalProperties"] is False for tool in tools)
    assert all(tool.description and tool.annotations.read_only_hint for tool in tools)
    assert prompt.messages[0].content.text == SKILL.read_text()


async def test_answers_have_ids_that_the_inspector_opens(server):
    runs = open_runs(GOLDEN)
    (found,) = [row for row in (await ask(server, "list_runs", kind="train"))["runs"] if row["run_id"] == RUN]
    namespace = {}
    exec(found["open"].replace("; inspect", "; shown = inspect"), namespace)
    assert isinstance(namespace["shown"], Inspector) and namespace["shown"].rows(9).run_id.unique() == [RUN]
    where = {"run_id": RUN, "errors": True}
    listed = await ask(server, "rollouts", where=where, limit=3)
    assert listed["total"] == runs.count(where) and len(listed["rollouts"]) == 3
    described = await ask(server, "describe_run", run_id=RUN)
    queried = await ask(server, "query", sql=f"SELECT * FROM calls WHERE run_id = '{RUN}'", limit=2)
    curve = await ask(server, "curves", run_ids=[RUN], metrics=["pass1"], points=2)
    rows = [*listed["rollouts"], described["last_step"], *queried["rows"], *curve["steps"]]
    for row in rows:
        row = {"run_id": RUN} | row
        assert row["run_id"] == RUN and row["link"] == f"#rstar={row['traj_id']}"
        assert runs.trajectories({"traj_id": row["traj_id"]}).step[0] == row["step"]
    assert queried["more"] and len(queried["rows"]) == 2
    transcript = await ask(server, "transcript", traj_id=rows[0]["traj_id"], first=1, messages=1)
    assert transcript["truth"] and transcript["messages"][0]["role"] == "assistant" and transcript["total_messages"] > 1
    assert inspect(GOLDEN, selected=transcript["traj_id"]).markdown()


async def test_curves_keep_the_steps_with_an_evaluation(tmp_path):
    metrics = make_run(tmp_path, "run", steps=10, problems=1, size=2) / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row |= {"eval/aime24/pass1": row["step"] / 100} if row["step"] % 3 == 0 else {}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"run_ids": ["run"], "metrics": ["eval/aime24/pass1"]}
    for points, expected in ((5, [1, 3, 6, 9, 10]), (3, [3, 6, 9]), (2, [3, 9])):
        rows = (await ask(make_server(tmp_path), "curves", points=points, **asked))["steps"]
        assert [row["step"] for row in rows] == expected
    assert [row["metrics"]["eval/aime24/pass1"]["value"] for row in rows] == [0.03, 0.09]


async def test_numbers_are_those_of_the_analysis(server):
    curve = await ask(server, "curves", run_ids=[RUN], metrics=["pass1", "tool_error_rate"], points=3)
    assert [row["step"] for row in curve["steps"]] == [1, 5, 8] and "before resampling" in curve["meaning"]["pass1"]
    expected = measure(open_runs(GOLDEN), ["pass1"], by=["step"], where={"run_id": RUN, "step": 5}).iloc[0]
    shown = curve["steps"][1]["metrics"]["pass1"]
    assert [shown[name] for name in ("value", "low", "high", "n")] == pytest.approx(
        [*expected[["value", "low", "high", "n"]]]
    )
    some = await ask(server, "curves", run_ids=[RUN], metrics=["pass1"], where="errors = 0", points=1)
    assert some["steps"][0]["metrics"]["pass1"]["n"] < 192
    sides = ("tiny_fast-eval-sft", "tiny_fast-eval-rl")
    found = await ask(server, "compare", run_a=sides[0], run_b=sides[1], metrics=["pass1"])
    assert found["sentence"] == compare(*(open_runs(GOLDEN / side) for side in sides), ["pass1"]).sentence
    assert found["metrics"][0]["low"] > 0 and found["flips"][0]["link_b"].startswith("#rstar=")
    (key,) = (await ask(server, "recipe_keys", search="clip_high"))["keys"]
    assert key["key"] == "rl.method.clip_high" and key["default"] == "0.28" and "grpo" in key["of"] and key["meaning"]


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("query", {"sql": "DROP TABLE runs"}, "only one SELECT statement is allowed"),
        ("query", {"sql": "SELECT 1; SELECT 2"}, "only one SELECT statement is allowed"),
        ("query", {"sql": "SELECT * FROM read_text('/etc/passwd')"}, "'read_text' cannot be read"),
        ("query", {"sql": "SELECT * FROM 'http://127.0.0.1:9/x.parquet'"}, "cannot be read; the tables are calls"),
        ("query", {"sql": "COPY (SELECT 1) TO '/tmp/x.csv'"}, "only one SELECT statement is allowed"),
        ("rollouts", {"where": "1) OR (1"}, "write one SQL expression"),
        ("rollouts", {"order_by": "1; SELECT 1"}, "only one SELECT statement is allowed"),
        ("rollouts", {"where": {"nothing": 1}}, "unknown filter"),
        ("describe_run", {"run_id": "../../../etc"}, "no run"),
        ("transcript", {"traj_id": "none"}, "no trajectory 'none'"),
        ("curves", {"run_ids": [RUN], "metrics": ["nothing"]}, "unknown metric"),
        ("list_runs", {"kinds": "train"}, "kinds\n  Extra inputs are not permitted"),
    ],
)
async def test_wrong_questions_are_answered_with_the_reason(server, tool, arguments, message):
    answer = await ask(server, tool, **arguments)
    assert isinstance(answer, str) and message in answer and len(answer) < 2_500


async def test_long_queries_end(monkeypatch):
    monkeypatch.setattr("rstar_lab.exchange.mcp_server.QUERY_S", 0.3)
    server, tables = make_server(GOLDEN), ", ".join(f"trajectories t{i}" for i in range(9))
    assert "ran longer than 0.3 s" in await ask(server, "query", sql=f"SELECT count(*) FROM {tables}")
    assert "ran longer than 0.3 s" in await ask(server, "rollouts", where=f"(SELECT count(*) FROM {tables}) > 0")


async def test_texts_of_runs_are_bounded_and_visible(tmp_path):
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in "obey me")
    text = f"\x1b[31mred\x1b[0m \x07 a\u202eb \u200b{hidden} \udc80" + "x" * 9_000
    messages = [{"role": "user", "content": "q"}] + [{"role": "assistant", "content": text}] * 20
    lines = [{"messages": messages, "reward": 0} for _ in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run_dir = import_messages(tmp_path / "a.jsonl", tmp_path / "runs")
    server = make_server(tmp_path / "runs")
    traj_id = open_runs(run_dir).trajectories().traj_id[0]
    questions = [
        ("rollouts", {"limit": 10_000}), ("transcript", {"traj_id": traj_id, "messages": 1000}), ("list_runs", {}),
        ("query", {"sql": "SELECT traj_id, messages, messages AS again FROM transcripts", "limit": 1000}),
        ("query", {"sql": "SELECT list(messages) AS all, string_agg(messages) AS y FROM transcripts"}), ("diagnose", {"run_id": "a"}),
        ("describe_run", {"run_id": "a"}),
    ]  # fmt: skip
    for name, arguments in questions:
        answer = await ask(server, name, **arguments)
        assert not isinstance(answer, str), answer
        assert len(json.dumps(answer)) <= ANSWER_CHARS + 1000, name
        for string in strings(answer):
            assert not re.search(
                r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\ud800-\udfff\U000e0000-\U000e01ef]", string
            )
        if name == "transcript":
            assert len(answer["messages"]) + answer["left_out"]["messages"] == answer["total_messages"] == 21
        if name == "diagnose":
            assert answer["verdict"] and answer["findings"][0]["links"][0].startswith("#rstar=a%2F")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nothing"):
        make_server(tmp_path / "nothing")


@pytest.mark.slow
async def test_the_command_serves_a_run_that_grows_over_standard_streams(tmp_path):
    make_run(tmp_path, "first", steps=1)
    command = ["-m", "rstar_lab.cli", "mcp", "--runs-dir", str(tmp_path)]
    async with Client(StdioServerParameters(command=sys.executable, args=command, cwd=ROOT)) as client:
        assert len((await client.list_tools()).tools) == len(TOOLS)
        make_run(tmp_path, "second", steps=1)
        answer = json.loads((await client.call_tool("list_runs", {})).content[0].text)
        assert {row["run_id"] for row in answer["runs"]} == {"first", "second"}
        assert not (await client.call_tool("diagnose", {"run_id": "second"})).is_error


def test_the_guide_for_assistants_is_printed():
    assert CliRunner().invoke(app, ["mcp", "--skill"]).stdout == SKILL.read_text()
