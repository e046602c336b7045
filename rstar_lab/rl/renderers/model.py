"""The prompt format `model`: prompts, tool responses and tool calls as the model's own chat template writes them.

A chat template renders whole conversations, and many change earlier turns: they remove the reasoning or write the calls in
another form. Rendering the conversation again after every turn would then give tokens that the model neither saw nor
generated. Therefore the template is used only for the text around a turn: the prompt before the first turn, and the
text that follows the token that ends a turn. The model's own tokens are never rendered again.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.renderers.base import PromptStyle, Render, Renderer, Texts
from rstar_lab.rl.renderers.paper import ANSWER_REQUEST, TOOLS_INTRO, PaperRenderer, neutralise
from rstar_lab.tool_calls import SYNTAXES, Syntax, find_syntax, parse_turn, text_outside_calls
from rstar_lab.untrusted.files import read_json
from rstar_lab.verify import AnswerFormat

# Templates that insert today's date get this date, so that equal seeds give equal prompts. It is the default of Llama
# 3.1.
_DATE = datetime(2024, 7, 26)
_INSTRUCTIONS: dict[AnswerFormat, str] = {
    "tagged": ANSWER_REQUEST,
    "boxed": "Put the final answer in \\boxed{}.",
    "last_number": "End with the final answer as a number.",
}
_TURN = "T7u1r6n"  # stands for what the model wrote
_RESULTS = ("R4e1s", "R9e2s")  # stand for two tool responses
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Code."}},
            "required": ["code"],
        },
    },
}


class TemplateError(UserError):
    """A chat template cannot render a conversation."""


class ModelRenderer(Renderer):
    """The format of a model: the chat template of its tokenizer, or a user's function that replaces it.

    The template options of the style are further variables of the
    template, such as `enable_thinking`. Raises UserError if there is no template, or if it cannot be used.

    Attributes:
        takes_system: Whether the template renders a system message.
        uses_tools: Whether the template renders function schemas; if not, tools are described in the system prompt, and
            tool responses are user messages.
        calls_needed: Whether it renders tool responses only after a turn with calls.
    """

    name = "model"
    has_template = False
    code_tools = PaperRenderer.code_tools

    def __init__(
        self,
        style: PromptStyle = PromptStyle("model"),
        control_tokens: Sequence[str] | None = None,
        tokenizer: Any = None,
        render: Render | None = None,
    ):
        super().__init__(style, control_tokens, tokenizer, render)
        if tokenizer is None:
            raise UserError(
                "prompt_format model needs the tokenizer of the model: use ModelRenderer(style, tokens, tokenizer)"
            )
        self.options, self.render = dict(style.template_options), render
        self.source = (
            getattr(render, "__name__", "")
            if render
            else f"prompt_format model: the chat template of {tokenizer.name_or_path}"
        )
        if not tokenizer.chat_template and render is None:
            raise UserError(
                f"prompt_format model: the tokenizer in {tokenizer.name_or_path} has no chat template; set "
                "rl.prompt.format=paper"
            )
        self._probe()
        self.thinks_first = self._first_prompt("Q", [], "").rstrip().endswith(("<think>", "<|channel>thought"))

    # Methods that the agent loop uses

    def prompt(self, question: str, schemas: Sequence[dict[str, Any]]) -> str:
        """Return the first prompt, up to the start of generation. Raises TemplateError."""
        return self._first_prompt(self.question_turn(question), schemas, self.style.system or "")

    def _first_prompt(self, question: str, schemas: Sequence[dict[str, Any]], system: str) -> str:
        question, system = self._plain(question), self._plain(system)
        if schemas and not self.uses_tools:
            listed = "".join(json.dumps(schema, ensure_ascii=False) + "\n" for schema in schemas)
            system = f"{system}\n\n{listed.join(TOOLS_INTRO)}".lstrip()
        messages = [_user(question)]
        if system and self.takes_system:
            messages = [{"role": "system", "content": system}, *messages]
        elif system:
            messages = [_user(f"{system}\n\n{question}")]
        return self._render(messages, schemas if self.uses_tools else (), generate=True)

    def continuation(self, results: Texts, user_text: str | None = None, *, names: Texts = (), ended: str = "") -> str:
        """Return the text that follows the token that ends a turn, up to the start of generation. Raises TemplateError."""
        results, user_text = [self._plain(text) for text in results], self._plain(user_text or "")
        if not self.uses_tools:
            blocks = [f"<tool_response>\n{text}\n</tool_response>" for text in results]
            return self._after_turn(
                {"role": "assistant", "content": _TURN}, [_user("\n".join([*blocks, user_text]).strip())]
            )
        turn: dict[str, Any] = {"role": "assistant", "content": _TURN}
        tools = [
            {"role": "tool", "content": text, "name": "probe_tool", "tool_call_id": _call_id(index)}
            for index, text in enumerate(results)
        ]
        if results and self.calls_needed:
            calls = [_call(index, {"code": _TURN}) for index in range(len(results))]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._after_turn(turn, [*tools, *([_user(user_text)] if user_text else [])])

    @classmethod
    def instruction(cls, answer: AnswerFormat) -> str:
        return _INSTRUCTIONS[answer]

    def text_outside_calls(self, text: str) -> str:
        """Return what a turn contains besides its calls and the tags of its reasoning."""
        end = parse_turn(text, self.syntax).reasoning_end
        reasoning = text[:end].lstrip().removeprefix("<think>").removesuffix("</think>")
        return text_outside_calls(reasoning + text[end:], self.syntax)

    def stop_tokens(self) -> list[int]:
        """Return the ids of the tokens that end a turn: the template's, and those in generation_config.json."""
        ids = [self.tokenizer.convert_tokens_to_ids(self.end)]
        path = Path(self.tokenizer.name_or_path or ".") / "generation_config.json"
        if path.is_file():
            end_ids = read_json(path, dict).get("eos_token_id")
            ids += end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids]
        return ids

    # Properties of the template

    def _probe(self) -> None:
        """Find out what the template renders."""
        self.takes_system = self._contains([{"role": "system", "content": _TURN}, _user("Q")], _TURN)
        self.end = self._find_end()
        self.uses_tools, self.calls_needed = self._find_tool_use()
        self.syntax = self._find_syntax() if self.uses_tools else "hermes"

    def _find_end(self) -> str:
        """Return the special token that the template writes after a turn of the model."""
        text = self._render([_user("Q"), {"role": "assistant", "content": _TURN}])
        after = text.rpartition(_TURN)[2]
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        candidates = [token for token in {*added, self.tokenizer.eos_token} if token and token in after]
        if _TURN not in text or not candidates:
            raise UserError(f"{self.source} ends a turn without a special token")
        return min(candidates, key=lambda token: (after.index(token), -len(token)))

    def _find_tool_use(self) -> tuple[bool, bool]:
        """Return `uses_tools` and `calls_needed`. Raises UserError if the template renders schemas but no tool responses."""
        if not self._contains([_user("Q")], "probe_tool", [_PROBE_SCHEMA]):
            return False, False
        for calls_needed in (False, True):
            self.uses_tools, self.calls_needed = True, calls_needed
            try:
                text = self.continuation(_RESULTS)
            except TemplateError:
                continue
            if -1 < text.find(_RESULTS[0]) < text.find(_RESULTS[1]):
                return True, calls_needed
        raise UserError(f"{self.source} renders function schemas, but no tool responses")

    def _find_syntax(self) -> Syntax:
        """Return the syntax of the calls that the template writes."""
        for arguments in ({"code": "print(1)"}, json.dumps({"code": "print(1)"})):
            call = _call(0, arguments)
            messages = [_user("Q"), {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                text = self._render(messages, [_PROBE_SCHEMA])
                before = self._render(messages[:1], [_PROBE_SCHEMA], generate=True)
            except TemplateError:
                continue
            same = len(commonprefix([text, before]))  # noqa: RUF071  of texts, not of paths
            turn = text[same:].partition(self.end)[0]
            if syntax := find_syntax(turn.rpartition("</think>")[2], "probe_tool", {"code": "print(1)"}):
                return syntax
        raise UserError(
            f"{self.source} writes tool calls in a syntax that is not "
            f"supported; supported: {', '.join(SYNTAXES)} (docs/recipes.md)"
        )

    def _contains(self, messages: list[dict[str, Any]], text: str, tools: Sequence[dict[str, Any]] = ()) -> bool:
        try:
            return text in self._render(messages, tools)
        except TemplateError:
            return False

    def _after_turn(self, turn: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        text = self._render([_user("Q"), turn, *messages], generate=True)
        _, separator, after = text.rpartition(_TURN)
        _, end, after = after.partition(self.end)
        if not separator or not end:
            raise TemplateError(f"{self.source} leaves out a turn of the model, so the text after it cannot be found")
        return after

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, generate: bool = False
    ) -> str:
        if self.render:
            return self.render(messages, tools, generate)
        variables = {"strftime_now": _DATE.strftime, "date_string": _DATE.strftime("%d %b %Y")} | self.options
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=generate, tokenize=False, **variables
            )
        except Exception as error:  # templates raise errors of Jinja and of Python
            raise TemplateError(f"{self.source} fails: {error}") from error

    def _plain(self, text: str) -> str:
        return neutralise(text, self.control_tokens)


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call_id(index: int) -> str:
    return f"call{index:05d}"  # Mistral's templates require nine characters


def _call(index: int, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    function = {"name": "probe_tool", "arguments": arguments}
    return {"id": _call_id(index), "type": "function", "function": function}
