"""The progress bar of long work on a terminal."""

import io
import re

import pytest
from rich.console import Console

from rstar_lab.common import progress
from rstar_lab.common.progress import Reporter


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_shows_the_total_and_times_at_any_width(width):
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system=None)
    with Reporter(console=console).work("rl") as work:
        work.total = 34  # known only after the start
        work.update(
            5, "pass 26% · tool errors 19% (in correct 12%) · length 120 tokens · kept 50% of 128 · 3.2 s a step"
        )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).strip().split("\r")[-1]
    assert re.search(r"5/34 0:00:0\d -:--:-- p", shown) and len(shown) <= width


@pytest.mark.parametrize("earlier", [0, 50])
def test_the_start_and_earlier_parts_do_not_count_for_the_time_left(monkeypatch, earlier):
    """On a GPU the first step compiles, and after a resume the first number is that of the attempt before."""
    clock = iter([0.0, 11.0, 16.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    with Reporter(console=Console(file=output, width=120)).work("sft", 161 + earlier) as work:
        work.update(earlier + 1)
        work.update(earlier + 101)
    first, second = output.getvalue().splitlines()
    assert "left" not in first and first.endswith("(11 s)")
    assert second.endswith("(16 s, 3 s left)")
