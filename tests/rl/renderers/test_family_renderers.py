"""GLM, Gemma 4 and gpt-oss: rollouts of several turns have the tokens of the families' own chat templates."""

import json
from functools import cache
from pathlib import Path

import pytest
from helpers.chat_models import byte_tokenizer
from helpers.rollouts import roll_out_chat

from rstar_lab.common.errors import UserError
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.families import Gemma4Renderer, GlmRenderer, GptOssRenderer
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.trajectory import StopReason

TOOL = "execute_python_code_with_standard_io"
STYLE = PromptStyle("model", answer="boxed", system="Be brief.")
TOKENS = {
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<tool_call>"),
    "gemma4": ("<turn|>", "<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|channel>",
               "<channel|>", "<|tool>", "<tool|>", '<|"|>', "<|think|>", "<eos>"),
    "gpt_oss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
}  # fmt: skip
EOS = {"glm": "<|endoftext|>", "gemma4": "<eos>", "gpt_oss": "<|return|>"}
CALL_END = {"glm": "<|observation|>", "gemma4": "<|tool_response>", "gpt_oss": "<|call|>"}
ANSWER_END = {"glm": "<|user|>", "gemma4": "<turn|>", "gpt_oss": "<|return|>"}
families = pytest.mark.parametrize("family", TOKENS)


@cache
def tokenizer_of(family):
    template = (Path(__file__).parent / "templates" / f"{family}.jinja").read_text()
    return byte_tokenizer(template, TOKENS[family], EOS[family])


def write_calls(family, codes):
    """Return a turn with calls, without the token that ends it, as the template writes it."""
    if family == "glm":
        values = (f"<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n<arg_key>input</arg_key>\n<arg_value></arg_value>"
                  for code in codes)  # fmt: skip
        return "\n<think></think>" + "".join(f"\n<tool_call>{TOOL}\n{value}\n</tool_call>" for value in values)
    if family == "gemma4":
        return "".join(
            f'<|tool_call>call:{TOOL}{{code:<|"|>{code}<|"|>,input:<|"|><|"|>}}<tool_call|>' for code in codes
        )
    (code,) = codes
    return f" to=functions.{TOOL}<|channel|>commentary json<|message|>{json.dumps({'code': code, 'input': ''})}"


def answer(family):
    text = "It is \\boxed{42}."
    return {"glm": f"\n<think></think>\n{text}", "gemma4": text, "gpt_oss": f"<|channel|>final<|message|>{text}"}[
        family
    ]


def rendered(family, codec, turns, generate=True):
    """Return what the chat template renders for a conversation. turns: codes of the calls of each turn."""
    question = "What is 6 times 7?\n\nPut the final answer in \\boxed{}."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    for codes in turns:
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": TOOL, "arguments": {"code": code, "input": ""}}}
            for i, code in enumerate(codes)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        results = ({"role": "tool", "content": f"ran {code}", "tool_call_id": f"c{i}"} for i, code in enumerate(codes))
        messages += results
    return codec.tokenizer.apply_chat_template(
        messages, tools=codec.schemas, add_generation_prompt=generate, tokenize=False,
        strftime_now=lambda pattern: "2024-07-26",
    )  # fmt: skip


@families
async def test_a_rollout_of_three_turns_has_the_tokens_of_the_template(family):
    codes = [["print(6*7)"], ["1", "2"] if family != "gpt_oss" else ["1"]]
    turns = [write_calls(family, each) + CALL_END[family] for each in codes] + [answer(family) + ANSWER_END[family]]
    trajectory, engine, codec = await roll_out_chat(tokenizer_of(family), STYLE, lambda codec: turns)
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.answer == "42"
    assert [call.code for call in trajectory.calls] == [code for each in codes for code in each]
    assert not any(turn.control_token for turn in trajectory.turns)
    for number, prompt in enumerate(engine.prompts):
        expected = rendered(family, codec, codes[:number])
        assert codec.decode(prompt) == expected
        assert prompt == codec.encode(expected)
    own = [token for token, mine in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mine]
    assert codec.tokenizer.decode(own) == "".join(turns)


@families
def test_the_next_question_follows_the_answer(family):
    codec = Codec(tokenizer_of(family), {}, STYLE)
    last = codec.tokenizer.convert_tokens_to_ids(ANSWER_END[family])
    text = codec.tokenizer.decode([last, *codec.next_question_ids("And 6 times 8?", last)])
    assert text.count(ANSWER_END[family]) == (1 if family != "gemma4" else 2)
    assert text.endswith(codec.tokenizer.decode(codec.prompt_ids("Q"))[-12:]) and "And 6 times 8?" in text


@families
def test_the_observation_of_an_environment_follows_the_results(family):
    codec = Codec(tokenizer_of(family), {}, STYLE)
    last = codec.tokenizer.convert_tokens_to_ids(CALL_END[family])
    text = codec.tokenizer.decode(codec.tool_response_ids(["one"], ["f"], last, "Your move."))
    assert text.index("one") < text.index("Your move.") and not text.startswith(CALL_END[family])


@families
def test_text_from_outside_has_no_control_tokens(family):
    codec = Codec(tokenizer_of(family), {}, STYLE)
    hostile = "".join(TOKENS[family])
    control = set(codec.tokenizer.added_tokens_decoder)

    def controls(ids):
        return [token for token in ids if token in control]

    assert controls(codec.tool_response_ids([hostile], ["f"])) == controls(codec.tool_response_ids(["a"], ["f"]))
    assert controls(codec.prompt_ids(hostile)) == controls(codec.prompt_ids("a"))


def test_the_family_is_found_by_the_template():
    kinds = [type(Codec(tokenizer_of(family), {}, STYLE).renderer) for family in TOKENS]
    assert kinds == [GlmRenderer, Gemma4Renderer, GptOssRenderer]
    with pytest.raises(UserError, match=r"belongs to a tokenizer with <\|user\|>"):
        template = tokenizer_of("glm").chat_template
        Codec(byte_tokenizer(template, ("<|endoftext|>",), "<|endoftext|>"), {}, STYLE)


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        ("[TOOL_CALLS]", "Mistral"),
        ("<|tool_calls_section_begin|>", "Kimi K2"),
        ("<｜tool▁calls▁begin｜>", "DeepSeek V3"),
    ],
)
def test_other_families_are_refused_by_name(mark, name):
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if false %}" + mark + "{% endif %}"
    with pytest.raises(UserError, match=f"is that of {name}, whose tool calls are not supported"):
        Codec(byte_tokenizer(template, ("<|im_end|>",), "<|im_end|>"), {}, STYLE)
