"""Text of models and of other people's files is read in a time that is linear in its length.

Reading one of these texts took minutes with an expression that takes quadratic time or more. tests/tool_calls has those of calls.
"""

import os

import pytest

from rstar_lab.analysis import import_messages
from rstar_lab.analysis.forks import turn_text
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.doctor.metric_names import canonical
from rstar_lab.exchange.import_rows import conversation_messages
from rstar_lab.rl.algorithm.roc import released_format_penalty
from rstar_lab.rl.chat.events import Kind, TurnSplitter
from rstar_lab.rl.data.converters import glaive_v2
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.reward.hidden_tests import final_program
from rstar_lab.untrusted.files import parse_yaml
from rstar_lab.untrusted.text import up_to_last
from rstar_lab.verify import verify
from rstar_lab.verify.gold import final_answer

N = 400_000
SPACE, LINES = " " * N, "\n" * N


def streamed(text: str) -> None:
    """Show a turn that arrives in pieces."""
    splitter = TurnSplitter(Kind.TEXT)
    for start in range(0, len(text), 200):
        splitter.feed(text[start : start + 200])
    splitter.end(())


TEXTS = {
    "answer: digits": (lambda text: verify(text, "7"), "<answer>\\boxed{" + "0" * N + "x}</answer>"),
    "answer: boxes": (lambda text: verify(text, "7"), f"<answer>\\boxed{{1}}{SPACE}x \\boxed{{2}}</answer>"),
    "format penalty": (lambda text: released_format_penalty(text, 3), "<answer>" * (N // 8)),
    "program: fences": (final_program, "```python\n" * (N // 10)),
    "program: language": (final_program, "```" + "a" * N),
    "final answer": (final_answer, f"#### 7{SPACE}x\n{SPACE}y"),
    "function calls": (lambda text: glaive_v2({"chat": f"USER: a{text}ASSISTANT: b"}), f"{LINES}x{LINES}"),
    "conversation: space": (conversation_messages, f"a{SPACE}b{LINES}<tool_response>{SPACE}x{SPACE}"),
    "metric": (canonical, "eval/" * (N // 5)),
    "turn": (lambda text: turn_text({"messages": [{"role": "assistant", "content": text}]}, 0), f"{SPACE}<|im_end|> x"),
    "stream": (streamed, '<tool_call>{"name": "f", "arguments": {"code": "' + "</tool_call>" * (N // 12)),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", TEXTS)
def test_hostile_text_takes_linear_time(name):
    read, text = TEXTS[name]
    read(text)


def test_text_is_read_as_before():
    assert up_to_last("a<b>c<b>d", "<b>") == "a<b>c<b>" and up_to_last("a", "<b>") == ""
    assert final_answer("so\n#### 1,234 \n") == "1,234" and final_answer("#### Step 1\n\\boxed{3}\n") == "3"
    assert final_program("```\nx\n```\n<answer>```python\nprint(1)\n```</answer>") == ("python", "print(1)\n")
    assert final_program("  ```cpp\n  int x;\n  ```\n```python\nopen") == ("cpp", "int x;\n")
    text = "first <|im_end|>\n<|im_start|>user\n<tool_response>\n 1 \n</tool_response>\nassistant\n  <tool_response>2"
    found = [(message["role"], message["content"]) for message in conversation_messages(text)]
    assert found == [("assistant", "first"), ("tool", "1"), ("assistant", ""), ("tool", "2")]
    messages, _ = glaive_v2({"chat": "USER: a \n\n \nASSISTANT: b\n\nUSER: c"})
    assert [message.content for message in messages] == ["a", "<reason></reason>\n<answer>b</answer>"]
    penalties = [
        released_format_penalty(text, 3) for text in ("<answer></answer>" * 2, "<answer><answer></answer></answer>")
    ]
    assert penalties == [0.5, 1.0]


HOLES = {
    "problems.jsonl": (load_problems, "a line of more than"),
    "problems.csv": (load_problems, "a line of more than"),
    "problems.json": (load_problems, "larger than"),
    "log.jsonl": (doctor, "a line of more than"),
    "messages.jsonl": (lambda path: import_messages(path, path.parent), "a line of more than"),
    "recipe.yaml": (load_recipe, "larger than"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOLES)
def test_a_file_with_holes_does_not_take_all_memory(tmp_path, name):
    """It takes no disk, and reading it, or its only line, would take 4 TiB."""
    read, message = HOLES[name]
    (tmp_path / name).write_text("{")
    os.truncate(tmp_path / name, 2**42)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_merged_keys_of_yaml_do_not_multiply():
    levels = ["a0: &a0 {k0: 0, l0: 0}"]
    levels += [f"a{n}: &a{n} {{k{n}: 0, <<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    with pytest.raises(UserError, match=r"r: not YAML: more than 10,000 keys"):
        parse_yaml("\n".join(levels), "r")
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}", "r")["b"] == {"x": 1, "y": 2}
