"""Measurement of the inspector's speed in JupyterLab and Chromium: time from a click until its effect is painted.

    pytest -m soak -s tests/browser/test_paint_times.py

It prints medians in ms for a run of 40,000 rollouts, and writes all times to out/paint-times.json. It asserts no time, because
times depend on what else the machine runs.
"""

import json
import statistics
from pathlib import Path

import pytest
from helpers.inspector_runs import write_run

from browser.inspector_page import APP, book, wait_for_count
from browser.lab_page import ROOT, Lab, LabPage

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

# Returns the ms from an event until its effect is painted.
MEASURE = """async ([act, done]) => {
  const run = new Function(`return (${act})()`), check = new Function(`return (${done})()`);
  const began = performance.now();
  run();
  while (!check()) {
    await new Promise(next => requestAnimationFrame(next));
    if (performance.now() - began > 20000) throw new Error('no effect: ' + act);
  }
  await new Promise(next => {
    const channel = new MessageChannel();
    channel.port1.onmessage = next;
    requestAnimationFrame(() => channel.port2.postMessage(0));
  });
  return performance.now() - began;
}"""
_APP = f"document.querySelector('{APP}')"
_COUNT = f"{_APP}.querySelector('.rl-count').textContent"
_FIRST = f"{_APP}.querySelector('[data-index=\"0\"]').textContent"


def measure(opened: LabPage, actions: list[tuple[str, str]]) -> list[float]:
    """Return the ms of each action. An action is JavaScript that acts, and an expression that holds once its effect is shown."""
    times = []
    for act, done in actions:
        times.append(opened.page.evaluate(MEASURE, [f"() => {{ {act} }}", f"() => {done}"]))
        opened.page.wait_for_timeout(400)
    return times


def opens() -> list[tuple[str, str]]:
    shown = f"{_APP}.querySelector('.rl-detail').dataset.traj"
    rows = [(7 * i) % 18 for i in range(1, 16)]
    return [
        (
            f"window.before = {shown}; {_APP}.querySelector('[data-index=\"{row}\"]').click()",
            f"{shown} !== window.before",
        )
        for row in rows
    ]


def filters() -> list[tuple[str, str]]:
    button = "[...{app}.querySelectorAll('.rl-toggle')].find(button => button.textContent.includes('{name}'))"
    return [
        (f"window.before = {_COUNT}; {button.format(app=_APP, name=name)}.click()", f"{_COUNT} !== window.before")
        for name in ("Correct", "Wrong", "Kept", "Dropped", "Tool errors")
        for _ in range(2)  # on and off
    ]


def sorts() -> list[tuple[str, str]]:
    """The first click on a title sorts downwards, the second upwards, the third restores the order."""
    return [
        (
            f"window.before = {_FIRST}; {_APP}.querySelector('[data-column={name}] button').click()",
            f"{_FIRST} !== window.before",
        )
        for name in ("response_tokens", "answer", "entropy", "reward", "p_err")
        for _ in range(2)
    ]


def test_times_from_click_to_paint_on_40000_rows(lab: Lab, tmp_path: Path):
    write_run(tmp_path / "runs", "big", steps=40, problems=125)
    cells = (f"from rstar_lab.analysis import inspect\ninspector = inspect({str(tmp_path / 'runs')!r})", "inspector")
    with lab.notebook(book(tmp_path, *cells)) as opened:
        opened.run_all()
        wait_for_count(opened, "40,000")
        opened.page.wait_for_timeout(3000)
        times = {
            name: measure(opened, actions())
            for name, actions in (("open", opens), ("filter", filters), ("sort", sorts))
        }
    medians = {name: round(statistics.median(values)) for name, values in times.items()}
    print("median ms from click to paint:", medians)
    out = ROOT / "out" / "paint-times.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"median_ms": medians, "ms": times}, indent=1))
    assert all(value > 0 for values in times.values() for value in values)
