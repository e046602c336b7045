"""Random sequences of user actions on runs with awkward values. After each action, what is highlighted, what is shown and what the
kernel holds must agree, no text may contradict the row's columns, and nothing may overlap.

    pytest -m soak tests/browser/test_random_actions.py
"""

import itertools
import random
import time
from typing import Any

import pytest
from helpers.awkward_runs import make_awkward_runs

from browser.widget_page import WidgetPage
from rstar_lab.analysis import inspect, open_runs
from rstar_lab.common.errors import UserError

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
SEEDS, ACTIONS = range(6), 200
SIZES = [(1400, 900), (1000, 800), (900, 900)]
PLACE = "random.ipynb#1"  # the browser restores the state of the inspector of this place
PARTS = (".rl-dhead", ".rl-siblings", ".rl-tools", ".rl-band", ".rl-turns", ".rl-foot", ".rl-status")
KEYS = [
    *"jjjkkk[[]]123456eEbBaacggrrntv?",
    "Escape",
    "Escape",
    "Escape",
    "Home",
    "End",
    "PageDown",
    "ArrowDown",
    "ArrowUp",
]
CONDITIONS = [
    "errors > 0", "reward > 0", "calls = 2 and kept", "answer = '514'", "response_tokens > 100", "no such column", "",
]  # fmt: skip
SEARCHES = ["514", "so the answer", "nothing has this text", "<b>", "؟"]
STATE = """parts => {
  const all = (name) => [...document.querySelectorAll(name)];
  const text = (name) => document.querySelector(name)?.textContent ?? "";
  const chosen = all(".rl-list .rl-chosen");
  const box = (name) => { const b = document.querySelector(name)?.getBoundingClientRect(); return b && { top: b.top, bottom: b.bottom, left: b.left, right: b.right }; };
  return {
    traj: document.querySelector(".rl-detail").dataset.traj ?? "", chosen: chosen.map((row) => Number(row.dataset.index)),
    first: Number(all(".rl-rows [data-index]")[0]?.dataset.index ?? -1), last: Number(all(".rl-rows [data-index]").at(-1)?.dataset.index ?? -1),
    count: text(".rl-count"), alert: text(".rl-alert"), scope: text(".rl-scope .rl-chip"), where: text(".rl-where"), answer: text(".rl-answer"),
    verdict: text(".rl-dhead .rl-chip"), selection: text(".rl-selection"), sibling: all(".rl-strip [aria-pressed=true]").length,
    pressed: all(".rl-toggles [aria-pressed=true]").map((button) => button.textContent), chips: all(".rl-others .rl-chip").length,
    selects: all(".rl-filters select").map((each) => each.value).filter(Boolean), channel: document.querySelector(".rl-channels input:checked")?.value ?? "",
    parsed: text(".rl-turns").includes("does not parse"), segments: all(".rl-seg").length,
    boxes: Object.fromEntries(parts.map((name) => [name, box(name)])), panels: all(".rl-groupbox, .rl-alternatives, .rl-fork, .rl-notes").some((e) => !e.hidden),
    compared: all(".rl-pane").length > 0, detail: box(".rl-detail"),
  };
}"""  # noqa: E501


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return open_runs(make_awkward_runs(tmp_path_factory.mktemp("runs")))


class User:
    """Does random actions in a page and checks the invariants after each."""

    def __init__(self, browser: Any, runs: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.runs = runs
        self.total = runs.count()
        self.size = SIZES[seed % len(SIZES)]
        self.shown = WidgetPage(browser, inspect(runs, place=PLACE), self.size, ["light", "dark"][seed % 2])
        self.page = self.shown.page
        self.page.set_default_timeout(60_000)
        self.done: list[str] = []
        self.ids = list(runs.trajectories(columns=["traj_id"], order_by="random()", limit=300).traj_id)
        self.wait_for_start()

    @property
    def widget(self) -> Any:
        return self.shown.widget

    def wait_for_start(self) -> None:
        self.shown.wait("() => document.querySelectorAll('.rl-seg').length > 0")

    def close_dialogs(self) -> None:
        self.page.evaluate("() => document.querySelectorAll('dialog[open]').forEach(box => box.close())")

    def click(self, selector: str) -> None:
        """Click one of the visible elements at random, as a user with a mouse does."""
        found = self.page.locator(selector).locator("visible=true")
        if count := found.count():
            found.nth(self.random.randrange(count)).click(timeout=5000)

    def key(self) -> None:
        key = self.random.choice(KEYS)
        self.done[-1] += f" {key}"
        if self.random.random() < 0.7:
            self.page.locator(".rl-list").focus()
        self.page.keyboard.press(key)

    def fast_keys(self) -> None:
        self.page.locator(".rl-list").focus()
        for _ in range(self.random.randrange(2, 8)):
            self.page.keyboard.press(self.random.choice("jjk[]"))

    def row(self) -> None:
        self.page.locator(".rl-list").scroll_into_view_if_needed()
        box = self.page.locator(".rl-list").bounding_box()
        self.page.mouse.click(box["x"] + 60, box["y"] + self.random.uniform(35, box["height"] - 20))

    def sibling(self) -> None:
        self.click(".rl-strip button")

    def toggle(self) -> None:
        self.click(".rl-toggles button")

    def clear(self) -> None:
        self.click(".rl-filters button:text('Clear filters'):enabled")

    def chip(self) -> None:
        self.click(".rl-others .rl-chip button, .rl-scope button")

    def choose(self) -> None:
        selects = self.page.locator(".rl-filters select").locator("visible=true")
        select = selects.nth(self.random.randrange(selects.count()))
        values = select.evaluate("element => [...element.options].map(option => option.value)")
        select.select_option(self.random.choice(values))

    def sql(self) -> None:
        condition = self.random.choice(CONDITIONS)
        self.done[-1] += f" {condition}"
        self.page.locator(".rl-sql").fill(condition)
        self.page.keyboard.press("Enter")

    def problem(self) -> None:
        self.page.locator(".rl-problem").fill(self.random.choice(["p1", "sum", "zzz", ""]))
        self.page.wait_for_timeout(350)

    def steps(self) -> None:
        field = self.page.locator(".rl-step").nth(self.random.randrange(2))
        field.fill(self.random.choice(["1", "3", "99", ""]))
        field.press("Enter")

    def sort(self) -> None:
        self.click(".rl-header button")

    def search(self) -> None:
        text = self.random.choice(SEARCHES)
        self.done[-1] += f" {text}"
        self.page.locator(".rl-across").fill(text)
        self.page.keyboard.press("Enter")

    def end_search(self) -> None:
        self.page.locator(".rl-across").fill("")

    def find(self) -> None:
        self.page.locator(".rl-find").fill(self.random.choice(["514", "x", "", "answer"]))
        self.page.keyboard.press("Enter")

    def tool(self) -> None:
        self.click(".rl-tools button, .rl-foot button:text('Note')")

    def resize(self) -> None:
        self.size = self.random.choice(SIZES)
        self.page.set_viewport_size({"width": self.size[0], "height": self.size[1]})

    def theme(self) -> None:
        self.page.emulate_media(color_scheme=self.random.choice(["light", "dark"]))

    def scroll(self) -> None:
        self.page.locator(".rl-list").evaluate(
            "(list, share) => { list.scrollTop = share * list.scrollHeight; }", self.random.random()
        )

    def select_in_python(self) -> None:
        self.widget.selected = self.random.choice(self.ids)
        self.shown.sync()

    def filter_in_python(self) -> None:
        self.widget.filters = self.random.choice(
            [{}, {"correct": True}, {"step": 2}, {"run_id": "small-eval"}, {"kept": False}]
        )
        self.shown.sync()

    def restart(self) -> None:
        """Restart the kernel, use the page without it, and run the cell again: the page restores what it held."""
        held = {name: getattr(self.widget, name) for name in ("filters", "scope", "sort", "selected", "channel")}
        self.shown.disconnect()
        for _ in range(4):
            self.random.choice([self.key, self.row, self.toggle, self.sort])()
            self.close_dialogs()
        alert = self.page.locator(".rl-alert").inner_text()
        assert "restarted" in alert, (alert, self.done[-1])
        self.shown.show(inspect(self.runs, place=PLACE))
        self.wait_for_start()
        self.check()
        restored = {name: getattr(self.widget, name) for name in held}
        assert restored == held, (restored, held)

    def act(self) -> None:
        actions = [
            (self.key, 30), (self.fast_keys, 8), (self.row, 12), (self.sibling, 6), (self.toggle, 8), (self.clear, 5), (self.chip, 4),
            (self.choose, 5), (self.sql, 5), (self.problem, 3), (self.steps, 3), (self.sort, 4), (self.search, 3), (self.end_search, 2),
            (self.find, 3), (self.tool, 5), (self.resize, 3), (self.theme, 2), (self.scroll, 4), (self.select_in_python, 3),
            (self.filter_in_python, 3), (self.restart, 2),
        ]  # fmt: skip
        action = self.random.choices([each for each, _ in actions], [weight for _, weight in actions])[0]
        self.done.append(action.__name__)
        if action.__name__ not in ("key",) or self.random.random() < 0.5:
            self.close_dialogs()
        action()

    def check(self) -> None:
        """Wait until page and kernel agree."""
        deadline = time.monotonic() + 45
        while problems := self.problems():
            assert time.monotonic() < deadline, f"{problems}\nafter {len(self.done)} actions: {self.done[-12:]}"
            self.page.wait_for_timeout(100)
        assert self.shown.errors == [], self.done[-12:]

    def problems(self) -> list[str]:
        state, widget, found = self.page.evaluate(STATE, list(PARTS)), self.widget, []
        if state["traj"] != widget.selected:
            return [f"shown {state['traj']}, kernel {widget.selected}"]
        held = (dict(widget.filters), dict(widget.scope))
        try:
            count, wrong = widget.source.count(widget._condition(*held)), False
        except UserError:
            count, wrong = 0, True
        expected = "–" if wrong else f"{count:,} of {self.total:,} trajectories"
        if state["count"] != expected:
            found.append(f"count {state['count']!r}, kernel {expected!r}")
        if bool(state["alert"]) != wrong:
            found.append(f"alert {state['alert']!r}")
        if state["scope"] != widget.scope.get("label", ""):
            found.append(f"scope {state['scope']!r}, kernel {widget.scope}")
        if state["channel"] != widget.channel:
            found.append(f"channel {state['channel']}, kernel {widget.channel}")
        if not wrong:
            found += self.highlight(state, count)
        return found + self.contradictions(state) + self.layout(state)

    def highlight(self, state: dict[str, Any], count: int) -> list[str]:
        """The highlighted row is the selected rollout; there is none if the filters exclude it."""
        widget = self.widget
        held = (dict(widget.filters), dict(widget.scope), list(widget.sort))
        place = widget._place([], widget.selected, *held) if count else None
        if len(state["chosen"]) > 1:
            return [f"{len(state['chosen'])} rows are highlighted"]
        if state["chosen"] and state["chosen"][0] != place:
            return [f"row {state['chosen']} is highlighted, the selected rollout is {place}"]
        if not state["chosen"] and place is not None and state["first"] <= place <= state["last"]:
            return [f"row {place} is in view and not highlighted"]
        return []

    def contradictions(self, state: dict[str, Any]) -> list[str]:
        row = self.runs.trajectories(f"traj_id = {sql_text(state['traj'])}").iloc[0]
        found = []
        scored = row.reward is not None and row.reward == row.reward
        verdict = "Not scored" if not scored else "Correct" if row.reward > 0 else "Wrong"
        if verdict not in state["verdict"]:
            found.append(f"verdict {state['verdict']!r}, reward {row.reward}")
        if f"step {row.step}" not in state["where"] or f"sample {row['sample']}" not in state["where"]:
            found.append(f"{state['where']!r}, step {row.step} sample {row['sample']}")
        if row.run_id in ("small-eval", "small-rl-fork-1", "imported") and "dropped" in state["selection"]:
            found.append(f"{row.run_id}: {state['selection']!r}")
        if state["parsed"]:
            found.append("a call that was run is said not to parse")
        if not state["segments"]:
            found.append("no transcript")
        return found

    def layout(self, state: dict[str, Any]) -> list[str]:
        boxes, detail = state["boxes"], state["detail"]
        found = [
            f"{above} overlaps {below}"
            for above, below in itertools.pairwise(PARTS[:-1])
            if not state["compared"] and boxes[above] and boxes[below] and boxes[above]["bottom"] > boxes[below]["top"] + 1
            and boxes[above]["bottom"] > boxes[above]["top"] and boxes[below]["bottom"] > boxes[below]["top"]
        ]  # fmt: skip
        if not state["panels"] and not state["compared"]:
            share = (boxes[".rl-turns"]["bottom"] - boxes[".rl-turns"]["top"]) / (detail["bottom"] - detail["top"])
            if share < (0.6 if self.size[0] >= 1400 else 0.5):
                found.append(f"the transcript has {share:.0%} of the pane at {self.size}")
        for name in PARTS[:-1]:
            if boxes[name] and boxes[name]["right"] > detail["right"] + 1:
                found.append(f"{name} is wider than the pane")
        return found


def sql_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@pytest.mark.parametrize("seed", SEEDS)
def test_page_and_kernel_agree_after_random_actions(browser, runs, seed):
    user = User(browser, runs, seed)
    user.check()
    for _ in range(ACTIONS):
        user.act()
        user.check()
    user.shown.close()
