"""The progress bar of long work on a terminal."""

import io
import re

import pytest
from rich.console import Console

from rstar_lab.progress import Reporter


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
