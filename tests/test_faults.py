"""Tests of `rstar-lab inject`: every injected fault is noticed, and an unbroken run raises nothing."""

import json

import pytest
from typer.testing import CliRunner

from rstar_lab import cli


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_fault_is_noticed_within_three_steps():
    result = CliRunner().invoke(cli.app, ["inject", "--json"], catch_exceptions=False)
    last = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0, last
    assert last["noticed"] == last["of"] == 8
    assert [finding["fault"] for finding in last["faults"] if not finding["noticed"]] == ["none"]
    assert all(finding["step"] <= 3 for finding in last["faults"] if finding["noticed"])


def test_an_unknown_fault_is_an_error_that_lists_the_known():
    result = CliRunner().invoke(cli.app, ["inject", "gremlin"])
    assert "choose from stale-weights" in str(result.exception)
