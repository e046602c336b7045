"""Check that the chat template of a model folder, which comes from other people, ends: nested loops can run for years.

`check_template` starts this file as a program. It renders conversations with limits of CPU time and memory, and imports only jinja2.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Any

CPU_S = 3  # for all conversations; templates of models need 0.02
MEMORY_BYTES = 2**30
WALL_S = 120.0
_TOO_LARGE = 3  # exit status

_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"code": "1"}}}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}
_TURNS = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "R", "name": "f", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "Q"},
)
_CONVERSATIONS = (_TURNS[:2], _TURNS[1:2], _TURNS[1:4], _TURNS, (_TURNS[1], _TURNS[4]))


def check_template(tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
    """Raise UserError if the chat template of a tokenizer does not end, or needs too much memory. A template that fails passes.

    Args:
        tokenizer: Tokenizer of a model folder.
        options: Further variables of the template.
    """
    template = getattr(tokenizer, "chat_template", None)
    templates = [*template.values()] if isinstance(template, dict) else [template]
    variables = {**getattr(tokenizer, "special_tokens_map", {}), **(options or {})}
    request = json.dumps([[text for text in templates if isinstance(text, str)], variables], default=str)
    if problem := _problem(request):
        from rstar_lab.common.errors import UserError

        raise UserError(
            f"the chat template of {tokenizer.name_or_path} {problem}, so it is not used; set rl.prompt.format=paper, or correct "
            "chat_template.jinja or tokenizer_config.json in the folder"
        )


@lru_cache(maxsize=32)
def _problem(request: str) -> str:
    """Return what is wrong with the templates of a request; empty if nothing is."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=request, text=True, capture_output=True, timeout=WALL_S
        )
    except subprocess.TimeoutExpired:
        return f"could not be rendered within {WALL_S:g} s"
    if done.returncode < 0:
        return f"does not end within {CPU_S} s of CPU time"
    return f"needs more than {MEMORY_BYTES >> 20} MiB" if done.returncode == _TOO_LARGE else ""


def main() -> None:
    """Render the templates of a request on standard input."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `generation` of transformers, which marks the turns of the model."""

        tags = {"generation"}  # noqa: RUF012  declared by jinja2

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    templates, variables = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda _: "26 Jul 2024",
        "date_string": "26 Jul 2024",
    }
    for text, messages, tools in product(templates, _CONVERSATIONS, (None, [_SCHEMA])):
        values = {
            "messages": list(messages),
            "tools": tools,
            "add_generation_prompt": messages[-1]["role"] != "assistant",
        }
        try:
            environment.from_string(text).render(**(variables | values))
        except MemoryError:
            sys.exit(_TOO_LARGE)
        except Exception:  # a template may refuse a conversation; the renderer reports errors
            pass


if __name__ == "__main__":
    main()
