"""The numbers of `rstar-lab demo --real` in the documentation follow from the recorded evaluations."""

from pathlib import Path

import pandas as pd

from rstar_lab.estimates import Side, format_interval, paired_difference, ratio
from rstar_lab.resources import benchmark_file

ROOT = Path(__file__).parents[2]


def test_held_out_results_in_the_docs_equal_the_recorded_ones():
    table = pd.read_csv(benchmark_file("smollm2-demo.csv"))
    pages = [(ROOT / name).read_text() for name in ("docs/get-started.md", "README.md")]
    for model, rows in table.groupby("model"):
        estimate = ratio(rows.correct.to_numpy(), rows.samples.to_numpy(), int(rows.samples.sum()))
        assert estimate.clusters == 64
        written = format_interval(estimate.as_list()).replace("%,", ",").replace("%]", "]")
        assert all(written in page for page in pages), (model, written)
    sft, rl = (table[table.model == model].sort_values("problem") for model in ("sft", "rl"))
    sides = [Side(rows.correct.to_numpy()[None], rows.samples.to_numpy()[None]) for rows in (sft, rl)]
    mean, low, high = (100 * value for value in paired_difference(*sides, n=128).as_list())
    assert all(f"{mean:.1f} points [{low:.1f}, {high:.1f}]" in page for page in pages), (mean, low, high)
