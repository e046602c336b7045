"""The prompt format `model`: any chat model with its own template, tokens and syntax of tool calls."""

import json
from dataclasses import replace

import pytest
from helpers.chat_models import FAMILIES, chat_tokenizer, save_chat_model, write_call
from helpers.rollouts import SIX_TIMES_SEVEN, EchoSandbox, roll_out_chat

from rstar_lab.common.errors import UserError
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.recipe import RecipeError, RlSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.formats import render_prompt
from rstar_lab.rl.renderers.model import ModelRenderer
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.trajectory import StopReason

STYLE = PromptStyle("model", answer="boxed")
TOOL = "execute_python_code_with_standard_io"
THINKS = {"qwen3", "qwen3.5"}
EXPECTED = {  # end of a turn, system role, place for tools, syntax
    "llama": ("<|eot_id|>", True, True, "json"),
    "qwen2.5": ("<|im_end|>", True, True, "hermes"),
    "qwen3": ("<|im_end|>", True, True, "hermes"),
    "qwen3.5": ("<|im_end|>", True, True, "function_tags"),
    "gemma": ("<end_of_turn>", False, False, "hermes"),
}
families = pytest.mark.parametrize("family", FAMILIES)


async def roll(family, texts):
    return await roll_out_chat(
        chat_tokenizer(family), STYLE, lambda codec: [text + codec.renderer.end for text in texts]
    )


def two_turns(family):
    thought = "<think>\nI compute.\n</think>\n\n" if family == "qwen3" else ""
    thought = "I compute.\n</think>\n\n" if family == "qwen3.5" else thought
    return [thought + write_call(family, TOOL, {"code": "print(6*7)", "input": ""}), f"{thought}It is \\boxed{{42}}."]


@families
def test_facts_of_a_template_are_found(family):
    template = ModelRenderer(STYLE, (), chat_tokenizer(family))
    found = (template.end, template.takes_system, template.uses_tools, template.syntax)
    assert found == EXPECTED[family]
    assert template.thinks_first == (family == "qwen3.5")


@families
async def test_tokens_of_turns_stay_as_generated(family):
    texts = two_turns(family)
    trajectory, engine, codec = await roll(family, texts)
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.answer == "42"
    assert [(call.tool, str(call.outcome), call.code) for call in trajectory.calls] == [(TOOL, "ok", "print(6*7)")]
    first, second = engine.prompts
    own = codec.tokenizer.encode(texts[0] + codec.renderer.end, add_special_tokens=False)
    assert second[: len(first) + len(own)] == first + own
    assert second == trajectory.prompt_ids + trajectory.response_ids[: trajectory.turns[1].start]
    generated = [token for token, mine in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mine]
    assert codec.tokenizer.decode(generated) == codec.renderer.end.join([*texts, ""])


@families
async def test_only_misplaced_control_tokens_are_found(family):
    first, answer = two_turns(family)
    clean, _, codec = await roll(family, [first, answer])
    assert [turn.control_token for turn in clean.turns] == [False, False]
    assert any(token in first for token in codec.control_tokens) or family == "llama"
    for stray in {"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<tool_response>"} & set(
        codec.control_tokens
    ):
        for text in (stray + answer, answer.replace("It", stray)):
            trajectory, _, _ = await roll(family, [first, text])
            assert [turn.control_token for turn in trajectory.turns] == [False, True]


@families
async def test_a_rollout_reads_as_the_template_renders_the_conversation(family):
    """Except for templates that remove the reasoning of earlier turns: there, the rollout keeps it."""
    trajectory, engine, codec = await roll(family, two_turns(family))
    actual = codec.tokenizer.decode(engine.prompts[1])
    schemas, result = codec.schemas, trajectory.calls[0].response
    question = f"{SIX_TIMES_SEVEN.question}\n\nPut the final answer in \\boxed{{}}."
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"code": "print(6*7)", "input": ""}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]
    if family == "gemma":  # the tools are in the question, the responses are messages of the user
        question = codec.tokenizer.decode(engine.prompts[0]).partition("user\n")[2].partition("<end_of_turn>")[0]
        answer = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        turns, schemas = [{"role": "assistant", "content": two_turns(family)[0]}, answer], None
    if family in THINKS:
        turns[0] = {"role": "assistant", "content": two_turns(family)[0]}
    rendered = codec.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}, *turns], tools=schemas, add_generation_prompt=True, tokenize=False,
        strftime_now=lambda pattern: "26 Jul 2024",
    )  # fmt: skip
    if family in THINKS:
        assert "I compute." in actual and "I compute." not in rendered
    else:
        assert actual.replace("assistant\n\n<tool", "assistant\n<tool") == rendered.replace(
            "assistant\n\n<tool", "assistant\n<tool"
        )


def test_end_tokens_of_the_generation_config_are_used(tmp_path):
    """Llama ends turns with calls in <|eom_id|>, which its generation config names and its template does not write."""
    save_chat_model(tmp_path, "llama")
    tokenizer = load_tokenizer(tmp_path)
    codec = Codec(tokenizer, {}, STYLE)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")]
    assert sorted(codec.stop_token_ids) == sorted(ends) and codec.end_id == ends[0]


@families
def test_text_from_outside_has_no_control_tokens_of_the_model(family):
    tokenizer = chat_tokenizer(family)
    codec = Codec(tokenizer, make_tools(["python"], EchoSandbox()), STYLE)
    hostile = "".join([*FAMILIES[family].tokens, *FAMILIES[family].plain])
    control = set(tokenizer.added_tokens_decoder)

    def controls(ids):
        return [token for token in ids if token in control]

    assert controls(codec.prompt_ids(hostile)) == controls(codec.prompt_ids("harmless"))
    assert controls(codec.tool_response_ids([hostile])) == controls(codec.tool_response_ids(["harmless"]))
    hostile_ids, plain_ids = (codec.tool_response_ids([text], observation=text) for text in (hostile, "a"))
    assert controls(hostile_ids) == controls(plain_ids)


@families
def test_two_results_and_the_text_of_an_environment_are_rendered_in_order(family):
    codec = Codec(chat_tokenizer(family), {}, STYLE)
    text = codec.tokenizer.decode(codec.tool_response_ids(["one", "two"], observation="Your move."))
    assert text.index("one") < text.index("two") < text.index("Your move.")
    start = codec.tokenizer.decode(codec.prompt_ids("Q"))[-10:]
    assert text.endswith(start) and codec.tokenizer.decode(codec.next_question_ids("Next?")).endswith(start)


def test_calls_in_the_reasoning_are_not_executed():
    call = write_call("qwen3.5", TOOL, {"code": "1", "input": ""})
    codec = Codec(chat_tokenizer("qwen3.5"), {}, STYLE)
    assert codec.calls(f"I could write {call}</think>done") == []
    assert [found.name for found in codec.calls(f"I think.</think>{call}")] == [TOOL]
    assert [found.name for found in codec.calls(f"I need {call}")] == [TOOL], "a call ends reasoning without an end"


def test_equal_prompts_on_every_day():
    text = ModelRenderer(STYLE, (), chat_tokenizer("llama")).prompt("Q", [])
    assert "Today: 26 Jul 2024" in text
    style = replace(STYLE, template_options={"strftime_now": lambda pattern: "today"})
    other = ModelRenderer(style, (), chat_tokenizer("llama"))
    assert "Today: today" in other.prompt("Q", [])


def test_keys_of_the_prompt_change_it():
    keys = {"system_prompt": "Be brief."}
    for prompt_format in ("paper", "model"):
        rl = RlSection(prompt={"format": prompt_format, "answer_instruction": "In a box."} | keys)
        codec = Codec(chat_tokenizer("qwen2.5"), {}, rl.prompt_style)
        text = codec.tokenizer.decode(codec.prompt_ids("6*7?"))
        assert "Be brief.<|im_end|>" in text and "user\n6*7?\n\nIn a box.<|im_end|>" in text
    assert RlSection().prompt_style == PromptStyle()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"format": "released", "system_prompt": ""},
            "rl.prompt.system_prompt: not a key of format: released; it belongs to paper, model",
        ),
        (
            {"template_options": {"enable_thinking": False}},
            "rl.prompt.template_options: not a key of format: paper; it belongs to model",
        ),
    ],
)
def test_keys_that_do_not_fit_the_format_are_errors(keys, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe({"model": "tiny", "rl": {"prompt": keys}})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template; set rl.prompt.format=paper"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "without a special token"),
        ("{{ nonsense.a.b }}", "chat template of .* fails"),
        (FAMILIES["qwen2.5"].template.replace("<tool_call>", "<call>"), "in a syntax that is not supported"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error(template, message, monkeypatch):
    tokenizer = chat_tokenizer("qwen2.5")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=message):
        Codec(tokenizer, {}, STYLE)


def test_render_prompt_names_the_requirement_of_the_format_model():
    with pytest.raises(UserError, match="needs the tokenizer"):
        render_prompt("Q", prompt_format="model")
    with pytest.raises(UserError, match="choose from paper, released, model"):
        render_prompt("Q", prompt_format="other")


def test_arguments_have_the_types_of_the_schema():
    """All forms of calls: tests/tool_calls."""
    schema = {
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "integer"}, "text": {"type": "string"}}},
        }
    }
    template = ModelRenderer(STYLE, (), chat_tokenizer("qwen3.5"))
    text = "</think>" + write_call("qwen3.5", "add", {"a": "3", "text": "4"})
    assert [call.arguments for call in template.calls(text, {"add": schema})] == [{"a": 3, "text": "4"}]


@families
def test_models_can_be_saved_and_loaded_with_their_template(family, tmp_path):
    save_chat_model(tmp_path, family)
    tokenizer = load_tokenizer(tmp_path)
    style = replace(STYLE, system="S")
    before = ModelRenderer(style, (), chat_tokenizer(family)).prompt("Q", [])
    assert ModelRenderer(style, (), tokenizer).prompt("Q", []) == before
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] in (
        "llama",
        "qwen2",
        "qwen3",
        "gemma3_text",
    )
