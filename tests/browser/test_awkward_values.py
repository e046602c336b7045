"""Open runs with unusual values (long, empty, right-to-left, not scored) in the widgets, at three widths, light and dark.

No text overlaps another one or is cut off, the transcript fills its share of the pane, and no text contradicts the row.

    pytest -m soak tests/browser/test_awkward_values.py
"""

import itertools
from pathlib import Path

import pytest
from helpers.awkward_runs import LONG_QUESTION, make_awkward_runs

from browser.lab_page import FAULTS, SHOTS
from browser.test_random_actions import SIZES, User
from browser.widget_page import WidgetPage
from rstar_lab.analysis import (
    explore,
    failed_rollouts,
    inspect,
    open_runs,
    overview,
    plot_curves,
    plot_failures,
    watch,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_awkward_runs(tmp_path_factory.mktemp("runs"), 1000)


@pytest.fixture(scope="module")
def runs(folder):
    return open_runs(folder)


def test_every_kind_of_rollout_is_shown_as_it_is(browser, runs):
    """One rollout of each question and answer, of each kind of run, and the longest transcript."""
    ids = [f"big-rl/1/{number}" for number in [*range(0, 80, 8), *range(1, 10)]]
    others = runs.sql("SELECT run_id, traj_id FROM trajectories WHERE run_id <> 'big-rl'").groupby("run_id").traj_id
    ids += [traj_id for _, part in others for traj_id in part.head(10)]
    user, faults = User(browser, runs, 0), []
    SHOTS.mkdir(parents=True, exist_ok=True)
    for size, scheme in itertools.product(SIZES, SCHEMES):
        user.size = size
        user.page.set_viewport_size({"width": size[0], "height": size[1]})
        user.page.emulate_media(color_scheme=scheme)
        for traj_id in ids:
            user.done = [f"{traj_id} at {size}"]
            user.widget.selected = traj_id
            user.shown.sync()
            user.check()
            found = [f"{traj_id} {size} {scheme}: {fault}" for fault in user.page.evaluate(FAULTS)]
            if found:
                user.page.screenshot(path=SHOTS / f"awkward-{len(faults)}.png")
            faults += found
    user.shown.close()
    assert not faults, "\n".join(faults)


def test_a_long_problem_leaves_the_rollout_in_view(browser, runs):
    page = WidgetPage(browser, inspect(runs, selected="big-rl/1/0"), (1400, 900))
    page.wait("() => document.querySelectorAll('.rl-seg').length > 2")
    problem, reply = (page.page.locator(".rl-seg").nth(number) for number in (0, 1))
    pane = page.page.locator(".rl-turns").bounding_box()
    assert reply.bounding_box()["y"] < pane["y"] + 0.7 * pane["height"]
    problem.get_by_role("button", name="Show all 3,000 characters").click()
    assert (
        problem.locator("pre").inner_text().strip() == LONG_QUESTION.strip() and problem.locator("button").count() == 0
    )
    page.close()


@pytest.mark.parametrize("name", ["explore", "overview", "watch"])
def test_the_other_widgets_fit_at_three_widths(browser, folder, runs, name):
    def widgets():
        if name == "overview":
            return [overview(folder).table]
        if name == "watch":
            shown = watch(folder / "big-rl")
            return [shown.figure, shown.inspector]
        figures = [plot_curves(runs, ["pass1"]), plot_failures(failed_rollouts(runs, {"run_id": "big-rl"}))]
        return [explore(figures, runs)]

    faults = []
    for (width, height), scheme in itertools.product(SIZES, SCHEMES):
        for number, widget in enumerate(widgets()):
            page = WidgetPage(browser, widget, (width, height), scheme)
            page.wait("() => document.querySelector('.rl-seg, .main-svg, .rl-overview tbody tr')")
            page.page.wait_for_timeout(1000)
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.page.screenshot(path=SHOTS / f"awkward-{name}-{number}-{width}-{scheme}.png")
            faults += [f"{name} {number} {width} {scheme}: {fault}" for fault in page.page.evaluate(FAULTS)]
            faults += page.errors
            page.close()
    assert not faults, "\n".join(faults)
