"""ATIF 1.8 (Agent Trajectory Interchange Format): one JSON document per rollout, in and out.

Source: harbor-framework/harbor, rfcs/0001-trajectory-format.md. The models of the format forbid unknown fields; what they do not
have (rewards, groups, advantages, outcomes, the raw text of a turn) is in `extra`, under `rstar_lab`.

Tokens: a step of the agent has its `completion_token_ids`; the first also has the prompt. The tokens between two turns are in
the step's `metrics.extra.observation_token_ids`, because repeating the history in each step is quadratic in the turns.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.runs import Runs
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.exchange.export_records import ARRAYS, TOKENS, Exported, Rollout, Row, read_rollouts
from rstar_lab.exchange.import_rows import content_text, default_run_id, number_of, reasoning_text, write_run
from rstar_lab.exchange.rollout_rows import at, call_text
from rstar_lab.runs.files import write_json
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.schema import is_valid_name
from rstar_lab.tool_calls import parse_stored_turn
from rstar_lab.untrusted.files import DataError, read_json, read_text, reading

VERSION = "ATIF-v1.8"
OURS = "rstar_lab"  # key of our data in `extra`
VOCABULARY, METRICS = "tokens.json", "metrics.json"  # of the exported run
_NOTES = [
    "only in extra.rstar_lab: rewards, advantages, groups, penalties, outcomes and times of calls, policy versions, stop reasons",
    "only in metrics.extra: trainer log-probs, entropies and the tokens between turns",
]


def export_atif(runs: Runs, folder: str | Path, where: Where = None) -> Exported:
    """Write rollouts as ATIF documents, one file each.

    Args:
        runs: The runs.
        folder: New or empty folder. The vocabulary and the step metrics of the run go there, too.
        where: Filter of rollouts, see `rstar_lab.analysis.filters.Filter`.

    Returns:
        What was written and left out. It is also in `export.json` beside the documents.

    Raises:
        UserError: The folder is not empty, or the filter selects no rollout.
    """
    folder = new_folder(folder)
    exported = Exported(folder, notes=list(_NOTES))
    agents: dict[str, Row] = {}
    for rollout in read_rollouts(runs, where, exported):
        run_id = str(rollout.trajectory["run_id"])
        if run_id not in agents:
            agents[run_id] = _agent(runs, run_id)
        document = to_atif(rollout, agents[run_id])
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", rollout.traj_id)[:150]
        write_json(folder / f"{exported.written:06d}-{name}.json", document)
        exported.written += 1
    if not exported.written:
        raise UserError(f"export: the filter selects no rollout with a transcript: {where!r}")
    if len(agents) == 1:
        reader = RunReader(runs.run_dir(next(iter(agents))))
        if (vocabulary := reader.vocabulary()) is not None:
            write_json(folder / VOCABULARY, vocabulary)
        write_json(folder / METRICS, list(reader.metrics()))
    write_json(folder / "export.json", exported.as_dict())
    return exported


def new_folder(folder: str | Path) -> Path:
    """Create a folder for an export. Raises UserError if it is not empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"export: {folder} exists and is not an empty folder; choose another one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _agent(runs: Runs, run_id: str) -> Row:
    info = RunReader(runs.run_dir(run_id)).info
    versions = info.get("versions") or {}
    model, reward = info["recipe"].get("model"), info["recipe"].get("rl.reward")
    agent: Row = {"name": OURS, "version": str(versions.get(OURS) or versions.get("rstar-lab") or "unknown")}
    if reward := "environments" if info["recipe"].get("rl.environments") else reward:
        agent["extra"] = {OURS: {"reward": str(reward)}}
    return agent | ({"model_name": str(model)} if model else {})


def to_atif(rollout: Rollout, agent: Row) -> Row:
    """Return a rollout as an ATIF document."""
    transcript, spans = rollout.transcript, rollout.spans()
    steps: list[Row] = []
    turn = -1
    calls = {(call["turn"], call["index"]): call for call in rollout.calls}
    for message in rollout.messages:
        role = message["role"]
        fields = {name: own for name, own in message.items() if name not in ("role", "content") and own is not None}
        if role == "assistant":
            turn += 1
            steps.append(_agent_step(message["content"], turn, fields, rollout, spans))
        elif role == "tool" and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            index = len(results)
            known = len(steps[-1].get("tool_calls", ())) > index
            record = {k: v for k, v in calls.get((turn, index), {}).items() if k not in _PLACE and v is not None}
            result: Row = {"content": message["content"], "extra": {**record, OURS: fields}}
            results.append(({"source_call_id": _call_id(turn, index)} if known else {}) | result)
        else:
            source = role if role in ("system", "user") else "system"
            steps.append({"source": source, "message": message["content"], "extra": {OURS: fields | {"role": role}}})
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    row = {name: value for name, value in rollout.trajectory.items() if value is not None}
    extra: Row = {"trajectory": row, "question": transcript["question"], "truth": transcript["truth"]}
    ids = transcript["response_ids"]
    if spans and len(ids) > spans[-1][1]:
        extra["tail"] = {"token_ids": ids[spans[-1][1] :], **_observed(transcript, spans[-1][1], len(ids))}
    if spans is None and ids is not None:  # an empty turn, or a message without tokens
        extra["arrays"] = {name: transcript[name] for name in TOKENS}
    metrics: Row = {"total_steps": len(steps), "extra": {"reward": row.get("reward")}}
    if row.get("model_tokens") is not None:
        metrics["total_completion_tokens"] = row["model_tokens"]
    return {
        "schema_version": VERSION, "session_id": row["run_id"], "trajectory_id": row["traj_id"], "agent": agent, "steps": steps,
        "final_metrics": metrics, "extra": {OURS: extra},
    }  # fmt: skip


_PLACE = ("traj_id", "run_id", "attempt", "stage", "step", "turn", "index")


def _call_id(turn: int, index: int) -> str:
    return f"turn{turn}-call{index}"


def _blank(name: str) -> float | None:
    """Return the usual value of an array at a token that the model did not write."""
    return 0.0 if name == "engine_log_probs" else None


def _observed(transcript: Row, start: int, end: int) -> Row:
    """Return the values of the arrays at tokens that the model did not write, where they are not the usual ones."""
    parts = {name: transcript[name][start:end] for name in ARRAYS if transcript[name] is not None}
    return {f"observation_{name}": own for name, own in parts.items() if any(value != _blank(name) for value in own)}


def _agent_step(text: str, turn: int, fields: Row, rollout: Rollout, spans: list[tuple[int, int]] | None) -> Row:
    parsed = parse_stored_turn(text)
    low, high = parsed.reasoning
    step: Row = {"source": "agent", "llm_call_count": 1, "extra": {OURS: fields | {"text": text}}}
    if reasoning := text[low:high].strip():
        step["reasoning_content"] = reasoning
    behind = max(parsed.reasoning_end, high)
    pieces, position = [], behind
    for call in parsed.calls:
        pieces.append(text[position : call.start])
        position = max(position, call.end)
    step["message"] = "".join([*pieces, text[position:]]).strip()
    if parsed.calls:
        step["tool_calls"] = [
            {"tool_call_id": _call_id(turn, index), "function_name": call.name or "", "arguments": call.arguments or {}}
            | ({"extra": {"error": call.error, "raw": call.raw}} if call.error else {})
            for index, call in enumerate(parsed.calls)
        ]
    if spans is not None:
        transcript, (start, end) = rollout.transcript, spans[turn]
        ids = transcript["response_ids"]
        before = spans[turn - 1][1] if turn else 0
        prompt = (transcript["prompt_ids"] or []) + ids[:start]
        metrics: Row = {
            "prompt_tokens": len(prompt), "completion_tokens": end - start, "completion_token_ids": ids[start:end],
        }  # fmt: skip
        if turn == 0:
            metrics["prompt_token_ids"] = prompt
        more: Row = {"observation_token_ids": ids[before:start], **_observed(transcript, before, start)}
        more |= {name: transcript[name][start:end] for name in ARRAYS if transcript[name] is not None}
        if (log_probs := more.get("engine_log_probs")) is not None and None not in log_probs:
            metrics["logprobs"] = more.pop("engine_log_probs")
        step["metrics"] = metrics | {"extra": more}
    return step


# --- import ------------------------------------------------------------------------------------------------------------


def import_atif(source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None) -> Path:
    """Import ATIF documents (versions 1.0 to 1.8) as a run of kind `import`.

    Documents that `export_atif` wrote keep tokens, masks, log-probs, messages, calls, outcomes, rewards, groups and advantages.
    Of other documents, the tokens are kept if the prompt of each step continues the tokens before it. Copied context is
    skipped, and continued documents are joined.

    Args:
        source: A document, or a folder that is searched for documents.
        runs_dir: Folder of runs.
        run_id: Id of the new run. Default: the session id of the documents, or the name of `source`.

    Returns:
        The folder of the run.

    Raises:
        UserError: A file is not an ATIF document.
        RunStoreError: The run exists.
    """
    source = Path(source)
    rollouts = []
    for place, document in _documents(source):
        with reading(f"{place}: not a valid ATIF document"):
            rollouts.append(_with_reward(from_atif(document, place), place))
    sessions = {str(rollout["session"])[:150] for rollout in rollouts}
    complete = all(rollout["stored"] for rollout in rollouts)
    if run_id is None and len(sessions) == 1 and complete:
        run_id = min(sessions)
    run_id = run_id or default_run_id(source, "atif")
    for rollout in rollouts:
        session, stored = str(rollout["session"]), rollout["stored"]
        if stored and run_id != session and is_valid_name(session) and (Path(runs_dir) / session).exists():
            rollout["traj_id"] = f"{run_id}/{rollout['traj_id']}"  # ids are unique over the runs of a folder
        if stored and len(sessions) > 1:  # runs of the same problems have the same ids of groups
            rollout["stored"] = stored | {"group_id": f"{session}/{stored.get('group_id')}"}
    more: Row = {}
    if complete:
        rewards = {rollout["reward_key"] for rollout in rollouts}
        more["reward"] = rewards.pop() if len(rewards) == 1 else None
        more["vocabulary"] = _list_beside(source, VOCABULARY)
        lines = _list_beside(source, METRICS) or []
        more["metrics"] = {line["step"]: line for line in lines if isinstance(at(line, "step"), int)}
    return write_run(rollouts, source, runs_dir, run_id, "atif", **more)


def _with_reward(rollout: Row, place: Path) -> Row:
    """Add the reward of a trial of Harbor to its rollout. Harbor writes it to TRIAL/verifier/reward.txt."""
    file = place.parent.parent / "verifier" / "reward.txt"
    if rollout["reward"] is None and place.parent.name == "agent" and file.is_file():
        with suppress(DataError):
            rollout["reward"] = number_of(read_text(file)[:100])
    return rollout


def _list_beside(source: Path, name: str) -> list[Any] | None:
    """Return the list in a file of an export, or None if there is no such file."""
    path = (source if source.is_dir() else source.parent) / name
    return read_json(path, list) if path.exists() else None


def _documents(source: Path) -> Iterator[tuple[Path, Row]]:
    """Yield the documents, without those that continue another one."""
    read: dict[Path, Row] = {}
    for path in sorted(source.rglob("*.json")) if source.is_dir() else [source]:
        document = read_json(path)
        version = at(document, "schema_version")
        if str(version).startswith("ATIF-v"):
            if not isinstance(document.get("steps") or [], list):
                raise UserError(f"{path}: steps is not a list")
            read[Path(os.path.normpath(path.absolute()))] = document
        elif path == source:
            raise UserError(f"{path} is not an ATIF document: schema_version is {str(version)[:80]!r}")
    if not read:
        raise UserError(f"{source} contains no ATIF documents (schema_version: ATIF-v1.x)")
    following = {path: _following(path, document) for path, document in read.items()}
    for path, document in read.items():
        if path not in following.values():
            steps, seen, current = list(document.get("steps") or []), {path}, path
            while (target := following[current]) in read and target is not None and target not in seen:
                steps += read[target].get("steps") or []
                seen.add(target)
                current = target
            yield path, document | {"steps": steps}


def _following(path: Path, document: Row) -> Path | None:
    reference = document.get("continued_trajectory_ref")
    # As text: to look at a path that a file names could mount a file system of its choice.
    return Path(os.path.normpath(path.parent / reference)) if isinstance(reference, str) else None


def from_atif(document: Row, place: Path | str = "document") -> Row:
    """Return a document as a rollout for `import_rows.write_run`."""
    ours = at(document, "extra", OURS) or {}
    messages, call_rows, tokens = list[Row](), list[Row](), _Tokens()
    tools: dict[Any, str] = {}
    steps, turn = document.get("steps") or [], -1
    for number, step in enumerate(steps, 1):
        if at(step, "source") not in ("system", "user", "agent"):
            raise UserError(f"{place}: step {number} has no source (system, user or agent)")
        if step.get("is_copied_context"):
            continue
        messages.append(_message(step, at(step, "extra", OURS) or {}, tools))
        if step["source"] == "agent":
            turn += 1
            tokens.add(step.get("metrics") or {})
        for index, result in enumerate(at(step, "observation", "results") or []):
            extra, known = result.get("extra") or {}, at(result, "extra", OURS) or {}
            if step["source"] == "agent":
                row = {name: extra[name] for name in _CALL_COLUMNS if name in extra}
                call_rows.append({"turn": turn, "index": index, "tool": extra.get("tool", known.get("tool"))} | row)
            if result.get("content") is not None or "subagent_trajectory_ref" not in result:
                own = OURS in extra or "tool" in extra
                tool = (extra | known).get("tool") if own else tools.get(result.get("source_call_id"))
                given = {"tool": tool, "outcome": (extra | known).get("outcome")}
                messages.append(
                    {"role": "tool", "content": content_text(result.get("content"))} | given | known | given
                )
    asked = [message["content"] for message in messages if message["role"] == "user"]
    asked += [content_text(step.get("message")) for step in steps if step["source"] == "user"]
    arrays = ours.get("arrays") or tokens.arrays(ours.get("tail") or {})
    trajectory = ours.get("trajectory") or {}
    outcomes = [message.get("outcome") for message in messages if message["role"] == "tool"]
    return {
        "stored": trajectory, "session": document.get("session_id"), "stage": trajectory.get("stage"), "step": trajectory.get("step") or 0,
        "reward_key": str(at(document, "agent", "extra", OURS, "reward") or "") or None,
        "outcomes": outcomes if outcomes and set(outcomes) <= {str(outcome) for outcome in Outcome} else None,
        "traj_id": document.get("trajectory_id"), "question": ours.get("question") or next(iter(asked), None), "truth": ours.get("truth"),
        "messages": messages, "call_rows": call_rows, "arrays": arrays, "reward": at(document, "final_metrics", "extra", "reward"),
        "response_tokens": len(arrays["response_ids"]) if arrays and arrays.get("response_ids") else None,
        "model_tokens": None if None in tokens.counts else sum(tokens.counts) or None,
    }  # fmt: skip


_CALL_COLUMNS = ("outcome", "code_hash", "queue_s", "run_s", "position")


def _message(step: Row, ours: Row, tools: dict[Any, str]) -> Row:
    role = ours.get("role") or {"agent": "assistant"}.get(step["source"], step["source"])
    text = content_text(step.get("message"))
    for call in step.get("tool_calls") or []:
        tools[call.get("tool_call_id")] = str(call.get("function_name"))
        text += call_text(call.get("function_name"), call.get("arguments") or {})
    if reasoning := step.get("reasoning_content"):
        text = reasoning_text(content_text(reasoning)) + text
    other = {name: value for name, value in ours.items() if name not in ("role", "text")}
    return {"role": role, "content": ours.get("text", text), **other}


class _Tokens:
    """Joins the tokens of the steps to one sequence, as long as the history is not rewritten."""

    def __init__(self) -> None:
        self.complete, self.any = True, False
        self.counts: list[int | None] = []  # tokens of each turn of the model, if the document says it
        self.prompt: list[int] | None = None
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.values: dict[str, list[Any] | None] = {name: [] for name in ARRAYS}

    def add(self, metrics: Row) -> None:
        new: list[int] | None = metrics.get("completion_token_ids")
        history: list[int] | None = metrics.get("prompt_token_ids")
        more = metrics.get("extra") or {}
        self.counts.append(metrics.get("completion_tokens") if new is None else len(new))
        between: list[int] = more.get("observation_token_ids") or []
        if not self.complete or new is None or (self.prompt is None and history is None):
            self.complete = False
            return
        if self.prompt is None:
            self.prompt = (history or [])[: len(history or []) - len(between)]
        elif history is not None:
            known = self.prompt + self.ids
            self.complete = history[: len(known)] == known
            between = history[len(known) :]
        self.any = True
        self.ids += [*between, *new]
        self.mask += [False] * len(between) + [True] * len(new)
        for name, collected in self.values.items():
            values = more.get(name, metrics.get("logprobs") if name == "engine_log_probs" else None)
            if collected is None or values is None or len(values) != len(new):
                self.values[name] = None
            else:
                collected += more.get(f"observation_{name}") or [_blank(name)] * len(between)
                collected += values

    def arrays(self, tail: Row) -> Row | None:
        """Return the columns of the table `transcripts`; None without one sequence. tail: tokens after the last turn."""
        if not (self.complete and self.any):
            return None
        ids = tail.get("token_ids") or []
        mask = self.mask + [False] * len(ids)
        rows: Row = {"prompt_ids": self.prompt, "response_ids": self.ids + ids, "loss_mask": mask}
        for name, values in self.values.items():
            more = tail.get(f"observation_{name}") or [_blank(name)] * len(ids)
            rows[name] = None if values is None else [math.nan if x is None else x for x in values + more]
        return rows
