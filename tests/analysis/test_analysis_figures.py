"""Tests of figures (values, rollouts behind points, saved files) and of the comparison card."""

import re
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
from helpers.analysis_runs import make_run

from rstar_lab.analysis.comparison import _conclusion, compare
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.figures import plot_curves, plot_lengths, plot_outcomes, plot_pass_at_k
from rstar_lab.analysis.inspector.export import content_hash
from rstar_lab.analysis.inspector.link import data_table
from rstar_lab.analysis.metrics import measure
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common.estimates import critical_t
from rstar_lab.runs import RunStoreError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for roc in ("paper", "none"):
        for seed in range(3):
            make_run(folder, f"{roc}{seed}", roc=roc, seed=seed, steps=4)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return open_runs(folder)


@pytest.mark.slow
def test_curves_average_seeds_and_band_them(runs):
    figure = plot_curves(runs, ["pass1"], by="rl.method.roc.rule")
    assert set(figure.frame.group) == {"rule: paper", "rule: none"}
    point = figure.frame[(figure.frame.group == "rule: paper") & (figure.frame.step == 2)].iloc[0]
    values = measure(runs, ["pass1"], where="run_id LIKE 'paper%' AND step = 2")["value"]
    assert point["value"] == pytest.approx(values.mean())
    assert (point.runs, point.n) == (3, 96)
    half = critical_t(2) * values.std(ddof=1) / np.sqrt(3)
    assert point.high == pytest.approx(min(1, values.mean() + half))


def test_the_band_of_a_single_run_is_over_problems(folder):
    figure = plot_curves(open_runs(folder / "paper0"), ["pass1"])
    frame = figure.frame[figure.frame.metric == "pass1"]
    assert (frame.low <= frame["value"]).all() and (frame["value"] <= frame.high).all()
    assert frame.high.gt(frame.low).any()
    assert any("two" in annotation.text for annotation in figure.layout.annotations)  # the stage that starts at step 3


def test_a_panel_without_values_says_so(folder):
    figure = plot_curves(open_runs(folder / "paper0"), ["pass1", "entropy"], where="step > 99")
    assert [note.text for note in figure.layout.annotations] == [
        "pass@1",
        "entropy (nats per token)",
        *["no values"] * 2,
    ]
    assert figure.layout.xaxis.visible is False and figure.layout.yaxis2.visible is False


def test_where_selects_the_rollouts_of_each_point(runs):
    figure = plot_curves(runs, ["pass1"], by="rl.method.roc.rule")
    checked = 0
    for number, trace in enumerate(figure.data):
        if trace.customdata is None:
            assert figure.where(number, [0]) == {"any": []}
            continue
        for index in range(len(trace.x)):
            rows = runs.trajectories(figure.where(number, [index]))
            means = (rows.reward > 0).groupby(rows.run_id).mean()
            assert means.mean() == pytest.approx(trace.y[index])
            checked += 1
    assert checked == 8
    bars = plot_outcomes(runs, where={"run_id": "none0", "rewarded": True})
    bar = bars.data[0]
    rows = runs.trajectories(bars.where(0, [0]))
    assert len(rows) and rows.reward.gt(0).all() and set(rows.run_id) == {"none0"}
    assert all(bar.name in list(kinds) for kinds in rows.outcomes)


def test_tokens_on_the_x_axis_include_dropped_rollouts(runs):
    frame = plot_curves(runs, ["pass1"], x="rollouts").frame
    assert frame[frame.group == "paper0"].x.tolist() == [32, 64, 96, 128]
    tokens = plot_curves(runs, ["pass1"], x="tokens").frame
    last = tokens[(tokens.group == "none1") & (tokens.step == 4)].x.iloc[0]
    assert last == runs.trajectories({"run_id": "none1"}).response_tokens.sum()
    with pytest.raises(RunStoreError, match="x must be one of"):
        plot_curves(runs, x="time")


def test_lengths_and_pass_at_k_equal_those_of_the_rows(runs):
    lengths = plot_lengths(runs, {"run_id": "none0"}).frame
    tokens = runs.trajectories({"run_id": "none0", "step": 1}).response_tokens
    assert lengths.p50[0] == tokens.median() and lengths.p90[0] == pytest.approx(np.quantile(tokens, 0.9))
    frame = plot_pass_at_k(runs, (1, 2), where={"step": 4}).frame
    assert len(frame) == 12 and frame.value.between(0, 1).all()


def test_an_unknown_recipe_key_is_an_error_with_the_nearest_key(runs):
    with pytest.raises(RunStoreError, match=r"did you mean rl.method.roc.rule\?"):
        plot_curves(runs, by="rl.method.roc.rul")


def test_figures_are_saved_as_csv_and_offline_html(runs, tmp_path):
    figure = plot_curves(runs, ["pass1"], by="rl.method.roc.rule")
    saved = pd.read_csv(figure.save(tmp_path / "f.csv"))
    assert len(saved) == len(figure.frame) == 8
    html = figure.save(tmp_path / "f.html").read_text()
    assert "Plotly.newPlot" in html and 'src="http' not in html  # self-contained: no network access
    policy = re.search(r'<head><meta http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    scripts = [content_hash(script) for script in re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)]
    assert policy.startswith(f"default-src 'none'; script-src {' '.join(scripts)}; ") and "unsafe-eval" not in policy
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for suffix in ("csv", "html", "json"):
        (tmp_path / f"link.{suffix}").symlink_to(mine)
        assert not figure.save(tmp_path / f"link.{suffix}").is_symlink() and mine.read_text() == "mine"
    with pytest.raises(RunStoreError, match="cannot save as"):
        figure.save(tmp_path / "f.gif")


@pytest.mark.slow
def test_figures_are_saved_as_png(runs, tmp_path):
    path = plot_curves(runs, ["pass1"], by="rl.method.roc.rule").save(tmp_path / "f.png")
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


def _contrast(one, other):
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_and_curves_have_contrast_on_light_and_dark_pages(runs):
    figure = plot_curves(runs, ["pass1"])
    for shown in (figure, figure.dark()):
        layout = shown.layout.template.layout
        assert _contrast(layout.font.color, layout.paper_bgcolor) > 7
        # Curves also differ in dash and symbol, so a low contrast is enough.
        assert all(_contrast(colour, layout.paper_bgcolor) > 2 for colour in COLOURS)
    assert isinstance(figure.dark(), Figure) and figure.dark().frame is figure.frame
    dashes = {(trace.line.dash, trace.marker.symbol) for trace in figure.data}
    assert len(dashes) == len(figure.data) == 6


def test_the_card_reports_paired_differences_and_a_conclusion(folder):
    grpo, roc = (open_runs(folder, run_ids=[f"{name}{seed}" for seed in range(3)]) for name in ("none", "paper"))
    card = compare(grpo, roc, ["tool_error_rate", "pass1", "entropy"], name_a="GRPO", name_b="RoC")
    row = card.table.set_index("metric").loc["tool_error_rate"]
    a, b = (measure(side, ["tool_error_rate"], by=())["value"][0] for side in (grpo, roc))
    assert row.difference == pytest.approx(b - a) and row.a == pytest.approx(a)
    assert row.high < 0 and row.conclusion == "better"
    assert "the data show a difference" in card.sentence and "3 and 3 runs" in card.sentence
    assert "<td>tool-error rate</td>" in card._repr_html_()
    assert "RoC" in card._repr_html_()


CONCLUSIONS = {  # interval of b - a: for a metric of which less is better, without a direction, of which more is better
    (0.1, 0.4): ("worse", "higher", "better"),
    (-0.4, -0.1): ("better", "lower", "worse"),
    (float("nan"), 0.1): ("too little data",) * 3,
} | dict.fromkeys([(-0.1, 0.4), (0.0, 0.4), (-0.4, 0.0)], ("no difference shown",) * 3)


@pytest.mark.parametrize(("interval", "words"), CONCLUSIONS.items())
def test_a_conclusion_needs_an_interval_beside_0(interval, words):
    assert tuple(_conclusion(*interval, better, single=False) for better in (-1, 0, 1)) == words


def test_the_card_reports_no_difference_if_the_interval_contains_0(folder):
    one, other = (open_runs(folder, run_ids=[run]) for run in ("paper0", "paper1"))
    card = compare(one, other, ["pass1"], where="step = 4")
    assert card.sentence.startswith("A side has one run: the intervals cover the choice of problems, not the seeds")
    assert "do not show a difference" in card.sentence
    with pytest.raises(RunStoreError, match="no problem in common"):
        compare(one, open_runs(folder, run_ids=["paper2"]), where="problem_id = 'p9'")


def test_flips_link_to_a_correct_and_an_incorrect_trajectory(folder):
    one, other = (open_runs(folder, run_ids=[run]) for run in ("none0", "paper1"))
    card = compare(one, other, ["pass1"], where="step = 1")
    flips = card.flips
    assert len(flips) > 0
    assert f'<a href="#rstar={quote(flips.traj_a[0], safe="")}">' in card._repr_html_()
    for flip in flips.to_dict("records"):
        before = one.trajectories({"traj_id": flip["traj_a"]}).iloc[0]
        after = other.trajectories({"traj_id": flip["traj_b"]}).iloc[0]
        assert before.problem_id == after.problem_id == flip["problem_id"]
        assert (before.reward > 0, after.reward > 0) == ((False, True) if flip["flip"] == "won" else (True, False))


def test_the_data_table_of_a_figure_escapes_text():
    frame = pd.DataFrame({"run": ["<b>mine</b>"], "value": [0.25], "where": ["run_id = 'mine'"]})
    html = data_table(frame)
    assert "&lt;b&gt;mine&lt;/b&gt;" in html and "0.25" in html and "run_id" not in html


def test_markup_in_a_name_is_escaped_in_the_card(folder):
    one = open_runs(folder, run_ids=["none0"])
    html = compare(one, one, ["pass1"], name_a="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


@pytest.mark.slow
def test_many_runs_are_drawn_as_eight_curves_and_the_others_are_named(tmp_path):
    for number in range(10):
        make_run(tmp_path, f"run{number}", steps=2)
    figure = plot_curves(tmp_path, ["pass1"])  # a path is opened
    assert figure.frame.group.nunique() == 8 and figure.frame.low.isna().all()
    left_out = {f"run{number}" for number in range(10)} - set(figure.frame.group)
    assert all(run in figure.layout.title.text for run in left_out)
