"""Export one trajectory as a self-contained HTML page or as Markdown, and the list as an HTML table."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rstar_lab.analysis.inspector.palette import SCALES, STATIC, join_modules, styles, widget_css
from rstar_lab.analysis.inspector.transcript import Segment, segments, token_values
from rstar_lab.analysis.tables import MISSING, format_value, html_table
from rstar_lab.untrusted.text import Html, counted, html, joined, visible

_MODULES = ("dom", "python", "tokens", "transcript", "group", "article")  # of a page; its own entry follows
# Headings of the kinds of segments; static/transcript.js reads the same file.
LABELS: dict[str, str] = json.loads((STATIC / "labels.json").read_text(encoding="utf-8"))
MAX_PLAIN = 20_000  # characters of a segment in a page that shows many, or in the output of a notebook


class Opened(NamedTuple):
    """A rollout as the inspector opens it: its row, its transcript (columns of TRANSCRIPTS), the rows of its group, and its note."""

    row: Mapping[str, Any]
    record: Mapping[str, Any]
    siblings: Sequence[Mapping[str, Any]] = ()
    note: Mapping[str, Any] = {}


def verdict(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what a reward says: its state (ok, bad, none), a mark and a text.

    A rollout without a reward is neither right nor wrong. A reward of the user's own function (`correct` is missing) says
    nothing about the answer.
    """
    reward = row.get("reward")
    if reward is None or math.isnan(reward):
        return "none", MISSING, "not scored"
    good = reward > 0
    state, mark = ("ok", "✓") if good else ("bad", "✗")
    if "correct" in row and row["correct"] is None:
        return state, mark, f"reward {format_value(reward)}"
    return state, mark, "correct" if good else "wrong"


def solved_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many of the rollouts are correct, as text. Rollouts without a reward are counted apart."""
    states = [verdict(row) for row in rows]
    scored = [state for state in states if state[0] != "none"]
    if not scored:
        return f"{counted(len(rows), 'rollout')}, not scored"
    word = "correct" if any(text in ("correct", "wrong") for *_, text in scored) else "with a reward above 0"
    apart = f", {len(rows) - len(scored)} not scored" if len(scored) < len(rows) else ""
    return f"{sum(state == 'ok' for state, *_ in scored)} of {len(scored)} {word}{apart}"


def roc_status(row: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]] = ()) -> str:
    """Describe whether RoC kept the rollout, and why not if it did not; "" if nothing was selected, as in an evaluation.

    siblings: all rollouts of the group.
    """
    if row.get("kept") is None:
        return ""
    if not row["kept"] and len(siblings) > 1 and not any(sibling.get("kept") for sibling in siblings):
        if len({sibling.get("reward") for sibling in siblings}) == 1:
            return f"dropped: all {len(siblings)} rewards of the group are equal"
        return "dropped: the selected rollouts of the group have equal rewards"
    status = "kept" if row["kept"] else "dropped by RoC"
    p_err, p_format = row.get("p_err"), row.get("p_format")
    if p_err is None or p_format is None:
        return status
    penalties = f"tool errors {format_value(p_err)} + format {format_value(p_format)}"
    return f"{status}; penalty {format_value(p_err + p_format)} = {penalties}"


def export_html(rollout: Opened) -> Html:
    """Return one trajectory as a self-contained HTML page: its data as JSON, and the script of the inspector that draws it."""
    body = html(
        "<main><noscript>This page draws its transcript with a script.</noscript></main>{}",
        data_element(trajectory_data(rollout), "trajectory"),
    )
    return closed_page(_title(rollout), body, widget_css(), [page_script("saved")])


def closed_page(
    title: str, body: Html, style: str, scripts: Sequence[str], more: str = "", styles: Sequence[str] = ()
) -> Html:
    """Return a page whose content security policy allows only its own scripts and style sheet, by their hashes, and loads nothing.

    No other script runs, even if a text were not escaped. more: directives of the policy. styles: style sheets that a script adds.
    """
    scripts_of_page, styles_of_page = (" ".join(map(content_hash, texts)) for texts in (scripts, [style, *styles]))
    policy = f"default-src 'none'; script-src {scripts_of_page}; style-src {styles_of_page}; {more}base-uri 'none'; form-action 'none'"
    return html(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        "<title>{}</title><style>{}</style></head><body>{}{}</body></html>\n",
        Html(policy), title, Html(style), body, joined(Html(f"<script>{script}</script>") for script in scripts),
    )  # fmt: skip


def page_script(entry: str) -> str:
    """Return the script of a page that draws transcripts. entry: name of the module in `static/` that runs last."""
    return f"(() => {{\nconst scales = {json.dumps(SCALES)};\n{join_modules(*_MODULES, entry)}}})();"


def data_element(data: Any, name: str = "") -> Html:
    """Return an element that holds JSON values for a script. No text of the data can end the element."""
    text = Html(json.dumps(data, allow_nan=False).replace("<", "\\u003c"))
    return html('<script type="application/json"{}>{}</script>', html(' id="{}"', name) if name else "", text)


def trajectory_data(rollout: Opened, *, plain: bool = False) -> dict[str, Any]:
    """Return one trajectory as JSON values for `static/article.js`.

    plain: without token values and without the siblings, and with the beginnings of very long texts only.
    """
    row, record, siblings, note = rollout
    values = np.empty((0, 0), np.float32) if plain else np.ascontiguousarray(token_values(record))
    parts = [_shortened(segment) if plain else segment for segment in segments(record)]
    return {
        "title": _title(rollout),
        "row": {**row, "truth": _truth(rollout)},
        "siblings": [] if plain else list(siblings),
        "note": dict(note),
        "segments": [segment.payload() for segment in parts],
        "tokens": values.shape[1],
        "omitted": plain and record.get("response_ids") is not None,
        "values": base64.b64encode(values.tobytes()).decode(),
    }


def content_hash(text: str) -> str:
    """Return the source expression of a content security policy that allows an inline script or style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def excerpt(question: object, problem_id: object, size: int) -> str:
    """Return the beginning of a question on one line; without a question, the id of the problem."""
    text = " ".join(str(question or "").split()) or str(problem_id)
    return text if len(text) <= size else f"{text[:size].rstrip()}…"


def _title(rollout: Opened) -> str:
    row, shown = rollout.row, visible(excerpt(rollout.record.get("question"), rollout.row.get("problem_id"), 160))
    return f"{shown} · step {row.get('step')} · sample {row.get('sample')}"


def _truth(rollout: Opened) -> Any:
    return rollout.row["truth"] if rollout.row.get("truth") is not None else rollout.record.get("truth")


def plain_html(rollout: Opened) -> Html:
    """Return the texts of a trajectory as HTML without scripts, for a notebook that is read without a kernel.

    Of very long texts only the beginnings are shown.
    """
    row, (state, mark, text) = rollout.row, verdict(rollout.row)
    parts = []
    for segment in map(_shortened, segments(rollout.record)):
        kind = segment.kind if segment.kind in LABELS else "other"  # the kind becomes a class
        tool = html(' <span class="rl-tool">{}</span>', segment.tool) if segment.tool else ""
        part = '<section class="rl-seg rl-{}"><h3>{}{}</h3><pre class="rl-text" dir="ltr">{}</pre></section>'
        parts.append(html(part, kind, _heading(segment), tool, segment.text))
    return html(
        '<article class="rl rl-page"><h2>{}</h2><p class="rl-chips"><span class="rl-chip rl-{}">{} {}</span></p>'
        '<p class="rl-answer">Answer <b>{}</b> · truth <b>{}</b></p><p class="rl-id">{}</p>{}</article>',
        _title(rollout), state, mark, text.capitalize(), format_value(row.get("answer")), format_value(_truth(rollout)),
        row.get("traj_id"), joined(parts),
    )  # fmt: skip


def _heading(segment: Segment) -> str:
    title = LABELS.get("malformed" if segment.malformed else segment.kind, LABELS["other"])
    turn = f"Turn {segment.turn}: " if segment.turn else ""
    return f"{turn}{title}{f' ({segment.outcome})' if segment.outcome else ''}"


def _shortened(segment: Segment) -> Segment:
    """Return the segment without its tokens and with at most MAX_PLAIN characters."""
    more = len(segment.text) - MAX_PLAIN
    text = f"{segment.text[:MAX_PLAIN]}\n… {more:,} more characters" if more > 0 else segment.text
    return replace(segment, text=text, starts=())


def listing_html(rows: Sequence[Mapping[str, Any]], total: int, label: str, questions: Mapping[str, str]) -> Html:
    """Return the first rows of the list as an HTML table. questions: problem id to the beginning of its question."""
    columns = (
        "step", "problem", "sample", "reward", "kept", "calls", "errors", "response_tokens", "answer", "truth",
    )  # fmt: skip
    rows = [{**row, "problem": questions.get(row["problem_id"], row["problem_id"])} for row in rows]
    texts = [[format_value(row.get(name)) for name in columns] for row in rows]
    table = html_table(pd.DataFrame(texts, columns=[name.replace("_", " ") for name in columns]), css="rl-table")
    first = f"; the first {len(rows)}" if total > len(rows) else ""
    caption = html("<p>{} of {}{}</p>", counted(total, "trajectory"), label, first)
    return html('<style>{}</style><div class="rl rl-page">{}{}</div>', Html(styles("transcript")), caption, table)


def export_markdown(rollout: Opened) -> str:
    """Return one trajectory as Markdown. Each code fence is longer than any run of backticks in its text."""
    row, record, siblings, note = rollout
    status = f"{status}; " if (status := roc_status(row, siblings)) else ""
    counts = [
        f"{name.replace('_', ' ')} {format_value(row.get(name))}"
        for name in ("turns", "calls", "errors", "response_tokens")
    ]
    lines = [
        f"# {_inline(row.get('problem_id'))}, step {row.get('step')}, sample {row.get('sample')}",
        "",
        f"- trajectory: {_inline(row.get('traj_id'))}",
        f"- run: {_inline(row.get('run_id'))}, stage {_inline(row.get('stage'))}",
        f"- answer: {_inline(row.get('answer'))}, truth {_inline(_truth(rollout))}: **{verdict(row)[2]}**",
        f"- {status}advantage {format_value(row.get('advantage'))}",
        f"- {', '.join(counts)}",
    ]
    if len(siblings) > 1:
        lines.append(f"- group: {solved_of(siblings)}")
    if note.get("note") or note.get("tags"):
        lines.append(f"- note: {' '.join(map(_inline, [note.get('note') or '', *note.get('tags', [])]))}")
    for segment in segments(record):
        text = visible(segment.text)
        fence = _fence(text, 3)
        language = "python" if segment.kind == "code" else "text"
        lines += ["", f"## {_heading(segment)}", "", f"{fence}{language}", text, fence]
    return "\n".join(lines) + "\n"


def _fence(text: str, shortest: int) -> str:
    """Return backticks that no text can close: more than any run of them in it."""
    return "`" * max(shortest, 1 + max(map(len, re.findall("`+", text)), default=0))


def _inline(value: Any) -> str:
    text = format_value(value).replace("\n", " ")
    fence = _fence(text, 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else "``"
