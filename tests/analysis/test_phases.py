"""The table of held-out results by phase."""

from helpers.notebooks import GOLDEN

from rstar_lab.analysis import measure, open_runs, phase_table


def test_phases_are_in_order_and_have_intervals():
    table = phase_table(GOLDEN, "tiny_fast", ("pass1",))
    assert list(table.index) == ["before training", "after SFT", "after RL"]
    ((value, low, high),) = measure(open_runs(GOLDEN, run_ids=["tiny_fast-eval-rl"]), ["pass1"])[
        ["value", "low", "high"]
    ].to_numpy()
    assert table.loc["after RL", "eval"].iloc[0] == f"{value:.1%} [{low:.1%}, {high:.1%}]"


def test_a_training_without_evaluations_says_so():
    table = phase_table(GOLDEN, "nothing")
    assert table.empty and "no evaluation" in table.columns[0]
