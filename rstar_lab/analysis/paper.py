"""Published results of rStar2-Agent (arXiv 2508.20722)."""

import json
from functools import cache
from importlib import resources
from typing import Any

MODEL = "rStar2-Agent-14B"


@cache
def published() -> dict[str, Any]:
    """Return the published numbers: pass1 and response_tokens by model and set, stages, general benchmarks, tool calls.

    `source` is the table or figure of the paper, `steps` the number of RL steps.
    """
    return json.loads((resources.files("rstar_lab.analysis") / "paper.json").read_text())


def reference(metric: str) -> float | None:
    """Return the published value of a metric such as eval/aime24/pass1, as a share for rates; None if the paper has none."""
    _, _, rest = metric.partition("eval/")
    problems, _, kind = rest.partition("/")
    value = published().get(kind, {}).get(MODEL, {}).get(problems)
    if value is None:
        return None
    return value / 100 if kind == "pass1" else float(value)
