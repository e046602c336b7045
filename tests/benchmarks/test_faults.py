"""Tests of `rstar-lab inject`: every injected fault is noticed, and an unbroken run raises nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.faults import FAULTS, trl_table
from rstar_lab.cli.command_line import app
from rstar_lab.common.resources import benchmark_file

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_fault_is_noticed_within_three_steps():
    result = CliRunner().invoke(app, ["inject", "--json"], catch_exceptions=False)
    last = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0, last
    assert last["noticed"] == last["of"] == 8
    assert [finding["fault"] for finding in last["faults"] if not finding["noticed"]] == ["none"]
    assert all(finding["step"] <= 3 for finding in last["faults"] if finding["noticed"])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_trl_trains_with_a_fault_and_without():
    command = ["inject", "stale-weights", "no-log-probs", "none", "--trainer", "trl", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    stale, no_log_probs, none = json.loads(result.stdout.splitlines()[-1])["faults"]
    assert result.exit_code == 0 and none["noticed"] is False and none["metrics"]["tools/call_frequency"] > 0
    assert no_log_probs["noticed"] is None and "only with vLLM" in no_log_probs["message"]
    assert stale["metrics"]["num_tokens"] != none["metrics"]["num_tokens"]  # other rollouts than with new weights


def test_the_page_shows_the_recorded_findings_of_trl():
    recorded = json.loads(benchmark_file("faults-trl.json").read_text())
    assert [finding["fault"] for finding in recorded["faults"]] == [*FAULTS, "none"]
    page = PAGE.read_text()
    assert page.split("<!-- trl -->\n")[1].split("<!-- end -->")[0] == trl_table(recorded["faults"])
    assert recorded["noticed"] == 0 and recorded["of"] == 7
    assert "TRL notices none of the seven faults" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gremlin"], "choose from stale-weights"),
        (["none", "--trainer", "hand"], "unknown trainer 'hand'; choose from rstar-lab, trl"),
    ],
)
def test_an_unknown_fault_or_trainer_is_an_error_that_lists_the_known(arguments, message):
    result = CliRunner().invoke(app, ["inject", *arguments])
    assert message in str(result.exception)
