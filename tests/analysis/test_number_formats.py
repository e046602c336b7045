"""Test of the number formats of tables."""

import numpy as np
import pandas as pd

from rstar_lab.analysis import format_numbers


def test_shares_are_percentages_and_other_numbers_have_three_digits():
    frame = pd.DataFrame(
        {
            ("pass1", "easy"): [0.93945, np.nan],
            ("response_tokens", "easy"): [40.5508, 1234.5],
            ("high_share", ""): [0.5, 0.25],
            ("count", ""): [3, 4],
        },
        index=["a", "b"],
    )
    shown = format_numbers(frame)
    assert shown.columns.equals(frame.columns) and shown.index.equals(frame.index)
    assert shown.values.tolist() == [["93.9%", "40.6", "50.0%", 3], ["–", "1,234", "25.0%", 4]]
