"""Faults for which no rule was written are named in generated logs of other tools, and honest logs of these tools are healthy."""

import pytest

from benchmarks.planted_logs import FAULTS, HONEST, PAGE, findings, table
from rstar_lab.doctor.rules import RULES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named(name):
    assert findings(FAULTS[name], seed=1) & set(FAULTS[name].named_by)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_log_has_no_finding(name):
    assert findings(HONEST[name], seed=1) == set()


@pytest.mark.slow
def test_the_page_follows_from_the_logs():
    assert len(FAULTS) >= 30 and len(HONEST) >= 30
    assert {name for case in FAULTS.values() for name in case.named_by} <= {rule.name for rule in RULES}
    assert PAGE.read_text().split("<!-- logs -->\n")[1].split("<!-- end -->")[0] == table()
