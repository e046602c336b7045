"""The released prompt format equals texts recorded by running microsoft/rStar's own code (released_conversations.json)."""

import json
from pathlib import Path

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl import parse_tool_calls, render_prompt, render_tool_results
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.released import ReleasedRenderer
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.sandbox.call import Call, CallResult

RECORDED = json.loads((Path(__file__).parent / "released_conversations.json").read_text(encoding="utf-8"))
CONVERSATIONS = RECORDED["conversations"]
OUTCOMES = {"queue_timeout": Outcome.QUEUE_TIMEOUT, "internal_error": Outcome.SANDBOX_ERROR}


@pytest.mark.parametrize("index", range(len(CONVERSATIONS)))
def test_prompts_and_tool_responses_equal_the_release(index):
    conversation = CONVERSATIONS[index]
    prompt = render_prompt(conversation["question"], tools=conversation["tools"], prompt_format="released")
    assert prompt == conversation["prompt"]
    for turn in conversation["turns"]:
        texts = [ReleasedRenderer.truncate(text, turn["max_chars"], turn["side"]) for text in turn["raw"]]
        assert texts == turn["texts"]
        assert render_tool_results(texts, prompt_format="released") == turn["rendered"]


def test_result_texts_equal_the_release():
    compared = 0
    for turn in (turn for conversation in CONVERSATIONS for turn in conversation["turns"] if turn["judge"]):
        for judge, text in zip(turn["judge"], turn["raw"], strict=True):
            if judge["reason"] == "worker_timeout":
                continue  # a failure that our sandbox does not have
            outcome = Outcome.OK if judge["success"] else OUTCOMES.get(judge["reason"], Outcome.EXCEPTION)
            result = CallResult(outcome, judge["stdout"] or "", judge["stderr"] or "", None, judge["cost"])
            assert ReleasedRenderer.result_text(result) == text
            compared += 1
    assert compared > 60


@pytest.mark.parametrize("case", RECORDED["decode_errors"], ids=lambda case: case["error"][0][28:60])
def test_decode_errors_equal_the_release(case):
    (call,) = parse_tool_calls(case["turn"])
    assert [ReleasedRenderer.malformed_call_text(call)] == case["error"]


def test_recipe_names_and_prompt_names_of_tools_give_the_same_prompt():
    for format_name in ("paper", "released"):
        by_recipe = render_prompt("q", tools=["python_released", "jupyter"], prompt_format=format_name)
        by_prompt = render_prompt(
            "q", tools=["python_code_with_standard_io", "jupyter_code"], prompt_format=format_name
        )
        assert by_recipe == by_prompt
    with pytest.raises(UserError, match="unknown tool 'nope'; choose from python"):
        render_prompt("q", tools=["nope"], prompt_format="released")
    with pytest.raises(UserError, match="prompt_format 'hermes': choose from paper, released"):
        render_tool_results(["a"], prompt_format="hermes")


class EchoSandbox:
    async def run_many(self, calls: list[Call]) -> list[CallResult]:
        return [CallResult(Outcome.OK, f"{call.code}|{call.stdin}\n", "", None, 0.25) for call in calls]


async def test_rollout_tools_and_codec_use_the_released_texts():
    tools = make_tools(["python_released"], EchoSandbox(), prompt_format="released")
    assert list(tools) == ["python_code_with_standard_io"]

    async def response(text: str, max_chars: int = 256) -> str:
        (call,) = parse_tool_calls(f"<tool_call>{text}</tool_call>")
        renderer = ReleasedRenderer(PromptStyle("released", truncate_side="left"))
        result = await execute_call(call, tools, renderer, seed=0, traj_id="t", max_chars=max_chars)
        return result.text

    call = '{"name": "python_code_with_standard_io", "arguments": {"code": "1", "other": 2}}'
    assert await response(call) == "Tool call success\nstdout: 1|\n\nexecution time: 0.25s"
    assert await response(call, 9) == "Tool call...(truncated)"
    assert await response('{"name": "no", "arguments": {}}') == "Error when executing tool: 'no'"

    tokenizer = train_tokenizer(["text"], 300)
    codec = Codec(tokenizer, tools, PromptStyle("released"))
    expected = render_prompt("q", tools=["python_released"], prompt_format="released")
    assert tokenizer.decode(codec.prompt_ids("q")) == expected
    assert tokenizer.decode(codec.tool_response_ids(["a", "b"])) == render_tool_results(["a", "b"], "released")


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_one_character_of_a_response_can_be_kept(side):
    assert ReleasedRenderer.truncate("a" * 50, 1, side).count("a") - "(truncated)".count("a") <= 1


def test_the_tool_of_the_public_checkpoint_differs_by_its_name():
    card, repository = (ReleasedRenderer.code_tool(name)["function"] for name in ("python", "python_released"))
    assert card["name"] == "execute_python_code_with_standard_io" and card | {"name": repository["name"]} == repository
    named = render_prompt("q", tools=["execute_python_code_with_standard_io"], prompt_format="released")
    assert named == render_prompt("q", tools=["python"], prompt_format="released")
