"""A run as one self-contained HTML file: summary, curves, intervals, a sample of trajectories with token values, the recipe.

The file needs no kernel and no network. It is computed from the run store only, and equal runs give equal files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from plotly.offline import get_plotlyjs

from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figures import DEFAULT_METRICS, plot_curves, plot_outcomes
from rstar_lab.analysis.inspector.export import (
    content_hash,
    data_element,
    excerpt,
    page_script,
    trajectory_data,
    verdict,
)
from rstar_lab.analysis.inspector.palette import STATIC, widget_css
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.metrics import (
    class_title,
    format_numbers,
    get_metric,
    held_out_metrics,
    measure,
    rollout_classes,
)
from rstar_lab.analysis.paper import OTHER_SET, SETS, published, reference
from rstar_lab.analysis.paper_figures import figures_of_the_paper
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, open_runs
from rstar_lab.runs import RunReader, RunStoreError
from rstar_lab.untrusted.text import counted, escaped

METRICS = (
    "pass1", "tool_error_rate", "tool_error_rate_correct", "calls", "response_tokens", "response_tokens_correct",
    "reflection_tokens", "truncation_rate",
)  # fmt: skip
SAMPLE = 60  # trajectories
PAPER_TITLES = {
    "held-out accuracy": "Accuracy over the RL steps (Figure 1)", "training": "Training", "stages": "Stages (Figure 8)",
    "results": "pass@1 by benchmark, beside the published results", "lengths": "Response tokens by benchmark",
    "tokens": "Entropy before and after tool responses", "words": "Words with the highest entropy",
}  # fmt: skip
LABEL = 80  # characters of a question in the list
TEXT_LIMIT = 200_000  # characters of a transcript; of longer ones, the beginnings of the messages are shown
TOKEN_LIMIT = 4000  # longer responses are shown without token values, which would make the file large


def report_html(run_dir: str | Path, *, compare_with: str | Path | None = None, sample: int = SAMPLE) -> str:
    """Return the page of a run. compare_with: folder of another run, for curves of both and a paired comparison.

    sample: number of trajectories to include.
    Damaged tables are named and left out. Raises RunStoreError if a folder is not a run or has no trajectories.
    """
    reader = RunReader(run_dir)
    runs, damaged = open_runs(reader.run_dir), [escaped(str(damage.error)) for damage in reader.damages()]
    runs._views.leave_out_damaged = bool(damaged)
    if not runs.count():
        raise RunStoreError(f"run {reader.run_id} has no trajectories, so there is nothing to report")
    both = runs if compare_with is None else open_runs([reader.run_dir, Path(compare_with)])
    parts = [
        _facts(reader, runs),
        _section("Damaged files, which are left out", "<br>".join(damaged)) if damaged else "",
        _section("Summary", _summary(runs)),
        _section("Curves", _curves(both)) if len(reader.steps()) > 1 else "",
        _section("Means and 95% intervals", _intervals(runs)),
        _outcomes(runs),
        _classes(runs),
        _section("Comparison", _comparison(runs, open_runs(compare_with))) if compare_with is not None else "",
        _section("Trajectories", _trajectories(runs, sample)),
        _section("Recipe and provenance", _provenance(reader)),
    ]
    return _page(reader.run_id, parts)


def paper_html(runs: RunsLike) -> str:
    """Return a page with the figures and tables of the paper, made from runs (`figures_of_the_paper`)."""
    opened = as_runs(runs)
    parts = []
    for name, shown in figures_of_the_paper(opened).items():
        if isinstance(shown, Figure):
            body = _figure(shown)
        else:
            shares = (*SETS, OTHER_SET) if name == "results" else ()
            body = format_numbers(shown, shares).to_html(index=False, border=0, na_rep="–")
        parts.append(_section(PAPER_TITLES.get(name, name.capitalize()), body))
    general = pd.DataFrame(published()["general"]).T
    parts.append(_section("General benchmarks (published)", general.to_html(border=0, na_rep="–")))
    return _page("rStar2-Agent: the figures of the paper, from these runs", parts)


def _page(title: str, parts: Sequence[str]) -> str:
    """Return a page that needs no network and runs only its own scripts."""
    style = widget_css() + (STATIC / "report.css").read_text(encoding="utf-8")
    scripts = [get_plotlyjs(), page_script("report")]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, style)}">'
        f"<title>{escaped(title)}</title><style>{style}</style>"
        f"</head><body>{_without_map_styles(scripts[0])}<main><h1>{escaped(title)}</h1>{''.join(parts)}</main>"
        f"{''.join(f'<script>{text}</script>' for text in scripts)}</body></html>\n"
    )


def _without_map_styles(plotly: str) -> str:
    """Return elements with the ids of the style sheets that plotly adds for maps, so that it does not add them."""
    ids = dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly))
    return "".join(f'<i id="{name}" hidden></i>' for name in ids)


def _policy(scripts: Sequence[str], style: str) -> str:
    """Return a content security policy that runs only these scripts, by their hashes, and connects to nowhere.

    No other script runs and nothing is loaded, even if a text were not escaped. The empty style sheet is plotly's, which
    adds its rules by script.
    """
    hashes = " ".join(map(content_hash, scripts))
    return (
        f"default-src 'none'; script-src {hashes}; style-src {content_hash(style)} {content_hash('')}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _facts(reader: RunReader, runs: Runs) -> str:
    info = reader.info
    steps = reader.steps()
    facts = {
        "Kind": info["kind"], "Status": reader.status, "Started": info.get("started"), "Seed": info.get("seed"),
        "Model": info["recipe"].get("model"), "Steps": len(steps), "Trajectories": f"{runs.count():,}",
        "Parent": (info.get("parent") or {}).get("run"), "Error": info.get("error"),
    }  # fmt: skip
    listed = "".join(
        f"<div><dt>{key}</dt><dd>{escaped(value)}</dd></div>" for key, value in facts.items() if value is not None
    )
    return f'<dl class="facts">{listed}</dl>'


def _thirds(runs: Runs) -> list[tuple[str, str]]:
    """Return (name, condition) of the parts of the run that are compared: first and last third of its steps."""
    steps = sorted(runs.sql("SELECT DISTINCT step FROM trajectories").step)
    if len(steps) < 3:
        return [("all steps", "TRUE")]
    size = max(1, len(steps) // 3)
    return [
        (f"steps {steps[0]} to {steps[size - 1]}", f"step <= {steps[size - 1]}"),
        (f"steps {steps[-size]} to {steps[-1]}", f"step >= {steps[-size]}"),
    ]


def _measured(runs: Runs) -> list[tuple[str, dict[str, Any]]]:
    parts = []
    for name, where in _thirds(runs):
        table = measure(runs, METRICS, by=(), where=where)
        parts.append((name, {row["metric"]: row for row in table.to_dict("records")}))
    return parts


def _format(metric: str, row: dict[str, Any] | None) -> str:
    if row is None or row["value"] is None or pd.isna(row["value"]):
        return "–"
    digits = "{:.1%}" if get_metric(metric).percent else "{:.2f}"
    text = digits.format(row["value"])
    if row["low"] is not None and not pd.isna(row["low"]):
        text += f" [{digits.format(row['low'])}, {digits.format(row['high'])}]"
    return text


def _summary(runs: Runs) -> str:
    parts = _measured(runs)
    sentences = []
    for metric in ("pass1", "tool_error_rate_correct", "response_tokens"):
        title = get_metric(metric).title
        values = [_format(metric, measured.get(metric)) for _, measured in parts]
        if len(parts) == 1:
            sentences.append(f"<li>{escaped(title)}: {values[0]}.</li>")
        else:
            sentences.append(f"<li>{escaped(title)}: {values[0]} in {parts[0][0]}, {values[1]} in {parts[1][0]}.</li>")
    return f"<ul>{''.join(sentences)}</ul><p>In brackets: 95% intervals over problems.</p>"


def _intervals(runs: Runs) -> str:
    parts = _measured(runs)
    head = "".join(f"<th>{escaped(name)}</th><th>n</th>" for name, _ in parts)
    rows = []
    for metric in METRICS:
        cells = "".join(
            f"<td>{_format(metric, measured.get(metric))}</td><td>{measured[metric]['n'] if metric in measured else 0:,}</td>"
            for _, measured in parts
        )
        rows.append(f"<tr><th>{escaped(get_metric(metric).title)}</th>{cells}</tr>")
    return (
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _curves(runs: Runs) -> str:
    held_out = held_out_metrics(runs)
    published = any(reference(name) is not None for name in held_out)
    return _figure(plot_curves(runs, [*DEFAULT_METRICS, *held_out], reference=published))


def _outcomes(runs: Runs) -> str:
    try:
        figure = plot_outcomes(runs)
    except RunStoreError:  # the run kept no calls
        return ""
    return _section("Outcomes of tool calls", _figure(figure))


def _classes(runs: Runs) -> str:
    """Return what became of the rollouts, as a table that adds up; empty without these metrics."""
    table = rollout_classes(runs)
    if table.empty:
        return ""
    rows = list(zip(map(class_title, table.rollout_class), table.rollouts, table.share, strict=True))
    rows.append(("all rollouts", int(table.rollouts.sum()), 1.0))
    body = "".join(
        f"<tr><th>{escaped(title)}</th><td>{count:,}</td><td>{share:.1%}</td></tr>" for title, count, share in rows
    )
    head = "<tr><th></th><th>rollouts</th><th>share</th></tr>"
    return _section("What became of the rollouts", f"<table><thead>{head}</thead><tbody>{body}</tbody></table>")


def _figure(figure: Figure) -> str:
    """Return the figure as data, which the page's script draws for a light or a dark page."""
    both = [json.loads(themed.to_json()) for themed in (figure, figure.dark())]
    boxes = "".join(f'<div class="on-{theme}"></div>' for theme in ("light", "dark"))
    return f'<div class="figure">{data_element(both)}{boxes}</div>'


def _comparison(runs: Runs, other: Runs) -> str:
    comparison = compare(other, runs, METRICS)
    rows = []
    for row in comparison.table.to_dict("records"):
        cells = "".join(f"<td>{escaped(_cell(value))}</td>" for value in row.values())
        rows.append(f"<tr>{cells}</tr>")
    head = "".join(f"<th>{escaped(column)}</th>" for column in comparison.table.columns)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<p>{escaped(comparison.sentence)}</p><div class="wide">{table}</div>'


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if np.isnan(value) else f"{value:.3g}"
    return str(value)


def _trajectories(runs: Runs, sample: int) -> str:
    """Return a list of sampled trajectories and their transcripts, which the script shows on selection."""
    chosen = _sample(runs, sample)
    source = Source(runs)
    items, elements = [], []
    for number, row in enumerate(chosen.to_dict("records")):
        record = runs.record(row["traj_id"])
        plain = (row.get("response_tokens") or 0) > TOKEN_LIMIT or len(str(record.get("messages"))) > TEXT_LIMIT
        full = source.row(row["traj_id"])
        data = trajectory_data(full, record, source.siblings(full), plain=plain)
        state, mark, text = verdict(full)
        place = f"step {row['step']}"
        label = excerpt(record.get("question"), row["problem_id"], LABEL)
        items.append(
            f'<li data-number="{number}" data-verdict="{state}" data-errors="{int((row["errors"] or 0) > 0)}">'
            f'<button type="button"><b class="{state}" title="{escaped(text)}">{mark}</b> {escaped(label)}'
            f"<small>{', '.join([place, *_counts(full)])}</small></button></li>"
        )
        elements.append(data_element(data, f"trajectory-{number}"))
    controls = (
        '<div class="controls"><input type="search" id="search" placeholder="Search in the transcripts" '
        'aria-label="Search in the transcripts"><select id="filter" aria-label="Filter">'
        '<option value="">all</option><option value="correct">correct</option><option value="wrong">wrong</option>'
        '<option value="errors">with tool errors</option></select><span id="count" role="status"></span></div>'
    )
    note = f"<p>{len(chosen)} of {runs.count():,} trajectories, alternately correct and wrong, with and without tool errors.</p>"
    return (
        f'{note}{controls}<div class="browser"><ol id="list">{"".join(items)}</ol><div id="shown" tabindex="-1"></div></div>'
        f"{''.join(elements)}"
    )


def _counts(row: Mapping[str, Any]) -> list[str]:
    """Return turns, errors and tokens as texts, as far as they are known."""
    known = (("turns", "turn"), ("errors", "error"), ("response_tokens", "token"))
    return [counted(row[name], word) for name, word in known if row.get(name) is not None]


def _sample(runs: Runs, count: int) -> pd.DataFrame:
    """Return `count` trajectories, alternately correct and wrong, with and without tool errors, ordered by a hash of their ids."""
    return runs.sql(
        "SELECT traj_id, problem_id, step, reward, turns, errors, response_tokens FROM ("
        "  SELECT *, row_number() OVER (PARTITION BY reward > 0, errors > 0 ORDER BY md5(traj_id)) AS place FROM trajectories"
        ") WHERE traj_id IN (SELECT traj_id FROM transcripts) ORDER BY place, reward > 0 DESC, errors > 0 DESC, traj_id LIMIT ?",
        [count],
    ).sort_values(["step", "traj_id"], ascending=[False, True])


def _provenance(reader: RunReader) -> str:
    info = reader.info
    recipe = yaml.safe_dump(info["recipe"].for_display(), sort_keys=False, allow_unicode=True)
    origin = {key: info.get(key) for key in ("versions", "commit", "hardware", "attempts", "extra")}
    return (
        f"<details><summary>Recipe</summary><pre>{escaped(recipe)}</pre></details>"
        f"<details><summary>Versions, commit and hardware</summary><pre>{escaped(json.dumps(origin, indent=1))}</pre></details>"
    )
