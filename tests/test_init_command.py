"""Tests of `rstar-lab init`: the recipe that it writes for a model and problems of one's own."""

import json
import re

import numpy as np
import pytest
from helpers.chat_models import chat_tokenizer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.synthetic.traces import TraceMix

SHAPE = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "vocab_size": 300, "tie_word_embeddings": True,
}  # fmt: skip
CSV = 'Problem,Final_Answer\n"What is 2, and 3?",5\nWhat is 4?,so #### 9\nAgain,7\nAgain,7\n,3\n'
LARGE = SHAPE | {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17408, "vocab_size": 150_000}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the models `knows-tools` and `knows-none` (configuration and tokenizer), and problems."""
    monkeypatch.chdir(tmp_path)
    for name, family in (("knows-tools", "qwen3"), ("knows-none", "gemma")):
        chat_tokenizer(family).save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "p.csv").write_text(CSV)
    return tmp_path


def init(*arguments: str, answers: str = "") -> str:
    result = CliRunner().invoke(app, ["init", *arguments], input=answers)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("profile", ["laptop", "one_gpu", "one_gpu_24gb", "h100x8", "mi300x_8x8"])
@pytest.mark.parametrize("model", ["knows-tools", "knows-none"])
@pytest.mark.parametrize("large", [False, True])
def test_the_recipe_loads_and_is_short(folder, profile, model, large):
    if large:
        (folder / model / "config.json").write_text(json.dumps(LARGE))
    init("--model", model, "--problems", "p.csv", "--profile", profile)
    text = (folder / "recipe.yaml").read_text()
    assert len(text.splitlines()) <= 25 and "#" in text
    recipe = load_recipe("recipe.yaml")
    assert recipe.model == model and (recipe.sft is not None) == (model == "knows-none")
    assert recipe.rl.prompt.format == ("model" if model == "knows-tools" else "paper")
    assert (recipe.rl.lora is not None) == (large and profile in ("laptop", "one_gpu", "one_gpu_24gb"))
    (train,), held_out = recipe.stage_problems(recipe.stages[0]), recipe.evaluate.sets["held_out"]
    questions = [{problem.question for problem in load_problems(part.file)} for part in (train, held_out)]
    assert [len(part) for part in questions] == [2, 1] and not questions[0] & questions[1]
    assert {p.answer for part in (train, held_out) for p in load_problems(part.file)} == {"5", "9", "7"}


def test_sft_teaches_tools_on_word_problems_with_correct_answers(folder):
    init("--model", "knows-none", "--problems", "p.csv", "--profile", "laptop")
    sft = load_recipe("recipe.yaml").sft
    assert sft.problems.synthetic.families == ("words",)
    weights = TraceMix(**sft.mix).weights(level=4)
    assert not any(weights[kind] for kind in ("wrong_code", "guess", "error_then_guess"))


def test_what_the_flags_say_decides(folder):
    output = init(
        "--model", "knows-none", "--problems", "p.csv", "--no-sft", "--out", "a b.yaml", "--machine", "laptop"
    )
    assert load_recipe(folder / "a b.yaml").sft is None and "--sft teaches them first" in output
    assert "left out rows: 1; the first: p.csv row 5" in output
    assert re.search(r"next: rstar-lab preflight .*--profile laptop\n +rstar-lab run", output)
    init("--model", "knows-tools", "--problems", "p.csv", "--sft", "--out", "b.yaml")
    assert load_recipe("b.yaml").sft is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problems", "p.csv"], "give --model"),
        (["--model", "knows-tools"], "give --problems"),
        (["--model", "nowhere", "--problems", "p.csv"], "model folder nowhere does not exist"),
        (["--model", "tiny", "--problems", "p.csv"], "random weights"),
        (["--model", "knows-tools", "--problems", "p.csv", "--profile", "laptp"], "did you mean 'laptop'"),
        (["--model", "knows-tools", "--problems", "other.csv"], r"columns: a, b"),
        (["--model", "knows-tools", "--problems", "gone.jsonl"], "no such file"),
        (["--model", "knows-tools", "--problems", "one.jsonl"], "1 different problem;"),
        (["--model", "knows-tools", "--problems", "p.csv", "--out", "p.csv"], r"ends? in \.yaml|exists already"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(folder, arguments, message):
    (folder / "other.csv").write_text("a,b\n1,2\n")
    (folder / "one.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    with pytest.raises(UserError, match=message):
        init(*arguments)
    assert not list(folder.glob("*.yaml"))


def test_an_existing_recipe_is_not_replaced(folder):
    (folder / "recipe.yaml").write_text("mine: 1")
    with pytest.raises(UserError, match="exists already"):
        init("--model", "knows-tools", "--problems", "p.csv")
    assert (folder / "recipe.yaml").read_text() == "mine: 1"


def test_in_a_terminal_it_asks(folder, monkeypatch):
    monkeypatch.setattr("rstar_lab.cli.init._in_terminal", lambda: True)
    init(answers="knows-none\np.csv\nlaptop\nn\n")
    assert load_recipe("recipe.yaml").sft is None


def problems_of(recipe_name="recipe.yaml"):
    recipe = load_recipe(recipe_name)
    (train,), held_out = recipe.stage_problems(recipe.stages[0]), recipe.evaluate.sets["held_out"]
    return [problem for part in (train, held_out) for problem in load_problems(part.file)]


def rows(folder, *values):
    (folder / "q.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return ["--model", "knows-tools", "--problems", "q.jsonl", "--profile", "laptop"]


def test_a_question_with_two_answers_is_an_error_with_its_rows(folder):
    made = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(5)]
    with pytest.raises(UserError, match=r"q\.jsonl row 3 \(3\), q\.jsonl row 6 \(9\); correct or remove"):
        init(*rows(folder, *made, {"question": "What is  2 + 1?", "answer": 9}))
    output = init(
        *rows(folder, *made, made[2], {"question": "Why?", "answer": "It is usually blue because of the air"})
    )
    assert "left out repeated rows: 1: q.jsonl row 6" in output
    assert "answers that only the same text meets: 1: q.jsonl row 7 ('It is usually" in output
    assert "warning: 1 held-out problem of 6: pass@1 has no interval" in output


def test_problems_with_tests_and_chats_are_read(folder):
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    init(*rows(folder, *({"question": f"Add {n}.", "input_output": json.dumps(tests)} for n in range(3))))
    assert load_recipe("recipe.yaml").rl.reward == "tests" and all(one.info["tests"] for one in problems_of())
    info = {"tests": [{"input": "1", "output": "2"}]}
    init(*rows(folder, *({"question": f"Add {n}.", "info": info} for n in range(3))), "--out", "b.yaml")
    assert load_recipe("b.yaml").rl.reward == "tests" and problems_of("b.yaml")[0].info == info
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 4?"}]
    chats = ({"messages": [*turns[:1], {"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"\\boxed{{{n}}}"}]}
             for n in range(3))  # fmt: skip
    init(*rows(folder, *chats), "--out", "c.yaml")
    assert {(one.question, one.answer) for one in problems_of("c.yaml")} == {("q0", "0"), ("q1", "1"), ("q2", "2")}


def test_broken_model_folders_are_named(folder):
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"--model empty: the folder has no config\.json"):
        init("--model", "empty", "--problems", "p.csv")
    save_file({"w": np.zeros(100, np.float32)}, folder / "knows-tools" / "model.safetensors")
    init("--model", "knows-tools", "--problems", "p.csv", "--out", "whole.yaml")
    whole = (folder / "knows-tools" / "model.safetensors").read_bytes()
    for length in (4, 20, 200):
        (folder / "knows-tools" / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model\.safetensors: the file is cut off"):
            init("--model", "knows-tools", "--problems", "p.csv")
