"""Table of the most likely tokens at a position of a stored rollout. Used by `Inspector.alternatives`."""

from pathlib import Path

import numpy as np
import pandas as pd

from rstar_lab.analysis.runs import open_runs
from rstar_lab.errors import UserError
from rstar_lab.rl.engines.alternatives import most_likely_tokens
from rstar_lab.runs.reader import RunReader


def alternatives_table(
    run_dir: Path, traj_id: str, position: int, *, k: int, model: Path | None, url: str
) -> pd.DataFrame:
    """Return the table of `Inspector.alternatives`. run_dir: folder of the run."""
    reader, runs = RunReader(run_dir), open_runs(run_dir)
    record = runs.record(traj_id)
    prompt, response = record["prompt_ids"], record["response_ids"]
    if prompt is None or response is None:
        raise UserError(f"trajectory {traj_id} has no token arrays, which alternatives need: see rl.token_arrays")
    if not 0 <= position < len(response):
        raise UserError(f"position {position}: trajectory {traj_id} has the response tokens 0 to {len(response) - 1}")
    if model is None and not url:
        model = reader.nearest_checkpoint(record["step"])
    likely = most_likely_tokens([*prompt, *response[:position]], response[position], k=k, model=model, url=url)
    ids = list(likely.log_probs)
    frame = pd.DataFrame({"token_id": ids, "text": runs.texts(reader.run_id, ids) or [None] * len(ids)})
    frame["log_prob"] = list(likely.log_probs.values())
    frame.insert(0, "rank", [likely.rank if token == likely.token_id else i + 1 for i, token in enumerate(ids)])
    frame.insert(3, "probability", np.exp(frame.log_prob))
    frame["stored"] = frame.token_id == likely.token_id
    frame.attrs = {"weights": likely.weights}
    return frame
