"""The numbers of `rstar-lab demo` and `demo --real` in the documentation follow from the recorded evaluations."""

import re
from pathlib import Path

import pandas as pd

from benchmarks import own_model
from benchmarks.real_demo import errors, gain, held_out_table, percent, points, rate, readme_rows
from rstar_lab.common.resources import benchmark_file

ROOT = Path(__file__).parents[2]


def test_results_in_the_docs_equal_the_recorded_ones():
    table = pd.read_csv(benchmark_file("smollm2-demo.csv"))
    page, readme = ((ROOT / name).read_text() for name in ("docs/get-started.md", "README.md"))
    assert (table.groupby(["seed", "model"]).problem.nunique() == 64).all() and table.problem.nunique() == 64
    assert held_out_table(table) in page
    for model in ("base", "sft", "rl"):
        assert percent(rate(table[table.model == model])) in readme
    assert points(gain(table)) in page and points(gain(table)) in readme
    for model in ("sft", "rl"):
        failed, calls = errors(table, model)
        assert f"{failed} of {calls} calls" in page


def test_results_of_the_small_demo_equal_the_recorded_ones():
    table, curves = (pd.read_csv(benchmark_file(name)) for name in ("demo.csv", "demo-curves.csv"))
    readme, index = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    assert (table.groupby("model").problem.nunique() == 128).all()
    assert readme_rows(table) in readme
    # The figure shows all steps, and the last ones are as good as the evaluation after them.
    steps = curves.step.nunique()
    assert f"The {steps} RL steps of `make demo`" in readme and f"the {steps} training steps of the demo" in index
    last = curves[(curves.metric == "pass1") & (curves.step > steps - 4)]
    assert abs(last.value.mean() - rate(table[table.model == "rl"]).value) < 0.1


def test_results_of_the_own_model_equal_the_recorded_ones():
    sums = pd.read_csv(benchmark_file("own-model.csv"))
    page = own_model.PAGE.read_text()
    assert own_model.table(sums) in page and own_model.gain(sums, 1).low > 0
    assert re.findall(r"(\S+)-held_out-rl against (\S+)-held_out-sft", page) == [("recipe", "recipe")]
