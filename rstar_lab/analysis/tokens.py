"""Analysis of tokens by entropy: forking tokens, reflection tokens and the words in which they occur.

Following the paper, the model tokens with the top 20% of entropy are analysed: forking tokens before any tool response,
and reflection tokens after one (split here by whether the last response was an error). Tokens inside a tool call are
reported separately, because code usually has low entropy.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.filters import Where, sql_list
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, named_rows
from rstar_lab.analysis.token_frame import token_frame
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.errors import NotStored
from rstar_lab.runs.messages import own_texts
from rstar_lab.runs.reflection_words import FORKING_WORDS, REFLECTION_WORDS, word_pattern
from rstar_lab.tool_calls import parse_stored_calls

TOP = 0.2
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_COLUMNS = [
    "run_id", "step", "traj_id", "reward", "position", "text", "word", "entropy", "log_prob", "mismatch", "advantage", "kind", "code",
    "listed",
]  # fmt: skip
KINDS = ("before any tool response", "after success", "after error")


def token_table(
    runs: RunsLike,
    where: Where = None,
    *,
    limit: int = 200,
    top: float = TOP,
    words: Sequence[str] = (*FORKING_WORDS, *REFLECTION_WORDS),
) -> pd.DataFrame:
    """Return one row per model token of at most `limit` trajectories, a fixed sample of those with entropies.

    Columns: run_id, step, traj_id, reward, position, text, word (that contains the token), entropy (nats), log_prob (of the
    trainer), mismatch (engine minus trainer), advantage, kind (before any tool response, after success, after error),
    code (inside a tool call), listed (part of one of `words`), high (in the `top` share of the sample by entropy).
    Raises RunStoreError if no such trajectory has token arrays, or the run has no vocabulary; UserError for a wrong `limit` or `top`.
    """
    runs = as_runs(runs)
    if limit < 1 or not 0 < top < 1:
        raise UserError(f"token_table: limit must be at least 1 and top between 0 and 1; got {limit} and {top}")
    condition = runs.condition(where)
    chosen = runs.sql(
        f"""SELECT traj_id, run_id, step, reward, advantage FROM trajectories
            WHERE {condition} AND entropy IS NOT NULL ORDER BY hash(traj_id), traj_id LIMIT {int(limit)}"""
    )
    arrays = _arrays(runs, chosen)
    tables = [_tokens(runs, row, arrays[row.traj_id], words) for row in named_rows(chosen) if row.traj_id in arrays]
    if not tables:
        hint = "set `rl.token_arrays: kept` in the recipe"
        raise RunStoreError(f"no selected trajectory has token arrays with entropies; {hint}")
    frame = pd.concat(tables, ignore_index=True)
    frame["high"] = frame.entropy >= frame.entropy.quantile(1 - top)
    return frame


def _arrays(runs: Runs, chosen: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return token arrays and the positions and outcomes of tool responses, by traj_id."""
    if chosen.empty:
        return {}
    condition = f"step IN ({sql_list(chosen.step.unique())}) AND traj_id IN ({sql_list(chosen.traj_id)})"
    table = runs.arrow(
        f"""SELECT traj_id, response_ids, loss_mask, engine_log_probs, trainer_log_probs, entropy FROM transcripts
            WHERE {condition} AND entropy IS NOT NULL AND response_ids IS NOT NULL"""
    )
    rows: dict[str, dict[str, Any]] = {row["traj_id"]: row | {"calls": []} for row in table.to_pylist()}
    try:
        columns = "traj_id, position, outcome"
        calls = runs.sql(f"SELECT {columns} FROM calls WHERE {condition} AND position IS NOT NULL ORDER BY position")
    except NotStored:
        return rows
    for traj_id, *call in calls.itertuples(index=False):
        if traj_id in rows:
            rows[traj_id]["calls"].append(call)
    return rows


def _tokens(runs: Runs, row: Any, arrays: dict[str, Any], words: Sequence[str]) -> pd.DataFrame:
    texts = runs.texts(row.run_id, arrays["response_ids"])
    if texts is None:
        raise RunStoreError(f"run {row.run_id} has no vocabulary (tokens.json), so its tokens have no text")
    frame = token_frame(arrays | {"advantage": row.advantage}, texts, arrays["calls"])
    mask = frame.model.to_numpy()
    pieces = [text or "" if by_model else " " for text, by_model in zip(texts, mask, strict=True)]
    text, ends = "".join(pieces), np.cumsum([len(part) for part in pieces])
    starts = ends - [len(part) for part in pieces]
    frame = frame.rename(columns={"trainer_log_prob": "log_prob"}).assign(
        run_id=row.run_id, step=row.step, reward=row.reward, word=pd.Series(_words(text, starts, ends), dtype=object),
        kind=frame.after.map({"ok": KINDS[1], "error": KINDS[2]}).fillna(KINDS[0]),
        code=_inside(_calls(text, mask, starts, ends), starts, ends),
        listed=_inside([match.span() for match in word_pattern(tuple(words)).finditer(text)], starts, ends),
    )  # fmt: skip
    return frame.loc[mask & frame.entropy.notna(), _COLUMNS]


def _words(text: str, starts: np.ndarray, ends: np.ndarray) -> list[str]:
    """Return for each token the word that contains its first visible character, in lower case; "" outside of words."""
    spans = [match.span() for match in _WORD.finditer(text)]
    begins = [first for first, _ in spans]
    words = []
    for start, end in zip(starts, ends, strict=True):
        at = start + len(text[start:end]) - len(text[start:end].lstrip())
        place = bisect_right(begins, at) - 1
        inside = at < end and place >= 0 and at < spans[place][1]
        words.append(text[slice(*spans[place])].lower() if inside else "")
    return words


def _calls(text: str, mask: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Return the offsets of the calls in the turns of the model. mask: whether the model wrote each token."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    spans = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        begin = int(starts[first])
        calls = parse_stored_calls(text[begin : int(ends[last - 1])])
        spans += [(begin + call.start, begin + call.end) for call in calls]
    return spans


def _inside(spans: list[tuple[int, int]], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return whether each token overlaps one of the spans."""
    hit = np.zeros(len(starts), bool)
    for first, last in spans:
        hit |= (starts < last) & (ends > first)
    return hit


def word_list(table: pd.DataFrame, *, min_count: int = 5) -> pd.DataFrame:
    """Return the words outside of tool calls by mean entropy of their first token, highest first. Numbers are not words.

    Columns: word, entropy (mean at the first token), count, high_share, after_error and after_success (share of its uses),
    listed (in the word list of the table). min_count: minimum number of uses.
    """
    words = table[table.word.str.contains(r"[^\W\d_]") & ~table.code]
    first = words[(words.word != words.word.shift()) | (words.traj_id != words.traj_id.shift())]
    grouped = first.assign(error=first.kind == KINDS[2], success=first.kind == KINDS[1]).groupby("word")
    frame = grouped.agg(
        entropy=("entropy", "mean"), count=("entropy", "size"), high_share=("high", "mean"), after_error=("error", "mean"),
        after_success=("success", "mean"), listed=("listed", "max"),
    )  # fmt: skip
    frame = frame[frame["count"] >= min_count].sort_values(["entropy", "count"], ascending=False)
    return frame.reset_index()


def token_kinds(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per kind of token: kind, code, tokens, share (of the sample), entropy (mean), high_share, listed_share.

    high_share: share of the kind's tokens with high entropy. high_part: share of all high-entropy tokens that are of the kind.
    """
    grouped = table.groupby(["kind", "code"], as_index=False).agg(
        tokens=("entropy", "size"), entropy=("entropy", "mean"), high=("high", "sum"), listed_share=("listed", "mean")
    )
    grouped["share"] = grouped.tokens / len(table)
    grouped["high_share"] = grouped.high / grouped.tokens
    grouped["high_part"] = grouped.high / max(int(table.high.sum()), 1)
    return grouped.drop(columns="high")


def excerpts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the three tokens with the highest entropy of each kind in context: kind, code, entropy, excerpt, traj_id.

    excerpt: the token between » and «, with 40 characters of the model's text on both sides; … marks a tool response.
    """
    rows = []
    highest = table.sort_values("entropy", ascending=False).groupby(["kind", "code"], sort=True).head(3)
    texts = {traj_id: part for traj_id, part in table[table.traj_id.isin(highest.traj_id)].groupby("traj_id")}
    for row in named_rows(highest.sort_values(["kind", "code", "entropy"], ascending=[True, True, False])):
        of_trajectory = texts[row.traj_id]
        at = int(np.flatnonzero(of_trajectory.position == row.position)[0])
        gaps = of_trajectory.position.diff().gt(1)
        pieces = [f"…{text}" if gap else text for text, gap in zip(of_trajectory.text.fillna(""), gaps, strict=True)]
        before, after = "".join(pieces[:at])[-40:], "".join(pieces[at + 1 :])[:40]
        rows.append((row.kind, row.code, row.entropy, f"{before}»{row.text}«{after}", row.traj_id))
    return pd.DataFrame(rows, columns=["kind", "code", "entropy", "excerpt", "traj_id"])


def count_words(runs: RunsLike, words: Sequence[str], where: Where = None) -> pd.DataFrame:
    """Count the uses of words in the model's text: run_id, step, n (trajectories), uses, per_trajectory.

    Reads transcripts, which are large: limit `where` to a run or a range of steps.
    """
    runs = as_runs(runs)
    condition = runs.condition(where, "transcripts")
    rows = runs.sql(f"SELECT run_id, step, messages FROM transcripts WHERE {condition}")
    pattern = word_pattern(tuple(words))
    rows["uses"] = [
        sum(1 for text in own_texts(messages) for _ in pattern.finditer(text)) for messages in rows.pop("messages")
    ]
    frame = rows.groupby(["run_id", "step"], as_index=False).agg(n=("uses", "size"), uses=("uses", "sum"))
    frame["per_trajectory"] = frame.uses / frame.n
    return frame


def plot_token_kinds(table: pd.DataFrame) -> Figure:
    """Plot the mean entropy of tokens before any tool response, after success and after error; prose and code separately."""
    frame = token_kinds(table)
    figure = go.Figure()
    for code, name in ((False, "prose"), (True, "inside a tool call")):
        part = frame[frame.code == code].set_index("kind").reindex(list(KINDS))
        hover = "%{x}<br>" + name + ": %{y:.3f} nats, %{text} tokens<extra></extra>"
        _add_bars(
            figure, code, COLOURS[1], x=list(KINDS), y=part.entropy, name=name, text=part.tokens, hovertemplate=hover
        )
    figure.update_layout(barmode="group", height=400)
    figure.update_yaxes(title="entropy (nats per token)", rangemode="tozero")
    return Figure(figure, frame)


def plot_high_entropy_words(table: pd.DataFrame) -> Figure:
    """Plot the 25 words whose first token has the highest mean entropy. Words of the word list are marked."""
    frame = word_list(table).head(25).iloc[::-1]
    figure = go.Figure()
    for listed, name in ((False, "found by entropy"), (True, "in the word list")):
        part, hover = frame[frame.listed == listed], "%{y}: %{x:.3f} nats, %{text} uses<extra></extra>"
        bars = {"x": part.entropy, "y": part.word, "text": part["count"], "orientation": "h", "hovertemplate": hover}
        _add_bars(figure, listed, COLOURS[4], name=name, **bars)
    figure.update_yaxes(categoryorder="array", categoryarray=list(frame.word))
    figure.update_xaxes(title="entropy at the word's first token (nats)")
    figure.update_layout(height=160 + 20 * len(frame))
    return Figure(figure, frame)


def _add_bars(figure: go.Figure, hatched: bool, colour: str, **bars: Any) -> None:
    """Add plain bars in the first colour, or hatched ones in `colour`."""
    marker = {"color": colour if hatched else COLOURS[0], "pattern": {"shape": "/" if hatched else ""}}
    figure.add_bar(textposition="none", marker=marker, **bars)


def plot_entropy(table: pd.DataFrame) -> Figure:
    """Plot the share of tokens with at least entropy x, and the threshold of the top share."""
    frame = pd.DataFrame({"share": np.geomspace(0.001, 1, 120)})
    frame["entropy"] = table.entropy.quantile(1 - frame.share).to_numpy()
    threshold = table.entropy[table.high].min()
    figure = go.Figure(go.Scatter(x=frame.entropy, y=frame.share, mode="lines", line={"color": COLOURS[0], "width": 2}))
    figure.add_vline(x=threshold, line={"dash": "dot", "width": 1})
    figure.update_xaxes(title="entropy (nats)")
    figure.update_yaxes(title="share of tokens with at least this entropy", tickformat=".1%", type="log")
    figure.update_layout(
        height=400, showlegend=False, title=f"top {table.high.mean():.0%} begins at {threshold:.2f} nats"
    )
    return Figure(figure, frame)
