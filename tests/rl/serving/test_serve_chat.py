"""`serve`, `chat` and `evaluate` by URL, as users meet them: on the two servers of served.py and a model that calls its tool."""

import io
import json
import os
import signal
import socket
import subprocess

import httpx
import psutil
import pytest
from helpers.memorized_model import ANSWER, CODE, QUESTION
from helpers.vllm_servers import COMMAND, KEY, members, serve, wait_until
from rich.console import Console

from rstar_lab.analysis import open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.chat.events import Kind
from rstar_lab.rl.chat.session import ChatOptions, open_chat
from rstar_lab.rl.chat.view import show
from rstar_lab.rl.evaluate_command import evaluate_command
from rstar_lab.rl.evaluation import per_problem, summarise
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.renderers import released
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.formats import render_prompt, render_tool_results
from rstar_lab.rl.renderers.released import ReleasedRenderer
from rstar_lab.rl.serving.serve import Replica, ServeOptions, check_options, reserve_ports, serving
from rstar_lab.runs.reader import RunReader

GREEDY = ChatOptions(temperature=0.0, seed=0)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("RSTAR_LAB_API_KEY", KEY)


def run(*arguments: str, cwd) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, timeout=280)


def kinds(events) -> list[tuple[str, str]]:
    """Return (kind, text) of events, with the pieces of one text joined."""
    merged: list[tuple[str, str]] = []
    for event in events:
        if event.kind in (Kind.REASON, Kind.TEXT, Kind.ANSWER) and merged and merged[-1][0] == event.kind:
            merged[-1] = (event.kind, merged[-1][1] + event.text)
        else:
            merged.append((event.kind, event.text))
    return [(str(kind), text.strip()) for kind, text in merged if text.strip()]


CONVERSATION = [
    ("reason", "I compute it."),
    ("call", CODE),
    ("result", ANSWER),
    ("reason", f"It says {ANSWER}."),
    ("answer", f"\\boxed{{{ANSWER}}}"),
    ("stop", "answered"),
]


# Chat


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_shot_by_token_ids_is_kept_in_the_run_store(served, tmp_path):
    flags = ("--temperature", "0", "--save", "--name", "talk", "--runs-dir", "runs", "--json")
    done = run("chat", served.urls[0], "--prompt", QUESTION, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["answer"] == ANSWER and said["turns"] == 2 and said["stop_reason"] == "answered"
    assert [(call["code"], call["outcome"], call["response"]) for call in said["calls"]] == [(CODE, "ok", ANSWER)]
    runs = open_runs(tmp_path / "runs")
    assert runs.runs().iloc[0][["kind", "status"]].tolist() == ["chat", "finished"]
    (row,) = RunReader(tmp_path / "runs" / "talk").read("trajectories").to_pylist()
    assert row["reward"] is None and row["answer"] == ANSWER and row["calls"] == 1 and row["truth"] == ""
    assert row["response_tokens"] == said["response_tokens"] > row["model_tokens"] > 0
    messages = runs.transcript(said["traj_id"]).to_dict("records")
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == ANSWER and CODE in messages[1]["content"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_conversation_continues(served):
    async with open_chat(served.urls[1], GREEDY) as chat:
        by_tokens = await chat.ask(QUESTION)
        assert kinds(by_tokens.events) == CONVERSATION
        again = await chat.ask("And once more?")
        assert again.trajectory.prompt_ids[: len(by_tokens.trajectory.prompt_ids)] == by_tokens.trajectory.prompt_ids
        assert len(again.trajectory.prompt_ids) > len(by_tokens.trajectory.prompt_ids) + len(
            by_tokens.trajectory.response_ids
        )
        chat.reset()
        assert (await chat.ask(QUESTION)).trajectory.response_ids == by_tokens.trajectory.response_ids

    # A truncated reply is reported as truncated.
    async with open_chat(served.urls[0], ChatOptions(temperature=0.0, max_tokens=3)) as chat:
        reply = await chat.ask(QUESTION)
        assert reply.trajectory.stop_reason == "length" and len(reply.trajectory.response_ids) == 3


@pytest.mark.slow
async def test_a_chat_in_the_released_format_continues_its_prompts(memorized_model):
    options = ChatOptions(0.0, max_tokens=3, seed=0, tools=(), prompt_format="released")
    async with open_chat(str(memorized_model[0]), options, engine="transformers") as chat:
        first = (await chat.ask("How many?")).trajectory
        codec = chat.codec
        decode, second = codec.decode, codec.prompt_ids("And now?")  # longer than the context of the tiny model
    expected = render_prompt("How many?", tools=[], prompt_format="released")
    assert decode(first.prompt_ids) == expected
    reply = decode(first.response_ids) + "<|im_end|>"
    assert decode(second) == expected + reply + ReleasedRenderer(PromptStyle("released")).next_question("And now?")


@pytest.mark.slow
async def test_a_chat_shows_the_selected_tools_to_the_model(memorized_model):
    options = ChatOptions(tools=("python_released", "jupyter"), prompt_format="released")
    async with open_chat(str(memorized_model[0]), options, engine="transformers") as chat:
        codec = chat.codec
        expected = render_prompt("How many?", tools=["python_released", "jupyter"], prompt_format="released")
        assert codec.decode(codec.prompt_ids("How many?")) == expected
        assert set(chat.tools) == {"python_code_with_standard_io", "jupyter_code"}


@pytest.mark.slow
async def test_a_folder_needs_no_server(memorized_model):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    async with open_chat(str(memorized_model[0]), GREEDY, engine="transformers") as chat:
        reply = await show(chat, QUESTION, console)
        assert kinds(reply.events) == CONVERSATION
        assert len(reply.events) > len(CONVERSATION)  # it came in pieces
    text = console.file.getvalue()
    assert [word for word in ("I compute it.", CODE, "ok", ANSWER, "\\boxed{42}") if word not in text] == []
    assert "<tool_call>" not in text and "<answer>" not in text


# Evaluation


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_servers_are_evaluated_and_what_is_there_is_not_made_again(served, memorized_model, tmp_path, capsys):
    lines = [
        {"question": QUESTION, "answer": ANSWER, "id": 7},
        {"question": "What is one and one?", "answer": "3", "id": 8},
    ]
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"problem": line.pop("question"), **line}) + "\n" for line in lines)
    )
    source = f"aime24={tmp_path / 'mine.jsonl'}"
    recipe = load_recipe("evaluate", {"evaluate.samples": 4, "runs": str(tmp_path / "runs")})
    result = await evaluate_command(served.urls, source, recipe, Reporter(True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    solved = {line["problem_id"]: line["correct"] for line in lines if line["event"] == "problem"}
    assert solved == {"7": 4, "8": 0}
    assert result["pass1"][0] == result["maj4"][0] == result["pass_at"]["2"][0] == 0.5 and result["n"] == 8
    assert result["intervals"]["calls"][0] == result["calls"] >= 0.5
    reader = RunReader(result["run"])
    assert {row["engine"] for row in reader.read("trajectories").to_pylist()} <= set(served.urls)
    assert reader.info["recipe"].get("evaluate") == reader.info["recipe"].get("evaluate") | {
        "max_turns": 30, "max_response_tokens": 30_000, "temperature": 0.6, "top_p": 0.95, "samples": 4,
    }  # fmt: skip
    assert await evaluate_command(served.urls[1:], source, recipe, Reporter(True)) == result
    assert RunReader(result["run"]).info["attempts"] == 1
    with pytest.raises(UserError, match="give one model, or any number of URLs"):
        await evaluate_command([served.urls[0], str(memorized_model[0])], source, recipe, Reporter(True))


def rows(correct: dict[str, list[int]]) -> list[dict]:
    return [
        {
            "problem_id": name, "reward": float(value), "answer": str(value), "truth": "1", "response_tokens": 10 * (i + 1),
            "calls": 2, "errors": 1 - value, "truncated": False,
        }
        for name, values in correct.items()
        for i, value in enumerate(values)
    ]  # fmt: skip


def test_the_result_of_an_evaluation():
    made = rows({"a": [1, 1, 1, 1], "b": [0, 0, 0, 1], "c": [0, 0, 0, 0]})
    result = summarise(made)
    assert result["pass1"][0] == pytest.approx(5 / 12)
    assert [result["pass_at"][k][0] for k in ("1", "2", "4")] == pytest.approx([5 / 12, 1.5 / 3, 2 / 3])
    assert result["maj4"][0] == pytest.approx(1 / 3)
    assert result["intervals"]["error_rate"][0] == result["error_rate"] == pytest.approx(7 / 24)
    low, high = result["intervals"]["error_rate"][1:]
    assert 0 <= low < 7 / 24 < high <= 1
    table = per_problem(made)
    assert [(row["problem_id"], row["correct"], row["majority"], row["majority_correct"]) for row in table] == [
        ("a", 4, "1", True), ("b", 1, "0", False), ("c", 0, "0", False)
    ]  # fmt: skip
    # A majority in two forms is one majority.
    made = rows({"a": [0, 0, 1, 1, 1]})
    for row, answer in zip(made, ["3", "3", "0.5", "\\frac{1}{2}", "1/2"], strict=True):
        row["answer"] = answer
    assert [(row["majority"], row["majority_correct"]) for row in per_problem(made)] == [("0.5", True)]


# Serving


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_server_renders_chat_completions_in_the_released_format(memorized_model):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<reason>r</reason>"},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "tool", "content": "b", "tool_call_id": "2"},
    ]
    expected = (
        render_prompt("q", ["jupyter"], "released") + "r</reason><|im_end|>" + render_tool_results("ab", "released")
    )
    options = ServeOptions(memorized_model[0], port=0, api_key=KEY, prompt_format="released")
    async with serving(options) as (replica,), httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
        body = {"messages": messages, "tools": [released.JUPYTER_TOOL]}
        answer = await client.post(f"{replica.url}/tokenize", json=body, timeout=60)
    tokens = answer.raise_for_status().json()["tokens"]
    assert load_tokenizer(memorized_model[0]).decode(tokens, skip_special_tokens=False) == expected


@pytest.mark.slow
def test_what_cannot_be_served_is_one_line(memorized_model, tmp_path):
    folder = memorized_model[0]
    for options, message in (
        (ServeOptions(tmp_path), f"model {tmp_path}: no folder with a config.json"),
        (ServeOptions(folder, host="0.0.0.0"), "--host 0.0.0.0 can be reached by others: set a token"),
        (ServeOptions(folder, prompt_format="hermes"), "--prompt-format hermes: choose from paper, released"),
        (ServeOptions(folder, updatable=True), "--updatable lets clients change the model: set a token"),
    ):
        with pytest.raises(UserError, match=message):
            check_options(options)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use: choose another --port"):
            reserve_ports(ServeOptions(folder, port=port))
    assert len(set(reserve_ports(ServeOptions(folder, replicas=3, port=0)))) == 3


@pytest.mark.parametrize(
    ("gpus", "dtype", "expected"), [([], "auto", "float32"), (["0"], "auto", "auto"), ([], "half", "half")]
)
def test_servers_on_a_cpu_use_float32_by_default(tmp_path, monkeypatch, gpus, dtype, expected):
    monkeypatch.setattr("rstar_lab.rl.serving.serve.visible_gpus", lambda: gpus)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    command = Replica(0, 8000, ServeOptions(tmp_path, dtype=dtype), tmp_path).command()
    assert command[command.index("--dtype") + 1] == expected


def test_every_server_has_gpus_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("rstar_lab.rl.serving.serve.visible_gpus", lambda: ["0", "1", "4", "5"])
    options = ServeOptions(tmp_path, replicas=2, tensor_parallel=2)
    found = [Replica(i, 8000 + i, options, tmp_path).environment()["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert found == ["0,1", "4,5"]


@pytest.mark.slow
def test_a_tied_model_is_not_updated_where_its_head_would_stay_behind(memorized_model, tmp_path, monkeypatch):
    monkeypatch.setattr("rstar_lab.rl.serving.serve.visible_gpus", lambda: [])
    config = json.loads((memorized_model[0] / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has tied embeddings"):
        check_options(ServeOptions(tmp_path, updatable=True, api_key=KEY))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_serve(memorized_model, tmp_path, number):
    with serve(memorized_model[0], "--replicas", "2", log=tmp_path / "log") as process:
        parent = psutil.Process(process.pid)
        # Two keepers, a server behind each.
        assert wait_until(lambda: len(parent.children()) == 2 and len(parent.children(recursive=True)) >= 4, 100)
        groups = [keeper.pid for keeper in parent.children()]
        assert len(members(groups)) >= 4
        os.kill(process.pid, number)
        assert process.wait(60) == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert wait_until(lambda: not members(groups))


@pytest.mark.soak
def test_a_model_that_cannot_be_loaded_is_an_error_with_the_servers_log(memorized_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in memorized_model[0].iterdir():
        (broken / path.name).write_bytes(b"torn" if path.suffix == ".safetensors" else path.read_bytes())
    done = run("serve", str(broken), "--port", "0", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    words = " ".join(done.stderr.split())
    assert "ended while it started" in words and "end of the log /" in words and "server-0.log" in words
