"""Try a reward on stored rollouts before a run uses it: `RewardPreview(run)`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd
import pyarrow as pa

from rstar_lab.errors import UserError
from rstar_lab.rl.forms.form import Form
from rstar_lab.rl.reward import extract_answer, make_reward
from rstar_lab.rl.section import REWARDS
from rstar_lab.runs.messages import read_messages
from rstar_lab.runs.reader import RunReader, read_steps
from rstar_lab.verify import ANSWER_FORMATS
from rstar_lab.visible_text import escaped

COLUMNS = ["step", "traj_id", "problem_id", "truth", "answer", "reward"]
TAIL_CHARS = 160  # number of characters of the model's text shown in the table


class RewardPreview(Form):
    """Shows the stored reward of rollouts beside that of another reward or answer format.

    Nothing is written; `rstar-lab rescore` writes new rewards.


    run: folder of a run. step: default: the last. traj_ids: default: the first `n` rollouts of the step.
    `table` holds the result as a data frame. Raises UserError if the step or a rollout does not exist.
    """

    def __init__(
        self, run: str | Path, *, step: int | None = None, traj_ids: Sequence[str] = (), n: int = 12,
        reward: str = "verify", answer: str = "tagged",
    ):  # fmt: skip
        super().__init__()
        reader = RunReader(Path(run))
        steps = reader.steps()
        if not steps or (step is not None and step not in steps):
            raise UserError(f"run {reader.run_id} has no step {step}" if steps else f"run {reader.run_id} has no steps")
        self.step = max(steps) if step is None else step
        rows = {row["traj_id"]: row for row in _read_step(reader, "trajectories", COLUMNS, self.step)}
        if missing := [name for name in traj_ids if name not in rows]:
            raise UserError(f"run {reader.run_id}, step {self.step} has no rollout {missing[0]}")
        self.rows = [rows[name] for name in (traj_ids or list(rows)[:n])]
        self.texts = {
            row["traj_id"]: "\n".join(m["content"] for m in read_messages(row["messages"]) if m["role"] == "assistant")
            for row in _read_step(reader, "transcripts", ["step", "traj_id", "messages"], self.step)
        }
        wide = widgets.Layout(width="26em")
        self.reward = widgets.Combobox(
            description="Reward", value=reward, options=list(REWARDS), continuous_update=False, layout=wide
        )
        self.answer = widgets.Dropdown(description="Answer", value=answer, options=list(ANSWER_FORMATS), layout=wide)
        self.output = widgets.HTML()
        for field in (self.reward, self.answer):
            field.observe(lambda _: self.update(), "value")
        choice = widgets.HBox([self.reward, self.answer], layout=widgets.Layout(flex_flow="row wrap"))
        self.root = widgets.VBox([choice, self.message, self.output])
        self.table = pd.DataFrame()
        self.update()

    def update(self) -> None:
        """Compute the rewards with the current choice. An error of the reward is shown in the form."""
        try:
            score = make_reward(self.reward.value, self.answer.value)
            lines = [self._line(row, score) for row in self.rows]
        except Exception as error:  # a user's reward may raise anything; the form must survive it
            self.show_error(error if isinstance(error, UserError) else UserError(f"{type(error).__name__}: {error}"))
            return
        self.show_error(None)
        self.table = pd.DataFrame(lines)
        self.output.value = self._as_html()

    def summary(self) -> str:
        changed = int(self.table.changed.sum()) if len(self.table) else 0
        return f"{self.reward.value}, {self.answer.value}: the reward of {changed} of {len(self.rows)} rollouts changes"

    def _line(self, row: dict[str, Any], score: Any) -> dict[str, Any]:
        text = self.texts[row["traj_id"]]
        if row["truth"] is None and self.reward.value in REWARDS:
            raise UserError(
                f"rollout {row['traj_id']} has no correct answer, which reward {self.reward.value} requires"
            )
        new = float(score(text, row["truth"]))
        return {
            "traj_id": row["traj_id"], "truth": row["truth"], "stored_answer": row["answer"],
            "answer": extract_answer(text, self.answer.value), "stored_reward": row["reward"], "reward": new,
            "changed": row["reward"] is None or abs(new - row["reward"]) > 1e-6, "text": text[-TAIL_CHARS:],
        }  # fmt: skip

    def _as_html(self) -> str:
        titles = ("rollout", "truth", "stored answer", "answer", "stored reward", "reward", "end of the text")
        parts = [
            f"<p>{escaped(self.summary())}</p><table><tr>",
            *(f"<th>{title}</th>" for title in titles),
            "</tr>",
        ]
        for line in self.table.to_dict("records"):
            mark = "<b>{}</b>" if line["changed"] else "{}"
            cells = [
                line["traj_id"], line["truth"], line["stored_answer"], line["answer"],
                "not scored" if pd.isna(line["stored_reward"]) else f"{line['stored_reward']:g}",
                f"{line['reward']:g}", line["text"],
            ]  # fmt: skip
            parts += ["<tr>", *(f"<td>{mark.format(escaped(cell))}</td>" for cell in cells), "</tr>"]
        return "".join([*parts, "</table>"])


def _read_step(reader: RunReader, level: str, columns: list[str], step: int) -> list[dict[str, Any]]:
    """Return the rows of one step of a run. Files without the step are not read."""
    tables = [read_steps(file, columns) for file in reader.files(level) if step in file.steps]
    return [row for row in pa.concat_tables(tables).to_pylist() if row["step"] == step] if tables else []
