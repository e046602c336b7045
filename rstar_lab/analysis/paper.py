"""Published results of rStar2-Agent (arXiv 2508.20722)."""

import json
import re
from functools import cache
from importlib import resources
from typing import Any

MODEL = "rStar2-Agent-14B"
SETS = ("math500", "aime24", "aime25", "hmmt25")
OTHER_SET = "other set"  # column of the results table for evaluations on other problems
TOOL_ERRORS = "tool_error_rate_correct"


@cache
def published() -> dict[str, Any]:
    """Return the published numbers: pass1 and response_tokens by model and set, stages, general benchmarks, tool calls.

    `source` is the table or figure of the paper, `steps` the number of RL steps.
    """
    return json.loads((resources.files("rstar_lab.analysis") / "paper.json").read_text())


def compact(name: str) -> str:
    """Return the name of a problem set in the form of the published tables: aime24 for AIME-2024, hmmt25 for hmmt_feb_2025."""
    return re.sub(r"[^a-z0-9]|feb", "", name.lower()).replace("202", "2")


def set_name(name: str) -> str:
    """Return the name of a problem set in the published tables, or `name` if they do not have the set."""
    return compact(name) if compact(name) in SETS else name


def reference_name(metric: str) -> str:
    """Return the model whose value `reference` returns. For tool errors: the model trained without RoC, whose rate stays on a plateau."""
    return "Qwen3-14B without RoC" if metric == TOOL_ERRORS else MODEL


def reference(metric: str) -> float | None:
    """Return the published value of a metric such as eval/aime24/pass1, as a share for rates; None if the paper has none."""
    if metric == TOOL_ERRORS:
        return float(published()[f"{TOOL_ERRORS}_without_roc"]["Qwen3-14B"]) / 100
    problems, _, kind = metric.removeprefix("eval/").rpartition("/")
    value = published().get(kind, {}).get(MODEL, {}).get(set_name(problems)) if problems else None
    if value is None:
        return None
    return value / 100 if kind == "pass1" else float(value)
