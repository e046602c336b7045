"""Table of problems: how their pass rates changed over a run."""

import pandas as pd

from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.runs import Runs


def problem_table(runs: Runs, where: Where = None) -> pd.DataFrame:
    """Return one row per problem: runs, rollouts, pass_rate, first_rate and last_rate (of its first and last step), change."""
    condition = runs.condition(where)
    frame = runs.sql(
        f"""SELECT problem_id, count(DISTINCT run_id) AS runs, count(*) AS rollouts, avg((reward > 0)::INT) AS pass_rate,
                   arg_min(rate, step) AS first_rate, arg_max(rate, step) AS last_rate
            FROM (SELECT *, avg((reward > 0)::INT) OVER (PARTITION BY problem_id, step) AS rate
                  FROM trajectories WHERE {condition})
            GROUP BY problem_id ORDER BY problem_id""",
    )
    frame["change"] = frame.last_rate - frame.first_rate
    return frame
