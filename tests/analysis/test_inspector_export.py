"""Tests of exported pages and of the static output of the inspector."""

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
from helpers.inspector_runs import HOSTILE

from rstar_lab.analysis.inspector.export import content_hash, roc_status
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.palette import SCALES, styles
from rstar_lab.analysis.inspector.transcript import segments, token_values
from rstar_lab.untrusted.text import BIDI, visible


class Tags(HTMLParser):
    """Collects the elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def data_of(page: str) -> dict[str, Any]:
    """The trajectory that a saved page holds for its script."""
    (text,) = re.findall(r'<script type="application/json" id="trajectory">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_exports_escape_hostile_text(inspector: Inspector):
    hostile = "roc/6/p0/1"
    page = inspector.html(hostile)
    for found in (Tags(page), Tags(inspector.static_html())):
        assert not found.names & {"img", "iframe", "object", "a", "link", "svg"}
        assert not [name for name in found.attributes if name.startswith("on") or name in ("src", "href", "srcdoc")]
    assert "script" not in Tags(inspector.static_html()).names
    assert visible(HOSTILE) in "".join(part["text"] for part in data_of(page)["segments"])
    assert not set(page) & set(BIDI)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy and len(scripts) == 1 and page.count("<script") == 2
    assert "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    assert f"script-src {content_hash(scripts[0])};" in policy[1]


def test_an_export_contains_values_of_every_token(inspector: Inspector):
    kept = inspector.source.page("kept", [], 0, 1)[0]
    record = inspector.source.record(kept)
    data = data_of(inspector.html(kept["traj_id"]))
    values = np.frombuffer(base64.b64decode(data["values"]), np.float32).reshape(-1, data["tokens"])
    np.testing.assert_array_equal(values, token_values(record))
    assert data["tokens"] > 100 and data["segments"] == [part.payload() for part in segments(record)]


def test_markdown_fences_cannot_be_closed_by_text():
    row = {
        "traj_id": "a`b",
        "run_id": "r",
        "problem_id": "p\n# x",
        "step": 1,
        "sample": 0,
        "reward": 1.0,
        "answer": "```",
        "truth": "1",
    }
    record = {"messages": [{"role": "assistant", "content": "hi\n````\n# not a heading\n"}]}
    from rstar_lab.analysis.inspector.export import Opened, export_markdown

    text = export_markdown(Opened(row, record))
    assert "\n`````text\n" in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0], "# not a heading"]


def test_static_html_contains_list_and_transcript(inspector: Inspector):
    inspector.selected = "roc/5/p2/4"
    found = Tags(inspector.static_html())
    assert "384 trajectories" in found.text and "step 5 · sample 4" in found.text and "total = sum(" in found.text


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_on_every_colour_level():
    sheet = styles("transcript", "levels")
    pair = r"light-dark\((#\w{6}), (#\w{6})\)"
    ink = re.search(rf"--rl-ink: {pair}", sheet)
    syntax = re.findall(rf"highlight\(rl-py-\w+\) {{ color: {pair}", sheet)
    levels = re.findall(
        rf"highlight\(rl-([a-z]+)(\d)\),.* {{{{ background-color: {pair};( color:)?", sheet.replace("{", "{{")
    )
    assert ink and len(syntax) == 5
    prefixes = {
        "e": "entropy",
        "l": "log_prob",
        "dp": "mismatch",
        "dn": "mismatch",
        "ap": "advantage",
        "an": "advantage",
    }
    expected = [f"{prefix}{level + 1}" for prefix, name in prefixes.items() for level in range(len(SCALES[name]))]
    assert [prefix + level for prefix, level, *_ in levels] == [*expected, "m0", "m1"]
    for prefix, level, *grounds, plain in levels:
        for text in [ink.groups()] if plain else [ink.groups(), *syntax]:
            assert all(contrast(*both) >= 4.5 for both in zip(text, grounds, strict=True)), prefix + level


def test_roc_status_names_equal_rewards_as_the_reason():
    dropped = {"traj_id": "a", "kept": False, "p_err": 0.0, "p_format": 0.0, "reward": 1.0}
    assert roc_status(dropped, [dropped, dropped]) == "dropped: all 2 rewards of the group are equal"
    wrong = {**dropped, "reward": 0.0}
    assert "selected rollouts of the group have equal rewards" in roc_status(dropped, [dropped, wrong])
    assert roc_status(dropped, [dropped, {**wrong, "kept": True}]).startswith("dropped by RoC; penalty 0")
