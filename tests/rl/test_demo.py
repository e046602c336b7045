"""`run_demo` returns a stored result only for the settings with which it was made."""

import asyncio

import pytest

from rstar_lab.common.progress import Reporter
from rstar_lab.rl import demo
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.runs.files import write_json


class Started(Exception):
    """The demo starts to train instead of returning the stored result."""


def test_other_settings_start_a_new_demo(tmp_path, monkeypatch):
    def start(*_):
        raise Started

    monkeypatch.setattr(demo.RunSession, "open", start)
    recipe = load_recipe("tiny_fast", {"runs": str(tmp_path / "runs")})
    settings = recipe.model_dump(mode="json", exclude={"runs"})
    result = {key: str(tmp_path) for key in ("report", "run", "model_sft", "model_rl")}
    result |= {f"pass1_{name}": [0.1, 0.0, 0.2] for name in ("base", "sft", "rl")}
    result |= {"error_rate_correct_sft": None, "error_rate_correct_rl": None, "seconds": 1.0, "peak_memory_gb": 1.0}
    (recipe.runs / ".demo").mkdir(parents=True)
    write_json(recipe.runs / ".demo" / f"{recipe.name}.json", {"recipe": settings, "result": result})
    assert asyncio.run(demo.run_demo(recipe, tmp_path, Reporter(True))) == result
    with pytest.raises(Started):
        asyncio.run(demo.run_demo(recipe.model_copy(update={"seed": 1}), tmp_path, Reporter(True)))


def test_a_missing_package_of_the_report_ends_the_demo_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "nbconvert" else True)
    monkeypatch.setattr(demo.RunSession, "open", lambda *_: pytest.fail("the demo has started"))
    recipe = load_recipe("tiny_fast", {"runs": str(tmp_path / "runs")})
    with pytest.raises(ModuleNotFoundError) as error:
        asyncio.run(demo.run_demo(recipe, tmp_path, Reporter(True)))
    assert error.value.name == "nbconvert"
