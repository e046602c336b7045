"""The trajectory inspector: a notebook widget that lists the rollouts of a run store and shows their transcripts."""

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import traitlets
from IPython.display import display

from rstar_lab.analysis.figure_theme import template
from rstar_lab.analysis.filters import Where, as_mapping, json_filter, where_sql
from rstar_lab.analysis.forks import Fork, alternatives_table, json_rows, model_argument, turn_text
from rstar_lab.analysis.inspector.export import Opened, export_html, export_markdown, listing_html, plain_html
from rstar_lab.analysis.inspector.link import LinkedFigure, answer_figure, check_links, themed
from rstar_lab.analysis.inspector.notes import View, check_view, is_typed, read_views, write_note, write_view
from rstar_lab.analysis.inspector.palette import SCALES, join_modules, widget_css
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.inspector.transcript import CHANNELS, segments, token_values
from rstar_lab.analysis.inspector.widget import Bundle, NotebookWidget
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs
from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.files import check_type
from rstar_lab.untrusted.text import Html, joined, visible

_MODULES = (
    "dom", "links", "python", "tokens", "transcript", "list", "group", "alternatives", "fork", "views", "filters", "cache", "detail",
    "plot", "figures", "inspector",
)  # fmt: skip
MAX_FIGURES = 3
Json = dict[str, Any]
Buffers = list[Any]
_GROUP = ("run_id", "step", "group_id")


_NUMBERS = itertools.count(1)


def _place() -> str:
    """Return the notebook of this kernel and the number of the inspector in it, or "" outside of a notebook server."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")
    return f"{notebook}#{next(_NUMBERS)}" if notebook else ""


class Inspector(NotebookWidget):
    """A list of trajectories beside the transcript of the selected one.

    store: the result of `open_runs(...)`, or a folder of runs.
    filters: filters of the list, see `rstar_lab.analysis.filters.Filter`.
    selected: traj_id of the open transcript.
    columns: columns of the list, such as ["step", "reward", "answer"]; default: all.
    `filters`, `columns` and `selected` can be set from Python at any time, and follow what the user selects.
    forks: results of the panel *Fork*, the newest last.
    """

    _esm = join_modules(*_MODULES)
    _css = widget_css()

    filters = traitlets.Dict().tag(sync=True)
    scope = traitlets.Dict().tag(sync=True)
    sort: traitlets.List[Any] = traitlets.List().tag(sync=True)
    columns: traitlets.List[Any] = traitlets.List().tag(sync=True)
    selected = traitlets.Unicode("").tag(sync=True)
    channel = traitlets.Unicode("entropy").tag(sync=True)
    height = traitlets.Int(760).tag(sync=True)
    revision = traitlets.Int(0).tag(sync=True)
    reveal = traitlets.Int(0).tag(sync=True)
    label = traitlets.Unicode("").tag(sync=True)
    figures = traitlets.List(trait=traitlets.Dict()).tag(sync=True)  # beside the list, of {name, json}
    dark_template = traitlets.Dict().tag(sync=True)
    # Notebook and number of the inspector in it: the browser restores the state of the same inspector after a restart.
    place = traitlets.Unicode("").tag(sync=True)

    def __init__(self, store: RunsLike, linked: Sequence[go.Figure] = (), **state: Any) -> None:
        self.linked = [themed(figure) for figure in linked]
        self.source = Source(as_runs(store))
        self._notes: dict[str, dict[str, Any]] | None = None
        self.forks: list[Fork] = []
        self._continuations: dict[str, Source] = {}
        super().__init__(**{"label": self.source.store.path, "place": _place(), **state})
        self._condition(self.filters, {})  # raises for an unknown filter
        for figure in self.linked:
            check_links(self, figure)
        self.on_msg(self._on_message)

    def show(self, label: str | Mapping[str, Any] = "", **filters: Any) -> None:
        """List the rollouts that match `filters`, as a click on a curve does. `show()` without filters lists all.

        label: description shown above the list; or a filter as a mapping, such as {"correct": True}.
        """
        label, filters = ("", {**label, **filters}) if isinstance(label, Mapping) else (label, filters)
        self._condition(filters, {})  # raises for an unknown filter
        named = label or ", ".join(f"{key} = {value}" for key, value in filters.items())
        self.scope = {"label": named, "filter": json_filter(filters)} if filters else {}

    def show_and_reveal(self, label: str, **filters: Any) -> None:
        """List the matching rollouts, scroll the page to the list, and open its first row."""
        with self.hold_sync():
            self.show(label, **filters)
            self.reveal += 1

    def set_store(self, store: Runs, label: str) -> None:
        """Show the rollouts of other runs."""
        self.source = Source(store)
        self.label = label
        self.selected = ""
        self.filters, self.scope = {}, {}
        self.refresh()

    def refresh(self) -> None:
        """Read the store again, after a run has grown."""
        self.source.refresh()
        self._notes = None
        self.revision += 1

    def rows(self, limit: int = 1000) -> pd.DataFrame:
        """Return the first `limit` rows of the list in its current filter and order."""
        return pd.DataFrame(self.source.page(self.where, self.sort, 0, limit))

    @property
    def where(self) -> str:
        """SQL condition of the current filter."""
        return self._condition(self.filters, self.scope)

    def _condition(self, filters: Mapping[str, Any], scope: Mapping[str, Any]) -> str:
        parts = [self.where_sql(part) for part in (filters, scope.get("filter")) if part]
        return " AND ".join(f"({part})" for part in parts) if len(parts) > 1 else parts[0] if parts else "TRUE"

    def where_sql(self, where: Where) -> str:
        """Return a filter as an SQL condition on the rows of this list. Raises UserError for an unknown filter."""
        return where_sql(where, noted=self._all_notes)

    @property
    def views(self) -> dict[str, View]:
        """The saved views: name to filters, scope, sort and columns."""
        return read_views(self._views_folder())

    def save_view(self, name: str) -> None:
        """Store the current filters, order and columns under a name, in `views.json` of the runs folder. Replaces a view of
        this name."""
        view = View(filters=self.filters, scope=self.scope, sort=self.sort, columns=self.columns)
        write_view(self._views_folder(), name, view)

    def show_view(self, name: str) -> None:
        """Apply a saved view. Raises UserError if there is none of this name."""
        views = self.views
        if name not in views:
            raise UserError(f"no view {name!r}; there are: {', '.join(views) or 'none'}")
        check_view(name, views[name])
        with self.hold_sync():
            for part, value in views[name].items():
                setattr(self, part, value)

    def delete_view(self, name: str) -> None:
        """Delete a saved view."""
        write_view(self._views_folder(), name, None)

    def _views_folder(self) -> Path:
        folder = Path(self.source.store.path)
        if folder.name and folder.is_dir():
            return folder
        if not self.source.runs:
            raise UserError("these runs have no rollouts, so there is no folder for views")
        return self.source.store.run_dir(self.source.runs[0])

    def html(self, traj_id: str = "") -> str:
        """Return a trajectory (default: the selected one) as a self-contained HTML page."""
        return export_html(self._load(traj_id or self.selected))

    def markdown(self, traj_id: str = "") -> str:
        """Return a trajectory (default: the selected one) as Markdown."""
        return export_markdown(self._load(traj_id or self.selected))

    def fork(
        self,
        traj_id: str = "",
        *,
        turn: int | None = None,
        k: int = 16,
        edit: str = "",
        model: str | Path | None = None,
        url: str = "",
        seed: int = 0,
        functions: Collection[str] = (),
    ) -> Fork:
        """Sample `k` continuations of a trajectory (default: the selected one) from the start of a turn.

        turn: from 0; None: every turn. edit: text with which the turn starts. model: model folder; default: the checkpoint
        of the run that is nearest to the weights of the rollout. url: server to sample from instead of a checkpoint. functions: as in
        `rl.fork.fork`.
        The continuations have the limits, tools and reward of the run, and are stored beside it as a run of kind `fork`.
        Raises UserError if the token arrays of the trajectory or a checkpoint are missing.
        """
        from rstar_lab.rl.fork import fork  # imports torch, which the inspector itself does not need

        row = self.source.row(traj_id or self.selected)
        folder = self.source.store.run_dir(row["run_id"])
        path = None if model is None else Path(model)
        made = fork(
            folder, row["traj_id"], int(row["step"]), turn=turn, k=k, edit=edit, model=path, url=url, seed=seed, functions=functions,
        )  # fmt: skip
        return Fork(made.run, row["traj_id"], float(row["reward"]), made.state, made.differing, made.weights)

    def alternatives(
        self, position: int, traj_id: str = "", *, k: int = 10, model: str | Path | None = None, url: str = ""
    ) -> pd.DataFrame:
        """Return the `k` most likely tokens at a response position of a trajectory (default: the selected one), and the stored token.

        Columns: rank, token_id, text, probability, log_prob, stored.
        position: of the token in the response, from 0. model, url: as in `fork`. `.attrs` has weights, the model folder or URL.
        Raises UserError if the token arrays of the trajectory or a checkpoint are missing.
        """
        row = self.source.row(traj_id or self.selected)
        folder = self.source.store.run_dir(row["run_id"])
        return alternatives_table(folder, row["traj_id"], position, k=k, model=model, url=url)

    def _load(self, traj_id: str) -> Opened:
        source = self._source_of(traj_id)
        row = source.row(traj_id)
        return Opened(row, source.record(row), source.siblings(row), self._all_notes().get(traj_id, {}))

    def _source_of(self, traj_id: str) -> Source:
        return self._continuations.get(traj_id, self.source)

    def _all_notes(self) -> dict[str, dict[str, Any]]:
        if self._notes is None:
            self._notes = self.source.store.notes()
        return self._notes

    # Requests of the browser are {id, op, ...}; responses are {id, result} or {id, error}. The operation `page` is the method `_page`.
    _OPERATIONS: ClassVar = frozenset(
        ("start", "page", "questions", "place", "open", "search", "alternatives", "fork", "forked", "turn_text", "note", "views",
         "save_view", "delete_view", "export")
    )  # fmt: skip

    def _on_message(self, _widget: Any, message: Any, _buffers: Any) -> None:
        if answer_figure(self, message, self.linked, self):
            return
        op = message.get("op") if isinstance(message, dict) else None
        if op in self._OPERATIONS:
            arguments = {key: value for key, value in message.items() if key not in ("op", "id")}
            buffers: Buffers = []
            try:
                answer: Json = {"result": getattr(self, f"_{op}")(buffers, **arguments)}
            except UserError as error:
                answer = {"error": visible(error)}
            except Exception as error:  # shown in the widget
                answer = {"error": visible(f"{type(error).__name__}: {error}")}
            self.send({"id": message.get("id"), **answer}, buffers)

    def _start(self, _buffers: Buffers) -> Json:
        return {**self.source.choices(), "columns": list(self.source.columns), "scales": SCALES}

    # Requests carry the filters, because the widget's state may reach the kernel after the request.
    def _page(self, _buffers: Buffers, offset: int, limit: int, filters: Json, scope: Json, sort: list) -> Json:
        self.source.load()
        where, notes = self._condition(filters, scope), self._all_notes()
        rows = self.source.page(where, sort, int(offset), min(int(limit), 500))
        for row in rows:
            row["note"] = notes.get(row["traj_id"])
        return {"rows": rows, "total": self.source.count(where), "all": self.source.count("TRUE")}

    def _place(self, _buffers: Buffers, traj_id: str, filters: Json, scope: Json, sort: list) -> int | None:
        return self.source.index_of(traj_id, self._condition(filters, scope), sort)

    def _questions(self, _buffers: Buffers, rows: list[Json]) -> dict[str, str]:
        return self.source.questions(rows)

    # group: run id, step and group id, if the browser knows them. One query then reads the row and its siblings.
    def _open(self, buffers: Buffers, traj_id: str, raw: bool = False, group: Sequence[Any] | None = None) -> Json:
        source = self._source_of(traj_id)
        siblings = [] if group is None else source.siblings(dict(zip(_GROUP, group, strict=True)))
        row = next((dict(sibling) for sibling in siblings if sibling["traj_id"] == traj_id), None)
        if row is None:
            row = source.row(traj_id)
            siblings = source.siblings(row)
        row["note"] = self._all_notes().get(traj_id)
        answer: Json = {"row": row, "siblings": siblings, "channels": list(CHANNELS)}
        try:
            record = source.record(row)
        except UserError as error:
            return {**answer, "segments": [], "tokens": 0, "missing": str(error)}
        values = np.ascontiguousarray(token_values(record))
        buffers.append(values.tobytes())
        parts = [segment.payload() for segment in segments(record, raw=raw)]
        question = record.get("question")
        answer["question"] = visible(question) if isinstance(question, str) and question.strip() else None
        return {**answer, "segments": parts, "tokens": values.shape[1]}

    def _search(self, _buffers: Buffers, text: str, filters: Json, scope: Json, sort: list) -> Json:
        return self.source.search(text, self._condition(filters, scope))

    def _alternatives(self, _buffers: Buffers, traj_id: str, position: int, weights: str) -> Json:
        frame = self.alternatives(int(position), traj_id, **model_argument(weights, self.source, traj_id))
        return {"rows": json_rows(frame), "weights": frame.attrs["weights"]}

    def _fork(self, _buffers: Buffers, traj_id: str, turn: int | None, k: int, edit: str, weights: str) -> Json:
        model = model_argument(weights, self.source, traj_id, fork=True)
        forked = self.fork(traj_id, turn=turn, k=int(k), edit=edit, **model)
        self.forks.append(forked)
        self._continuations |= dict.fromkeys(forked.tree.traj_id, Source(forked.runs))
        return forked.payload()

    def _forked(self, _buffers: Buffers, traj_id: str) -> Json | None:
        """Return the last fork of a rollout, or None."""
        made = next((forked for forked in reversed(self.forks) if forked.traj_id == traj_id), None)
        return None if made is None else made.payload()

    def _turn_text(self, _buffers: Buffers, traj_id: str, turn: int) -> str:
        return turn_text(self.source.record(self.source.row(traj_id)), int(turn))

    def _note(self, _buffers: Buffers, traj_id: str, note: str, tags: list[str]) -> Json:
        entry = write_note(self.source.store.run_dir(self.source.row(traj_id)["run_id"]), traj_id, note, tags)
        self._notes = None
        return entry

    def _views(self, _buffers: Buffers) -> Json:
        """Return the views that the page may apply: those with typed filters only."""
        return {name: view for name, view in self.views.items() if is_typed(view)}

    # The view is sent with the request, because the widget's state may reach the kernel after it.
    def _save_view(self, _buffers: Buffers, name: str, view: Json) -> Json:
        write_view(self._views_folder(), name, check_type(view, View, f"view {name!r}"))
        return self._views([])

    def _delete_view(self, _buffers: Buffers, name: str) -> Json:
        self.delete_view(name)
        return self._views([])

    def _export(self, _buffers: Buffers, traj_id: str, kind: str) -> str:
        return self.html(traj_id) if kind == "html" else self.markdown(traj_id)

    def static_bundle(self) -> Bundle:
        return {"text/html": self.static_html(), "text/plain": repr(self)}

    def static_html(self) -> Html:
        """Return the first rows of the list and the selected transcript as HTML (default: the first with token values) without scripts."""
        rows = self.source.page(self.where, self.sort, 0, 12)
        with_values = [row for row in rows if row.get("entropy") is not None]
        chosen = self.selected or next((row["traj_id"] for row in with_values or rows), "")
        questions: dict[str, str] = {}
        with suppress(UserError):  # without questions, the list shows the ids of the problems
            questions = self.source.questions(rows)
        page = listing_html(rows, self.source.count(self.where), self.label, questions)
        if chosen:
            with suppress(UserError):  # without a transcript, the list alone is shown
                page = joined([page, plain_html(self._load(chosen))])
        return page

    def _ipython_display_(self, **options: Any) -> None:
        for figure in self.linked:
            display(LinkedFigure(figure, self).static_bundle(), raw=True)
        super()._ipython_display_(**options)

    def replacement(self) -> "Inspector":
        widget = Inspector(self.source.store, self.linked)
        widget.source, widget.forks, widget._continuations = self.source, self.forks, self._continuations
        for name in Inspector.class_own_traits(sync=True):
            traitlets.link((self, name), (widget, name))
        return widget


def inspect(store: RunsLike, where: Where = None, **state: Any) -> Inspector:
    """Return an inspector of a runs folder, or of the result of `open_runs`.

    where: filter of the list, SQL text or a mapping, see `rstar_lab.analysis.filters.Filter`.
    state: initial values of the inspector's traits.
    """
    return Inspector(store, filters=json_filter(as_mapping(where)), **state)


def explore(figures: go.Figure | Sequence[go.Figure], store: RunsLike, **state: Any) -> Inspector:
    """Return one widget with up to three figures and the list of rollouts beside them. Display it in a cell.

    A click on a point or a box around several points lists their rollouts and opens the first one. On a page wider than 1500
    pixels the figures are on the left, else they are above the list.

    figures: figures whose points define their rollouts, see `LinkedFigure`. store: the result of `open_runs`, or a runs folder.
    state: initial values of the inspector's traits, such as `filters`, `selected`, `height`.
    Raises UserError without figures, for too many, and if a trace names an unknown filter.
    """
    shown = [figures] if isinstance(figures, go.Figure) else list(figures)
    if not 1 <= len(shown) <= MAX_FIGURES:
        raise UserError(f"explore shows 1 to {MAX_FIGURES} figures, got {len(shown)}")
    panes = [{"name": _name(figure, i), "json": themed(figure).to_json()} for i, figure in enumerate(shown, 1)]
    dark = template("dark").to_plotly_json()
    return Inspector(store, shown, **{"height": 900, "figures": panes, "dark_template": dark, **state})


def _name(figure: go.Figure, number: int) -> str:
    """Return a short name of a figure for its tab: its title or the title of its first panel."""
    titles = [figure.layout.title.text, *(note.text for note in figure.layout.annotations)]
    if any(isinstance(trace, go.Heatmap) for trace in figure.data):
        return "Heat map"
    return next((unescape(str(title))[:24] for title in titles if title), f"Figure {number}")
