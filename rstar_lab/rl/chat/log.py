"""Stores a chat as a run: each question with its reply is a step with one trajectory, whose reward is null."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rstar_lab.rl.rollout.records import TrainingLabels, call_rows, trajectory_row, transcript_row
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.writer import RunWriter


class ChatLog:
    """Writes the questions and replies of one chat to a run."""

    def __init__(self, writer: RunWriter):
        self.writer = writer

    @classmethod
    @contextmanager
    def open(cls, runs_dir: Path, name: str, model: str, options: Any, tokenizer: Any) -> Iterator["ChatLog"]:
        """Open run `name`. tokenizer: None if the chat has no token ids. Raises RunStoreError."""
        recipe = {"model": model, "chat": asdict(options)}
        with RunWriter.open(runs_dir, name, kind="chat", recipe=recipe, seed=options.seed or 0) as writer:
            if tokenizer is not None:
                ids = [[i] for i in range(len(tokenizer))]
                writer.write_vocabulary(tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False))
            yield cls(writer)
            writer.finish("finished")

    def write(self, trajectory: Trajectory, tokens: int) -> None:
        """Write one question and its reply. tokens: tokens of the response."""
        labels = TrainingLabels(True)
        row = trajectory_row(trajectory, labels) | {"reward": None, "response_tokens": tokens}
        if not trajectory.response_ids:
            row["model_tokens"] = tokens
        self.writer.write_step(
            "chat",
            (self.writer.last_step or 0) + 1,
            trajectories=[row],
            calls=call_rows(trajectory),
            transcripts=[transcript_row(trajectory, labels, arrays=bool(trajectory.response_ids))],
            metrics={"response_tokens": tokens, "calls": len(trajectory.calls)},
        )

    @property
    def run_dir(self) -> Path:
        return self.writer.run_dir
