"""SFT and preference data from rollouts: messages with tools, exact tokens, and pairs of one group.

The messages are those that the model saw and wrote: the system prompt, the question with its wrapper and the text with which
generation starts (such as `<reason>`) come from the prompt's tokens, because transcripts do not hold them.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.runs import Runs
from rstar_lab.common.errors import UserError
from rstar_lab.runs.files import atomic_write, json_safe
from rstar_lab.runs.messages import read_messages
from rstar_lab.runs.reader import RunReader
from rstar_lab.tool_calls import parse_stored_turn
from rstar_lab.untrusted.files import DataError, parse_json
from rstar_lab.untrusted.text import counted, up_to_last

Row = dict[str, Any]
PROVENANCE = (
    "run_id", "attempt", "stage", "step", "policy_version", "traj_id", "problem_id", "group_id", "sample", "reward", "kept",
    "p_err", "outcomes", "stop_reason", "engine",
)  # fmt: skip
_NO_PROMPT = "rows of runs without prompt tokens and vocabulary have no system prompt and no tools"
_AS_TEXT = (
    "tools and arguments are JSON text, because they have different keys, which Parquet cannot hold; readers other than "
    "`rstar-lab sft` need the .jsonl file"
)
_WRITER = "written by `rstar-lab export`"  # in every card
NGRAM = 13  # shared words that make a question contaminated
_ROLE = re.compile(r"<\|im_start\|>(system|user)\n(.*?)<\|im_end\|>", re.DOTALL)
# What opens a turn of the model, before the text with which generation starts
_ASSISTANT = re.compile(
    r".*(?:<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|<start_of_turn>model\n"
    r"|<\|turn>model\n|<\|assistant\|>)",
    re.DOTALL,
)
_TOOLS = re.compile(r"(?:\n\n)?# Tools\b.*", re.DOTALL)


@dataclass
class Exported:
    """What an export wrote.

    Attributes:
        path: File that was written.
        written: Number of rows or pairs.
        left_out: Number of rollouts that were left out, by reason.
        notes: What the format cannot hold.
    """

    path: Path
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> Row:
        """Return the fields as JSON values."""
        return {"path": str(self.path), "written": self.written, "left_out": dict(self.left_out), "notes": self.notes}


@dataclass
class Rollout:
    """A rollout as JSON values: its columns `PROVENANCE`, messages and transcript, whose token arrays can be None."""

    trajectory: Row
    messages: list[Row]
    transcript: Row

    def spans(self) -> list[tuple[int, int]] | None:
        """Return [start, end) of each turn of the model in the response; None if they do not match the messages."""
        mask = self.transcript["loss_mask"]
        if mask is None or self.transcript["response_ids"] is None:
            return None
        spans, position = [], 0
        for by_model, tokens in groupby(mask):
            length = sum(1 for _ in tokens)
            if by_model:
                spans.append((position, position + length))
            position += length
        turns = sum(message["role"] == "assistant" for message in self.messages)
        return spans if len(spans) == turns else None


def _read_rollouts(runs: Runs, where: Where, exported: Exported) -> Iterator[Rollout]:
    """Yield the rollouts that a filter selects, in the order of run, step, group and sample.

    Rollouts without a transcript are counted in `exported`. Raises RunStoreError for an invalid filter.
    """
    names = ", ".join(f'"{name}"' for name in PROVENANCE)
    order = "run_id, step, group_id, sample, traj_id"
    query = f"SELECT {names} FROM trajectories WHERE {runs.condition(where)} ORDER BY {order}"
    arrays = "prompt_ids, response_ids, loss_mask"
    texts = f"SELECT traj_id, question, messages, {arrays} FROM transcripts WHERE run_id = ? AND step = ?"
    for place, rows in groupby(runs.arrow(query).to_pylist(), itemgetter("run_id", "step")):
        transcripts = {row["traj_id"]: row for row in runs.arrow(texts, [*place]).to_pylist()}
        for row in rows:
            transcript = transcripts.get(row["traj_id"])
            if transcript is None:
                exported.left_out["no transcript"] += 1
            else:
                yield Rollout(json_safe(row), read_messages(transcript["messages"]), transcript)


def export_sft(
    runs: Runs,
    path: str | Path,
    where: Where = None,
    *,
    tokens: bool = False,
    against: Mapping[str, Sequence[str]] | None = None,
) -> Exported:
    """Write rollouts as SFT data: a .jsonl or .parquet file, and a card beside it.

    Args:
        runs: The runs.
        path: File to write.
        where: Filter of rollouts. Default: rollouts with a reward above zero that were not truncated.
        tokens: Write `input_ids`, `attention_mask` and `labels` (-100 where the model did not write the token): exactly the
            tokens of the rollout. If False, write `messages` with `tool_calls`, and `tools`, in OpenAI's form.
        against: Questions by the name of an evaluation set; rollouts whose question shares 13 words in a row with one of
            them are left out, as are rollouts of evaluations.

    Returns:
        What was written and left out.

    Raises:
        UserError: The filter selects nothing that can be written, the file exists, or its name has another ending.
    """
    exported = Exported(Path(path))
    where = {"rewarded": True, "truncated": [False, None]} if where is None else where
    context = _Context(runs, exported, against or {})

    def rows() -> Iterator[Row]:
        seen: set[bytes] = set()
        for rollout in context.clean(_read_rollouts(runs, where, exported)):
            row = context.tokens(rollout) if tokens else context.messages(rollout)
            digest = hashlib.sha256(json.dumps(row).encode()).digest()
            if row is not None and digest in seen:
                exported.left_out["duplicate"] += 1
            elif row is not None:
                seen.add(digest)
                yield row | context.provenance(rollout)

    return _write(rows(), exported, where, "exact tokens" if tokens else "messages with tools", context)


def export_preferences(
    runs: Runs, path: str | Path, where: Where = None, *, against: Mapping[str, Sequence[str]] | None = None
) -> Exported:
    """Write preference pairs: of one group, a correct rollout with few tool errors against a wrong one.

    The rows have `prompt`, `chosen` and `rejected` (messages) and `tools`. Each rollout is in at most one pair: the correct
    ones in ascending order of their share of tool errors, the wrong ones in the order of their sample.

    Args:
        runs: The runs.
        path: File to write (.jsonl or .parquet); the card goes beside it.
        where: Filter of rollouts. Default: rollouts that were not truncated.
        against: Questions by the name of an evaluation set, as for `export_sft`.

    Returns:
        What was written and left out.

    Raises:
        UserError: The filter selects no pair, the file exists, or its name has another ending.
    """
    exported = Exported(Path(path))
    where = {"truncated": [False, None]} if where is None else where
    context = _Context(runs, exported, against or {})

    def rows() -> Iterator[Row]:
        rollouts = context.clean(_read_rollouts(runs, where, exported))
        for _, group in groupby(
            rollouts, lambda r: (r.trajectory["run_id"], r.trajectory["step"], r.trajectory["group_id"])
        ):
            members = [rollout for rollout in group if rollout.trajectory["reward"] is not None]
            correct = [rollout for rollout in members if rollout.trajectory["reward"] > 0]
            wrong = [rollout for rollout in members if rollout.trajectory["reward"] <= 0]
            correct.sort(key=lambda rollout: (rollout.trajectory["p_err"] or 0, rollout.trajectory["sample"]))
            if not correct or not wrong:
                exported.left_out["group without a correct and a wrong rollout"] += len(members)
            for chosen, rejected in zip(correct, wrong, strict=False):
                pair = context.messages(chosen), context.messages(rejected)
                if pair[0] is None or pair[1] is None:
                    continue
                opening = _opening(pair[0]["messages"])
                yield {
                    "prompt": pair[0]["messages"][:opening],
                    "chosen": pair[0]["messages"][opening:],
                    "rejected": pair[1]["messages"][_opening(pair[1]["messages"]) :],
                    "tools": pair[0]["tools"],
                    **{f"chosen_{name}": value for name, value in context.provenance(chosen).items()},
                    **{f"rejected_{name}": value for name, value in context.provenance(rejected).items()},
                }

    return _write(rows(), exported, where, "preference pairs", context)


def _opening(messages: Sequence[Row]) -> int:
    """Return the number of messages before the first turn of the model."""
    return next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))


class _Context:
    """What is needed of the runs: recipes, vocabularies, and the questions of evaluation sets."""

    def __init__(self, runs: Runs, exported: Exported, against: Mapping[str, Sequence[str]]):
        self.runs, self.exported = runs, exported
        self.against = {name: len(questions) for name, questions in against.items()}
        self.run_ids: set[str] = set()
        self._sample = cache(self._find_sample)
        self._info = cache(lambda run_id: RunReader(runs.run_dir(run_id)).info)
        self._forbidden = {gram: name for name, questions in against.items() for q in questions for gram in _grams(q)}

    def clean(self, rollouts: Iterator[Rollout]) -> Iterator[Rollout]:
        """Yield the rollouts of training whose question is in no evaluation set."""
        for rollout in rollouts:
            run_id = str(rollout.trajectory["run_id"])
            if self._info(run_id)["kind"] == "evaluate":
                self.exported.left_out["rollout of an evaluation"] += 1
            elif name := next((self._forbidden[g] for g in _grams(_question(rollout)) if g in self._forbidden), None):
                self.exported.left_out[f"question of the evaluation set {name}"] += 1
            else:
                self.run_ids.add(run_id)
                yield rollout

    def recipe_hash(self, run_id: str) -> str:
        """Return the first 16 hex digits of the hash of a run's recipe."""
        recipe = json.dumps(self._info(run_id)["recipe"].for_display(), sort_keys=True)
        return hashlib.sha256(recipe.encode()).hexdigest()[:16]

    def provenance(self, rollout: Rollout) -> Row:
        """Return the columns that say where a row comes from."""
        row = {name: rollout.trajectory.get(name) for name in PROVENANCE}
        return row | {"recipe": self.recipe_hash(str(rollout.trajectory["run_id"]))}

    def tokens(self, rollout: Rollout) -> Row | None:
        """Return the exact tokens of a rollout; None if the run does not store them."""
        transcript = rollout.transcript
        prompt, ids, mask = transcript["prompt_ids"], transcript["response_ids"], transcript["loss_mask"]
        if not prompt or ids is None or mask is None:
            self.exported.left_out["no tokens (recipe key token_arrays)"] += 1
            return None
        labels = [-100] * len(prompt) + [token if by_model else -100 for token, by_model in zip(ids, mask, strict=True)]
        return {"input_ids": prompt + ids, "attention_mask": [1] * len(labels), "labels": labels}

    def messages(self, rollout: Rollout) -> Row | None:
        """Return the messages of a rollout, and its tools; None if it has no turn of the model."""
        if not any(message["role"] == "assistant" for message in rollout.messages):
            self.exported.left_out["no turn of the model"] += 1
            return None
        system, user, tools, starts = self._prompt(rollout)
        messages: list[Row] = [{"role": "system", "content": system}] if system else []
        turn, waiting = -1, []
        for place, message in enumerate(rollout.messages):
            role, content = message["role"], message["content"]
            if role == "assistant":
                turn += 1
                start = starts[turn] if turn < len(starts) else ""
                messages.append(_assistant(start, content, turn))
                waiting = [call["id"] for call in messages[-1].get("tool_calls", ())]
            elif role == "tool":
                identity = {"tool_call_id": waiting.pop(0)} if waiting else {}
                messages.append({"role": "tool", "content": content, "name": message.get("tool") or "", **identity})
            elif role in ("user", "system"):
                messages.append({"role": role, "content": user if place == 0 and role == "user" and user else content})
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        return {"messages": messages, "tools": tools}

    def _prompt(self, rollout: Rollout) -> tuple[str, str, list[Row], list[str]]:
        """Return the system prompt, the first user message, the tools, and the text with which each turn starts.

        A rollout without tokens gets the prompt of another rollout of its run, with its own question. The released format
        adds its own texts to the messages, so its user message is the bare question.
        """
        run_id, question = str(rollout.trajectory["run_id"]), _question(rollout)
        recipe = self._info(run_id)["recipe"]
        own_format = recipe.get("rl.prompt.format") or recipe.get("rl.prompt_format") or "model"
        start = "<reason>" if own_format in ("paper", "released") else ""
        turns = sum(message["role"] == "assistant" for message in rollout.messages)
        text, asked = self._text(run_id, rollout.transcript["prompt_ids"]), question
        if text is None:
            text, asked = self._sample(run_id)
        if text is None:
            if _NO_PROMPT not in self.exported.notes:
                self.exported.notes.append(_NO_PROMPT)
            return "", "", [], [start] * turns
        roles = dict(reversed(_ROLE.findall(up_to_last(text, "<|im_end|>"))))
        whole, user = roles.get("system", ""), roles.get("user", "")
        user = question if own_format == "released" or asked not in user else user.replace(asked, question, 1)
        listed, closed, _ = whole.partition("<tools>")[2].partition("</tools>")
        spans, response = rollout.spans() or [], rollout.transcript["response_ids"] or []
        between = [self._text(run_id, response[end:begin]) or "" for (_, end), (begin, _) in pairwise(spans)]
        starts = [_start(opening, start) for opening in (text, *between)]
        starts += starts[:1] * (turns - len(starts))
        return _TOOLS.sub("", whole).strip(), user, _schemas(listed if closed else ""), starts

    def _text(self, run_id: str, ids: Sequence[int] | None) -> str | None:
        """Return the text of tokens; None without tokens or vocabulary."""
        texts = self.runs.texts(run_id, ids) if ids else None
        return None if texts is None or None in texts else "".join(str(piece) for piece in texts)

    def _find_sample(self, run_id: str) -> tuple[str | None, str]:
        """Return the first prompt of any rollout of a run, and its question."""
        query = "SELECT question, prompt_ids FROM transcripts WHERE run_id = ? AND prompt_ids IS NOT NULL LIMIT 1"
        found = self.runs.arrow(query, [run_id]).to_pylist()
        return (self._text(run_id, found[0]["prompt_ids"]), str(found[0]["question"])) if found else (None, "")


def _start(text: str, default: str) -> str:
    """Return the text between the header of the model's turn and the start of generation."""
    header = _ASSISTANT.match(text)
    return text[header.end() :] if header else default


def _schemas(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        with suppress(DataError):
            found.append(parse_json(line, "schema", dict))
    return found


def _assistant(start: str, text: str, turn: int) -> Row:
    """Return a turn as a message. A malformed call stays in the content, as the model wrote it."""
    parsed = parse_stored_turn(text)
    content, position, calls = start, 0, list[Row]()
    for call in parsed.calls:
        if call.error is None:
            content += text[position : call.start]
            position = call.end
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": f"turn{turn}-call{len(calls)}", "type": "function", "function": function})
    content += text[position:]
    message: Row = {"role": "assistant", "content": content.rstrip() if calls else content}
    return message | ({"tool_calls": calls} if calls else {})


def _question(rollout: Rollout) -> str:
    asked = (message["content"] for message in rollout.messages if message["role"] == "user")
    return str(rollout.transcript["question"] or next(asked, ""))


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the runs of NGRAM words of a question; of a shorter one, all its words."""
    words = re.findall(r"\w+", text.lower())
    for start in range(max(len(words) - NGRAM, 0) + 1 if words else 0):
        yield tuple(words[start : start + NGRAM])


def _write(rows: Iterator[Row], exported: Exported, where: Where, kind: str, context: _Context) -> Exported:
    path = exported.path
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"export: {path}: data are written as .jsonl or .parquet, not {path.suffix!r}")
    card = path.with_suffix(".md")
    if any(path.with_suffix(suffix).exists() for suffix in (".jsonl", ".parquet")):
        card = path.with_name(f"{path.name}.md")  # a.md is the card of the other file
    if path.exists() or (card.exists() and _WRITER not in card.read_text(encoding="utf-8", errors="replace")):
        raise UserError(f"export: {path if path.exists() else card} exists; choose another file or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    collected = list(rows)
    if not collected:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in exported.left_out.items()) or "no rollout matches"
        raise UserError(f"export: the filter {where!r} selects nothing to write ({reasons})")
    with atomic_write(path) as file:
        if path.suffix == ".jsonl":
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in collected)
            file.writelines(line.encode("utf-8", "replace") for line in lines)
        else:
            pq.write_table(_table(collected, exported), file)
    exported.written = len(collected)
    if wrong := sum("reward" in row and not (row["reward"] or 0) > 0 for row in collected):
        exported.notes.append(f"{counted(wrong, 'row')} without a reward above zero, because the filter selects them")
    with atomic_write(card) as file:  # follows no link
        file.write(_card(exported, where, kind, context, list(collected[0])).encode("utf-8", "replace"))
    return exported


def _table(rows: Sequence[Row], exported: Exported) -> pa.Table:
    """Return the rows as a table for Parquet, whose structures have the same keys in all rows.

    Arguments and schemas with other keys are JSON text, because Parquet would fill the missing keys with nulls.
    """
    with suppress(pa.ArrowException):  # values of different types
        table = pa.Table.from_pylist(list(rows))
        if [*map(_structures, table.to_pylist())] == [*map(_structures, rows)]:
            return table
    exported.notes.append(_AS_TEXT)
    flat = [json.loads(json.dumps(row)) for row in rows]
    for row in flat:
        for function in _functions(row):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        row["tools"] = json.dumps(row["tools"], ensure_ascii=False)
    return pa.Table.from_pylist(flat)


def _structures(row: Row) -> list[Any]:
    return [row.get("tools"), *(function["arguments"] for function in _functions(row))]


def _functions(row: Row) -> Iterator[Row]:
    """Yield the called functions in the messages of a row."""
    for name in ("messages", "prompt", "chosen", "rejected"):
        for message in row.get(name) or ():
            for call in message.get("tool_calls") or ():
                yield call["function"]


def _card(exported: Exported, where: Any, kind: str, context: _Context, columns: Sequence[str]) -> str:
    """Return the data card."""
    runs = [f"| `{run_id}` | `{context.recipe_hash(run_id)}` |" for run_id in sorted(context.run_ids)]
    left_out = [f"| {reason} | {count:,} |" for reason, count in exported.left_out.most_common()] or ["| nothing | 0 |"]
    against = ", ".join(f"{name} ({counted(count, 'question')})" for name, count in context.against.items())
    return "\n".join(
        [
            f"# {exported.path.name}", "",
            f"{counted(exported.written, 'row')}: {kind}, {_WRITER}. Filter: `{where!r}`.", "",
            "| run | hash of its recipe |", "|---|---|", *runs, "",
            "| left out | rollouts |", "|---|---|", *left_out, "",
            *(f"Note: {note}." for note in exported.notes), "",
            f"Compared with evaluation sets ({NGRAM} words in a row): {against or 'none; give `--against FILE`'}. Rollouts of "
            "evaluations are never written.", "",
            "Columns: " + ", ".join(f"`{name}`" for name in columns) + ".", "",
        ]
    )  # fmt: skip
