"""A run as one self-contained HTML file: summary, curves, intervals, a sample of trajectories with token values, the recipe.

The file needs no kernel and no network. It is computed from the run store only, and equal runs give equal files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from plotly.offline import get_plotlyjs

from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figures import DEFAULT_METRICS, plot_curves, plot_outcomes
from rstar_lab.analysis.inspector.export import (
    Opened,
    closed_page,
    data_element,
    excerpt,
    page_script,
    trajectory_data,
    verdict,
)
from rstar_lab.analysis.inspector.palette import styles
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.metrics import class_title, get_metric, held_out_metrics, measure, rollout_classes
from rstar_lab.analysis.paper import OTHER_SET, SETS, published, reference
from rstar_lab.analysis.paper_figures import figures_of_the_paper
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, open_runs
from rstar_lab.analysis.tables import format_estimate, html_table
from rstar_lab.runs import RunReader, RunStoreError
from rstar_lab.untrusted.text import Html, counted, escaped, html, joined

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


def report_html(run_dir: str | Path, *, compare_with: str | Path | None = None, sample: int = SAMPLE) -> Html:
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
    measured, held_out = _measured(runs), held_out_metrics(both)
    names, known = [*DEFAULT_METRICS, *held_out], any(reference(name) is not None for name in held_out)
    parts = [
        _facts(reader, runs),
        _section("Damaged files, which are left out", joined(html("{}<br>", message) for message in damaged))
        if damaged
        else "",
        _section("Summary", _summary(measured)),
        _section("Curves", _figure(plot_curves(both, names, reference=known))) if len(reader.steps()) > 1 else "",
        _section("Means and 95% intervals", _intervals(measured)),
        _section("Outcomes of tool calls", _figure(plot_outcomes(runs))),
        _classes(runs),
        _section("Comparison", _comparison(runs, open_runs(compare_with))) if compare_with is not None else "",
        _section("Trajectories", _trajectories(runs, sample)),
        _section("Recipe and provenance", _provenance(reader)),
    ]
    return _page(reader.run_id, parts)


def paper_html(runs: RunsLike) -> Html:
    """Return a page with the figures and tables of the paper, made from runs (`figures_of_the_paper`)."""
    parts = []
    for name, shown in figures_of_the_paper(as_runs(runs)).items():
        shares = (*SETS, OTHER_SET) if name == "results" else ()
        body = _figure(shown) if isinstance(shown, Figure) else html_table(shown, shares)
        parts.append(_section(PAPER_TITLES.get(name, name.capitalize()), body))
    general = pd.DataFrame(published()["general"]).T.rename_axis("model").reset_index()
    parts.append(_section("General benchmarks (published)", html_table(general)))
    return _page("rStar2-Agent: the figures of the paper, from these runs", parts)


def _page(title: str, parts: Sequence[Html | str]) -> Html:
    """Return a page that needs no network and runs only its own scripts."""
    style = styles("transcript", "levels", "inspector", "report")
    scripts = [get_plotlyjs(), page_script("report")]
    body = html("{}<main><h1>{}</h1>{}</main>", _without_map_styles(scripts[0]), title, joined(map(escaped, parts)))
    return closed_page(
        title, body, style, scripts, more="img-src data: blob:; ", styles=[""]
    )  # plotly's style sheet is empty at first


def _without_map_styles(plotly: str) -> Html:
    """Return elements with the ids of the style sheets that plotly adds for maps, so that it does not add them."""
    ids = dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly))
    return joined(html('<i id="{}" hidden></i>', name) for name in ids)


def _section(title: str, body: Html) -> Html:
    return html("<section><h2>{}</h2>{}</section>", title, body)


def _facts(reader: RunReader, runs: Runs) -> Html:
    info = reader.info
    steps = reader.steps()
    facts = {
        "Kind": info["kind"], "Status": reader.status, "Started": info.get("started"), "Seed": info.get("seed"),
        "Model": info["recipe"].get("model"), "Steps": len(steps), "Trajectories": f"{runs.count():,}",
        "Parent": (info.get("parent") or {}).get("run"), "Error": info.get("error"),
    }  # fmt: skip
    listed = [html("<div><dt>{}</dt><dd>{}</dd></div>", *fact) for fact in facts.items() if fact[1] is not None]
    return html('<dl class="facts">{}</dl>', joined(listed))


def _measured(runs: Runs) -> dict[str, pd.DataFrame]:
    """Return the rows of `measure` of METRICS, with their texts, for the first and the last third of the steps."""
    steps = sorted(runs.sql("SELECT DISTINCT step FROM trajectories").step)
    size = max(1, len(steps) // 3)
    parts = {
        f"steps {steps[0]} to {steps[size - 1]}": f"step <= {steps[size - 1]}",
        f"steps {steps[-size]} to {steps[-1]}": f"step >= {steps[-size]}",
    }
    found = {}
    for name, where in (parts if len(steps) >= 3 else {"all steps": "TRUE"}).items():
        table = measure(runs, METRICS, by=(), where=where).set_index("metric", drop=False).reindex(METRICS)
        table["metric"] = table.index
        found[name] = table.assign(text=[format_estimate(row) for row in table.itertuples()])
    return found


def _summary(measured: Mapping[str, pd.DataFrame]) -> Html:
    sentences = []
    for metric in ("pass1", "tool_error_rate_correct", "response_tokens"):
        several = len(measured) > 1
        values = [
            f"{table.text[metric]} in {name}" if several else table.text[metric] for name, table in measured.items()
        ]
        sentences.append(html("<li>{}: {}.</li>", get_metric(metric).title, ", ".join(values)))
    return html("<ul>{}</ul><p>In brackets: 95% intervals over problems.</p>", joined(sentences))


def _intervals(measured: Mapping[str, pd.DataFrame]) -> Html:
    columns: dict[str, list[Any]] = {"metric": [get_metric(metric).title for metric in METRICS]}
    for name, table in measured.items():
        columns |= {name: table.text.tolist(), f"n ({name})": table.n.fillna(0).astype(int).tolist()}
    return html('<div class="wide">{}</div>', html_table(pd.DataFrame(columns)))


def _classes(runs: Runs) -> Html | str:
    """Return what became of the rollouts, as a table that adds up; empty without these metrics."""
    table = rollout_classes(runs)
    if table.empty:
        return ""
    titles = [*map(class_title, table.rollout_class), "all rollouts"]
    rollouts, shares = [*table.rollouts, int(table.rollouts.sum())], [*table.share, 1.0]
    return _section(
        "What became of the rollouts", html_table(pd.DataFrame({"": titles, "rollouts": rollouts, "share": shares}))
    )


def _figure(figure: Figure) -> Html:
    """Return the figure as data, which the page's script draws for a light or a dark page."""
    both = [json.loads(themed.to_json()) for themed in (figure, figure.dark())]
    return html(
        '<div class="figure">{}<div class="on-light"></div><div class="on-dark"></div></div>', data_element(both)
    )


def _comparison(runs: Runs, other: Runs) -> Html:
    comparison = compare(other, runs, METRICS)
    return html('<p>{}</p><div class="wide">{}</div>', comparison.sentence, html_table(comparison.table))


def _trajectories(runs: Runs, sample: int) -> Html:
    """Return a list of sampled trajectories and their transcripts, which the script shows on selection."""
    chosen = _sample(runs, sample)
    source = Source(runs)
    items, elements = [], []
    for number, traj_id in enumerate(chosen.traj_id):
        row, record = source.row(traj_id), runs.record(traj_id)
        plain = (row.get("response_tokens") or 0) > TOKEN_LIMIT or len(str(record.get("messages"))) > TEXT_LIMIT
        data = trajectory_data(Opened(row, record, source.siblings(row)), plain=plain)
        state, mark, text = verdict(row)
        item = (
            '<li data-number="{}" data-verdict="{}" data-errors="{}"><button type="button"><b class="{}" title="{}">{}</b> {}'
            "<small>{}</small></button></li>"
        )
        label = excerpt(record.get("question"), row["problem_id"], LABEL)
        known = (("turns", "turn"), ("errors", "error"), ("response_tokens", "token"))
        counts = [counted(row[name], word) for name, word in known if row.get(name) is not None]
        place = ", ".join([f"step {row['step']}", *counts])
        items.append(html(item, number, state, int((row["errors"] or 0) > 0), state, text, mark, label, place))
        elements.append(data_element(data, f"trajectory-{number}"))
    return html(
        "<p>{} of {} trajectories, alternately correct and wrong, with and without tool errors.</p>"
        '<div class="controls"><input type="search" id="search" placeholder="Search in the transcripts" '
        'aria-label="Search in the transcripts"><select id="filter" aria-label="Filter">'
        '<option value="">all</option><option value="correct">correct</option><option value="wrong">wrong</option>'
        '<option value="errors">with tool errors</option></select><span id="count" role="status"></span></div>'
        '<div class="browser"><ol id="list">{}</ol><div id="shown" tabindex="-1"></div></div>{}',
        len(chosen), f"{runs.count():,}", joined(items), joined(elements),
    )  # fmt: skip


def _sample(runs: Runs, count: int) -> pd.DataFrame:
    """Return `count` trajectories, alternately correct and wrong, with and without tool errors, ordered by a hash of their ids."""
    return runs.sql(
        "SELECT traj_id, step FROM ("
        "  SELECT *, row_number() OVER (PARTITION BY reward > 0, errors > 0 ORDER BY md5(traj_id)) AS place FROM trajectories"
        ") WHERE traj_id IN (SELECT traj_id FROM transcripts) ORDER BY place, reward > 0 DESC, errors > 0 DESC, traj_id LIMIT ?",
        [count],
    ).sort_values(["step", "traj_id"], ascending=[False, True])


def _provenance(reader: RunReader) -> Html:
    info = reader.info
    recipe = yaml.safe_dump(info["recipe"].for_display(), sort_keys=False, allow_unicode=True)
    origin = {key: info.get(key) for key in ("versions", "commit", "hardware", "attempts", "extra")}
    return html(
        "<details><summary>Recipe</summary><pre>{}</pre></details>"
        "<details><summary>Versions, commit and hardware</summary><pre>{}</pre></details>",
        recipe, json.dumps(origin, indent=1),
    )  # fmt: skip
