"""The fixtures of canitoolcall: what models of each family write, and the calls that it means."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rstar_lab.tool_calls import parse_tool_calls

canitoolcall = find_spec("canitoolcall")
if canitoolcall is None:
    pytest.skip("canitoolcall is not installed", allow_module_level=True)
FOLDER = Path(canitoolcall.origin).parent / "_data" / "fixtures"
SYNTAX = {
    ("qwen3-hermes", ""): "hermes",
    ("qwen3-xml", ""): "function_tags",
    ("llama", "meta-llama/Llama-3"): "json",
    ("gemma4", ""): "gemma4",
    ("glm", ""): "glm",
    ("gpt-oss", ""): "harmony",
}
MISSES: dict[str, str] = {}  # fixture: reason


def fixtures():
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
        family = json.loads((folder / "family.json").read_text())
        for file in sorted(folder.glob("*.jsonl")):
            for line in file.read_text().splitlines():
                fixture = json.loads(line)
                for (slug, model), syntax in SYNTAX.items():
                    if family["slug"] == slug and fixture["models"][0].startswith(model):
                        yield pytest.param(fixture, family, syntax, id=fixture["id"])


def canonical(value):
    """Return a comparable form: numbers by value, booleans apart from numbers."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int | float):
        return ("number", float(value))
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    return [canonical(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("fixture", "family", "syntax"), list(fixtures()))
def test_calls_of_models(fixture, family, syntax):
    model = next((m for m in family["reference_models"] if m["repo"] == fixture["models"][0]), {})
    stops, text = tuple(model.get("stop_tokens") or ()), fixture["raw_output"]
    while stops and text.endswith(stops):
        text = next(text.removesuffix(stop) for stop in stops if text.endswith(stop))
    calls = parse_tool_calls(text, syntax=syntax, tools=fixture.get("tools") or [])
    found = [(call.name, canonical(call.arguments)) for call in calls if call.error is None]
    wanted = [
        (call["name"], canonical(call["arguments"])) for call in (fixture.get("expected") or {}).get("tool_calls") or []
    ]
    assert (found == wanted) == (fixture["id"] not in MISSES), calls


def test_all_fixtures_of_the_supported_families_are_read():
    assert len(list(fixtures())) == 278
