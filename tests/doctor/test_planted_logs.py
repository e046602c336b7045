"""Faults for which no rule was written are named in generated logs of other tools, and honest logs of these tools are healthy."""

import pytest

from benchmarks.planted_logs import FAULTS, HONEST, PAGE, table
from rstar_lab.doctor.rules import RULES


@pytest.mark.slow
def test_the_page_follows_from_the_logs():
    assert len(FAULTS) >= 30 and len(HONEST) >= 30
    assert {name for case in FAULTS.values() for name in case.named_by} <= {rule.name for rule in RULES}
    rates = table()
    assert "Not named: none" in rates and "have a false alarm: none" in rates, rates
    assert PAGE.read_text().split("<!-- logs -->\n")[1].split("<!-- end -->")[0] == rates
