"""Inspector, code use, failures and importers read calls in every syntax that training reads."""

import json

import numpy as np
import pytest

from rstar_lab.analysis import import_messages, open_runs
from rstar_lab.analysis.code_use import tool_calls
from rstar_lab.analysis.inspector.transcript import segments
from rstar_lab.analysis.tokens import _calls
from rstar_lab.exchange.import_rows import conversation_counts, conversation_messages

CODE = "for i in range(3):\n    print('</think>', i)"
TURNS = {
    "hermes": f"plan</reason>\n<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': CODE}})}\n</tool_call>",
    "function_tags": f"<think>\nplan <tool_call> draft\n</think>\n\n<tool_call>\n<function=python>\n<parameter=code>\n{CODE}\n"
    "</parameter>\n</function>\n</tool_call>",
    "json": json.dumps({"name": "python", "parameters": {"code": CODE}}),
    "gemma4": f'<|channel>thought\nplan\n<channel|><|tool_call>call:python{{code:<|"|>{CODE}<|"|>}}<tool_call|>',
    "glm": f"plan</think><tool_call>python<arg_key>code</arg_key><arg_value>{CODE}</arg_value></tool_call>",
    "harmony": "<|channel|>analysis<|message|>plan<|end|><|start|>assistant to=functions.python<|channel|>commentary json"
    f"<|message|>{json.dumps({'code': CODE})}<|call|>",
}
syntaxes = pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)


@syntaxes
def test_the_inspector_shows_reasoning_and_code(turn):
    messages = [
        {"role": "assistant", "content": turn},
        {"role": "tool", "content": "1", "tool": "python", "outcome": "ok"},
    ]
    shown = segments({"messages": messages})
    assert [part.kind for part in shown] == [*(["reason"] if "plan" in turn else []), "code", "tool"]
    assert (shown[-2].text, shown[-2].tool, shown[-2].outcome) == (CODE, "python", "ok")


@syntaxes
def test_the_inspector_aligns_the_tokens_of_the_code(turn):
    tokens = list(turn)
    record = {
        "messages": [{"role": "assistant", "content": turn}],
        "token_texts": tokens,
        "loss_mask": [1] * len(tokens),
    }
    (code,) = [part for part in segments(record) if part.kind == "code"]
    assert code.starts[:5] == (0, 1, 2, 3, 4) and "".join(tokens[code.first : code.first + 5]) == "for i"


@syntaxes
def test_imported_calls_have_code_and_a_name(turn, tmp_path):
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": turn}], "reward": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    import_messages(tmp_path / "rows.jsonl", tmp_path / "runs")
    (call,) = tool_calls(open_runs(tmp_path / "runs")).to_dict("records")
    assert (call["code"], call["lines"]) == (CODE, 2)
    messages = conversation_messages(f"{turn}<tool_response>\n1\n</tool_response>\nDone.")
    assert messages[1]["tool"] == "python" and conversation_counts(messages)["calls"] == 1


@syntaxes
def test_tokens_of_calls_are_found_in_each_turn(turn):
    text, mask = turn + " result " + turn, [True] * len(turn) + [False] * 8 + [True] * len(turn)
    starts = np.arange(len(text))
    spans = _calls(text, np.array(mask), starts, starts + 1)
    assert len(spans) == 2 and all(CODE.split()[0] in text[start:end] for start, end in spans)
    assert all("plan" not in text[start:end] for start, end in spans)
