"""Export one trajectory as a self-contained HTML page or as Markdown, and the list as an HTML table."""

import base64
import bisect
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from rstar_lab.analysis.inspector.palette import SCALES, STATIC, page_css
from rstar_lab.analysis.inspector.transcript import Segment, segments, token_values
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.untrusted.text import counted, escaped, visible

_CSS = page_css()
_SYNTAX = (
    (Comment, "com"),
    (Keyword, "kw"),
    (Operator.Word, "kw"),
    (String, "str"),
    (Number, "num"),
    (Name.Builtin, "bi"),
)
# Headings of the kinds of segments; static/transcript.js reads the same file.
LABELS: dict[str, str] = json.loads((STATIC / "labels.json").read_text(encoding="utf-8"))
_CHANNELS = (("entropy", "Entropy"), ("log_prob", "Log-prob"), ("mismatch", "Mismatch"), ("mask", "Loss mask"),
             ("advantage", "Advantage"), ("none", "None"))  # fmt: skip
_MISSING = "–"
MAX_PLAIN = 20_000  # characters of a segment in a page that shows many, or in the output of a notebook


def format_value(value: Any) -> str:
    """Format a value for display: None and NaN as a dash, floats with 3 significant digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}".replace("-", "−")
    return visible(str(value))


def verdict(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what a reward says: its state (ok, bad, none), a mark and a text.

    A rollout without a reward is neither right nor wrong. A reward of the user's own function (`correct` is missing) says
    nothing about the answer.
    """
    reward = row.get("reward")
    if reward is None or math.isnan(reward):
        return "none", _MISSING, "not scored"
    good = reward > 0
    state, mark = ("ok", "✓") if good else ("bad", "✗")
    if "correct" in row and row["correct"] is None:
        return state, mark, f"reward {format_value(float(reward))}"
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


def outcome_class(outcome: str | None) -> str:
    """Return the CSS class of an outcome: ok, bad (an error of the model), ours (a failure of the sandbox or queue), or
    unknown."""
    if not outcome:
        return "unknown"
    return "ok" if outcome == "ok" else "ours" if outcome in INFRASTRUCTURE_FAILURES else "bad"


def export_html(
    row: Mapping[str, Any],
    record: Mapping[str, Any],
    siblings: Sequence[Mapping[str, Any]] = (),
    note: Mapping[str, Any] | None = None,
    *,
    fragment: bool = False,
) -> str:
    """Return one trajectory as a self-contained HTML page without scripts.

    Its content security policy allows its own style sheet and nothing else.
    fragment: return only the article, without token values, for use in a notebook.
    """
    title = _title(row, record)
    article = article_html(row, record, siblings, note, plain=fragment)
    if fragment:
        return f"<style>{_CSS}</style>{article}"
    policy = f"default-src 'none'; style-src {content_hash(_CSS)}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{_CSS}</style></head><body><main>{article}</main></body></html>\n"
    )


def content_hash(text: str) -> str:
    """Return the source expression of a content security policy that allows an inline script or style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def excerpt(question: object, problem_id: object, size: int) -> str:
    """Return the beginning of a question on one line; without a question, the id of the problem."""
    text = " ".join(str(question or "").split()) or str(problem_id)
    return text if len(text) <= size else f"{text[:size].rstrip()}…"


def _title(row: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    shown = visible(excerpt(record.get("question"), row.get("problem_id"), 160))
    return f"{shown} · step {row.get('step')} · sample {row.get('sample')}"


def article_html(
    row: Mapping[str, Any],
    record: Mapping[str, Any],
    siblings: Sequence[Mapping[str, Any]] = (),
    note: Mapping[str, Any] | None = None,
    *,
    plain: bool = False,
) -> str:
    """Return one trajectory as an article element for a page with the style sheet `page_css`.

    plain: without token values and without the list of siblings, and with the beginnings of very long texts only.
    """
    body = _header(row, record, siblings, _title(row, record), note or {})
    values = None if plain else token_values(record)
    colours = values is not None and values.shape[1] > 0
    if colours:
        body += _switch()
    advantage = row.get("advantage")
    shown = [_shortened(segment) if plain else segment for segment in segments(record)]
    parts = [_segment(segment, values if colours else None, advantage) for segment in shown]
    body += f'<div class="rl-turns">{"".join(parts)}</div>'
    if not plain and len(siblings) > 1:
        body += _siblings(siblings, row)
    return f'<article class="rl rl-page">{body}</article>'


def _header(
    row: Mapping[str, Any],
    record: Mapping[str, Any],
    siblings: Sequence[Mapping[str, Any]],
    title: str,
    note: Mapping[str, Any],
) -> str:
    state, mark, text = verdict(row)
    truth = row.get("truth") if row.get("truth") is not None else record.get("truth")
    facts = [
        ("Run", row.get("run_id")), ("Problem", row.get("problem_id")), ("Stage", row.get("stage")), ("Step", row.get("step")),
        ("Policy", row.get("policy_version")),
        ("Reward", row.get("reward")), ("Advantage", row.get("advantage")), ("Turns", row.get("turns")),
        ("Tool calls", row.get("calls")), ("Tool errors", row.get("errors")), ("Tokens", row.get("response_tokens")),
        ("Model tokens", row.get("model_tokens")), ("Entropy", row.get("entropy")), ("Stopped by", row.get("stop_reason")),
    ]  # fmt: skip
    if row.get("environment"):
        facts.append(("Environment", row["environment"]))
    facts += (row.get("metrics") or {}).items()
    listed = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(format_value(value))}</dd></div>" for name, value in facts
    )
    status = roc_status(row, siblings)
    selection = f'<span class="rl-chip">{escaped(status)}</span>' if status else ""
    tags = "".join(f'<span class="rl-chip">{escaped(tag)}</span>' for tag in note.get("tags", []))
    written = f'<p class="rl-note">{escaped(note["note"])}</p>' if note.get("note") else ""
    return (
        f'<header class="rl-head"><h2>{escaped(title)}</h2>'
        f'<p class="rl-chips"><span class="rl-chip rl-{state}">{mark} {escaped(text.capitalize())}</span>{selection}{tags}</p>'
        f'<p class="rl-answer">Answer <b>{escaped(format_value(row.get("answer")))}</b> · truth <b>{escaped(format_value(truth))}</b></p>'
        f'{written}<dl class="rl-facts">{listed}</dl>'
        f'<p class="rl-id">{escaped(row.get("traj_id"))}</p></header>'
    )


def _switch() -> str:
    """Return radio buttons that select the token colours through style rules, without a script."""
    buttons = "".join(
        f'<label><input type="radio" name="rl-channel" class="rl-by-{name}"{" checked" if name == "entropy" else ""}> {title}</label>'
        for name, title in _CHANNELS
    )
    return f'<fieldset class="rl-switch"><legend>Colour tokens by</legend>{buttons}</fieldset>'


def _segment(segment: Segment, values: np.ndarray | None, advantage: float | None) -> str:
    kind = segment.kind if segment.kind in LABELS else "other"  # the kind becomes a class
    label = LABELS["malformed" if segment.malformed else kind]
    badge = ""
    if segment.outcome:
        badge = f'<span class="rl-badge rl-{outcome_class(segment.outcome)}">{escaped(segment.outcome)}</span>'
    tool = f' <span class="rl-tool">{escaped(segment.tool)}</span>' if segment.tool else ""
    text = "".join(_pieces(segment, values, advantage))
    turn = f'<span class="rl-turn">Turn {segment.turn}</span> ' if segment.turn else ""
    return (
        f'<section class="rl-seg rl-{kind}" data-outcome="{outcome_class(segment.outcome)}">'
        f'<h3>{turn}{label}{tool} {badge}</h3><pre class="rl-text" dir="ltr">{text}</pre></section>'
    )


def _shortened(segment: Segment) -> Segment:
    """Return the segment with at most MAX_PLAIN characters."""
    more = len(segment.text) - MAX_PLAIN
    return replace(segment, text=f"{segment.text[:MAX_PLAIN]}\n… {more:,} more characters") if more > 0 else segment


def _pieces(segment: Segment, values: np.ndarray | None, advantage: float | None) -> Iterator[str]:
    """Yield the segment's text in spans that start and end at token and syntax boundaries."""
    text = visible(segment.text)
    syntax = _syntax(text) if segment.kind == "code" else []
    starts = segment.starts if values is not None else ()
    edges = sorted({0, len(text), *starts, *(place for begin, end, _ in syntax for place in (begin, end))})
    begins = [begin for begin, _, _ in syntax]
    for begin, end in itertools.pairwise(edges):
        classes, title = [], ""
        at = bisect.bisect_right(begins, begin) - 1
        if at >= 0 and syntax[at][1] >= end:
            classes.append("rl-py-" + syntax[at][2])
        if starts and values is not None:
            token = segment.first + bisect.bisect_right(starts, begin) - 1
            classes += _levels(values[:, token], advantage)
            title = f' title="{_tooltip(values[:, token], token)}"'
        piece = escaped(text[begin:end])
        yield f'<span class="{" ".join(classes)}"{title}>{piece}</span>' if classes or title else piece


def _syntax(text: str) -> list[tuple[int, int, str]]:
    spans = []
    for begin, kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens_unprocessed(text):
        name = next((name for family, name in _SYNTAX if kind in family), None)
        if name:
            spans.append((begin, begin + len(value), name))
    return spans


def _levels(token: np.ndarray, advantage: float | None) -> Iterator[str]:
    entropy, engine, trainer, mask, _ = (float(value) for value in token)
    yield "rl-m1" if mask else "rl-m0"
    if not mask:
        return
    for letter, name, value in (("e", "entropy", entropy), ("l", "log_prob", -engine)):
        if level := bisect.bisect_right(SCALES[name], value) if not math.isnan(value) else 0:
            yield f"rl-{letter}{level}"
    for letter, name, value in (
        ("d", "mismatch", engine - trainer),
        ("a", "advantage", math.nan if advantage is None else advantage),
    ):
        if not math.isnan(value) and (level := bisect.bisect_right(SCALES[name], abs(value))):
            yield f"rl-{letter}{'p' if value > 0 else 'n'}{level}"


def _tooltip(token: np.ndarray, index: int) -> str:
    entropy, engine, trainer, mask, token_id = (float(value) for value in token)
    return (
        f"token {index} (id {token_id:.0f}), {'model' if mask else 'not trained on'}; entropy {format_value(entropy)}; "
        f"log-prob engine {format_value(engine)}, trainer {format_value(trainer)}, difference {format_value(engine - trainer)}"
    )


def _siblings(siblings: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str:
    lines = ""
    for sibling in siblings:
        mark = " class=rl-this" if sibling.get("traj_id") == row.get("traj_id") else ""
        cells = (
            format_value(sibling.get("sample")), verdict(sibling)[1], roc_status(sibling, siblings),
            *(format_value(sibling.get(name)) for name in ("calls", "errors", "response_tokens", "advantage", "answer")),
        )  # fmt: skip
        lines += f"<tr{mark}>" + "".join(f"<td>{escaped(cell)}</td>" for cell in cells) + "</tr>"
    head = "".join(f'<th scope="col">{name}</th>' for name in
                   ("Sample", "Correct", "RoC", "Calls", "Errors", "Tokens", "Advantage", "Answer"))  # fmt: skip
    return f'<h3>Rollouts of the same group</h3><table class="rl-table"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'


def listing_html(rows: Sequence[Mapping[str, Any]], total: int, label: str, questions: Mapping[str, str]) -> str:
    """Return the first rows of the list as an HTML table. questions: problem id to the beginning of its question."""
    rows = [{**row, "problem": questions.get(row["problem_id"], row["problem_id"])} for row in rows]
    columns = (
        "step", "problem", "sample", "reward", "kept", "calls", "errors", "response_tokens", "answer", "truth",
    )  # fmt: skip
    head = "".join(f'<th scope="col">{name.replace("_", " ")}</th>' for name in columns)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escaped(format_value(row.get(name)))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    caption = f"{counted(total, 'trajectory')} of {escaped(label)}" + (
        f"; the first {len(rows)}" if total > len(rows) else ""
    )
    return (
        f'<style>{_CSS}</style><div class="rl rl-page"><table class="rl-table"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def export_markdown(
    row: Mapping[str, Any],
    record: Mapping[str, Any],
    siblings: Sequence[Mapping[str, Any]] = (),
    note: Mapping[str, Any] | None = None,
) -> str:
    """Return one trajectory as Markdown. Each code fence is longer than any run of backticks in its text."""
    right = verdict(row)[2]
    status = f"{status}; " if (status := roc_status(row, siblings)) else ""
    truth = row.get("truth") if row.get("truth") is not None else record.get("truth")
    lines = [
        f"# {_inline(row.get('problem_id'))}, step {row.get('step')}, sample {row.get('sample')}",
        "",
        f"- trajectory: {_inline(row.get('traj_id'))}",
        f"- run: {_inline(row.get('run_id'))}, stage {_inline(row.get('stage'))}",
        f"- answer: {_inline(row.get('answer'))}, truth {_inline(truth)}: **{right}**",
        f"- {status}advantage {format_value(row.get('advantage'))}",
        "- "
        + ", ".join(
            f"{name.replace('_', ' ')} {format_value(row.get(name))}"
            for name in ("turns", "calls", "errors", "response_tokens")
        ),
    ]
    if len(siblings) > 1:
        lines.append(f"- group: {solved_of(siblings)}")
    if note and (note.get("note") or note.get("tags")):
        lines.append(
            f"- note: {_inline(note.get('note') or '')} {' '.join(_inline(tag) for tag in note.get('tags', []))}"
        )
    for segment in segments(record):
        title = LABELS.get("malformed" if segment.malformed else segment.kind, LABELS["other"])
        outcome = f" ({segment.outcome})" if segment.outcome else ""
        turn = f"Turn {segment.turn}: " if segment.turn else ""
        text = visible(segment.text)
        fence = "`" * max(3, 1 + max((len(run) for run in _backtick_runs(text)), default=0))
        lines += [
            "",
            f"## {turn}{title}{outcome}",
            "",
            f"{fence}{'python' if segment.kind == 'code' else 'text'}",
            text,
            fence,
        ]
    return "\n".join(lines) + "\n"


def _backtick_runs(text: str) -> list[str]:
    return [run for run in "".join(char if char == "`" else " " for char in text).split() if run]


def _inline(value: Any) -> str:
    text = format_value(value).replace("\n", " ")
    fence = "`" * (1 + max((len(run) for run in _backtick_runs(text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else "``"
