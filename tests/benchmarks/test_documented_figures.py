"""The figures of docs/benchmarks.md and README.md are those in benchmarks/data, the output of `rstar-lab bench NAME --json`."""

import csv
import json
import re
from pathlib import Path

import pytest
from helpers.cases import read_cases

from rstar_lab.common.resources import benchmark_file

ROOT = Path(__file__).parents[2]
# Text of the documentation with the fields of a line: {a.value} is the value of line `a`, {a.ratio} two digits of its ratio.
PAGE = read_cases(__file__, "figures.yaml")
README = {
    "sandbox": ["| {a.times}x (`print`), {b.times}x (numpy), {c.times}x (sympy) calls per second |"],
    "trainer": ["| {trainer_step.times}x (one turn), {trainer_step_multi_turn.times}x (three turns) |"],
}


class Line:
    """One line of a benchmark: its fields, `times` (two digits of the ratio), and `peer` (the number in the text of `against`)."""

    def __init__(self, fields: dict) -> None:
        self.__dict__ |= fields
        self.times = f"{float(f'{self.ratio:.2g}'):g}" if self.ratio else None
        words = self.against.split() if isinstance(self.against, str) else []
        self.peer = float(words[-2]) if re.fullmatch(r"[\d.]+", "".join(words[-2:-1])) else None


@pytest.mark.parametrize("name", PAGE)
def test_the_documentation_has_the_recorded_figures(name):
    records = map(json.loads, benchmark_file(f"bench-{name}.jsonl").read_text().splitlines())
    lines = {fields["name"].replace(".", ""): Line(fields) for fields in records}
    for file, texts in (("docs/benchmarks.md", PAGE[name]), ("README.md", README.get(name, []))):
        page = (ROOT / file).read_text()
        assert [text for text in (text.format(**lines) for text in texts) if text not in page] == []


def test_the_documentation_has_the_metrics_of_the_demo_on_a_gpu():
    with benchmark_file("demo-gpu.csv").open() as file:
        steps = list(csv.DictReader(file))

    def span(column, form):
        values = [float(step[column]) for step in steps]
        return f"{min(values):{form}} to {max(values):{form}}"

    page = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    for column, form in (("generate_s", ".2f"), ("update_s", ".2f"), ("weights_s", ".2f"), ("mismatch", ".5f")):
        assert span(column, form) in page, column
    assert f"(largest: {max(float(step['mismatch_max']) for step in steps):.3f})" in page
    assert {step[name] for step in steps for name in ("sandbox_failures", "engine_failures")} == {"0"}
