"""Text of the live page of a run: progress, speed and time left, and the tile of each curve."""

from datetime import datetime
from typing import Any

import pandas as pd

from rstar_lab.runs import RunReader

_SPEED_STEPS = 10  # the speed is the median over this number of latest steps
_FIRST_STEPS = 3  # the change of a value refers to the mean over this number of first steps
_STRIP = 10  # characters of the step strip


def heading(reader: RunReader, steps: pd.DataFrame, status: str) -> str:
    """Return "RUN: STATUS, step 12 of 40 ▰▰▰▱▱▱, 3.2 s/step, 1 min left". Parts that are not known are left out."""
    if not len(steps):
        return f"{reader.run_id}: {status}, no step yet"
    info, step = reader.info, int(steps["step"].max())
    total = planned_steps(info.get("recipe") or {}, str(steps["stage"].iloc[-1]))
    parts = [f"{reader.run_id}: {status}, step {step}" + (f" of {total} {_strip(step, total)}" if total else "")]
    if speed := seconds_per_step(reader, info, steps):
        parts.append(f"{speed:.3g} s/step")
        if total and status == "running":
            parts.append(f"{_duration(speed * max(0, total - step))} left")
    return ", ".join(parts)


def tile(title: str, values: pd.Series) -> str:
    """Return three lines: the title of a curve, its last value, and the change since the mean of the first three steps."""
    recorded = values.dropna().astype(float)
    change = float(recorded.iloc[-1] - recorded.head(_FIRST_STEPS).mean())
    since = f"{change:+.3g} since the start" if len(recorded) > _FIRST_STEPS else ""
    return f"{title}<br><b>{recorded.iloc[-1]:.3g}</b><br><span style='font-size:11px'>{since}</span>"


def planned_steps(recipe: dict[str, Any], stage: str) -> int | None:
    """Return the number of RL steps in the recipe. None for SFT and evaluations, whose number of steps is not in the recipe."""
    stages = recipe.get("stages") or []
    planned = [part.get("steps") for part in stages] if stage in {part.get("name") for part in stages} else []
    return sum(planned) if planned and all(isinstance(steps, int) for steps in planned) else None


def seconds_per_step(reader: RunReader, info: dict[str, Any], steps: pd.DataFrame) -> float | None:
    """Return the median `step_s` of the latest steps, or the mean since the start of a run that was not resumed."""
    if "step_s" in steps and steps["step_s"].notna().any():
        return float(pd.to_numeric(steps["step_s"]).dropna().tail(_SPEED_STEPS).median())
    if not info.get("created") or info.get("attempts") != 1 or info["kind"] == "import":
        return None
    ended = info.get("ended")
    last = datetime.fromisoformat(ended).timestamp() if ended else (reader.run_dir / "metrics.jsonl").stat().st_mtime
    # An evaluation or an import has one step, number 0.
    seconds = (last - datetime.fromisoformat(info["created"]).timestamp()) / max(1, int(steps["step"].max()))
    return seconds if seconds > 0 else None


def _strip(step: int, total: int) -> str:
    done = round(_STRIP * min(1.0, step / total))
    return "▰" * done + "▱" * (_STRIP - done)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
