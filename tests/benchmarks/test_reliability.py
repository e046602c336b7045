"""The table of docs/reliability.md is the recorded result, and the clients' part of the soak holds."""

import json

import pytest

from benchmarks import reliability
from rstar_lab.common.resources import benchmark_file


def test_the_page_has_the_recorded_injections():
    result = json.loads(benchmark_file(reliability.RESULT).read_text())
    assert sum(len(area["injections"]) for area in result.values()) >= 60
    assert reliability.table(result) in reliability.PAGE.read_text()


@pytest.mark.slow
def test_services_that_are_silent_or_answer_garbage_fail_in_time():
    injections = [*reliability.peers()]
    assert len(injections) == 12
    assert [one for one in injections if not one.kept] == []
