"""The description of a job before it is sent: numbers of preflight, cost, queue, and what failed."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rstar_lab.cli.jobs import app
from rstar_lab.jobs import describe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    content = yaml.safe_load((ROOT / "cluster/profiles/mi300x_8x8.yaml").read_text())
    content["hardware"]["price_per_gpu_hour"] = 2.0
    path = tmp_path_factory.mktemp("profile") / "priced.yaml"
    path.write_text(yaml.safe_dump(content))
    return describe("qwen3_14b_mi300x", str(path))


def test_hours_and_cost_follow_from_the_stages(description):
    hours = sum(stage["steps"] * stage["step_s"] for stage in description.stages) / 3600
    assert {"SFT", "evaluation (5 times)", "evaluation during RL (102 times)"} == description.parts_h.keys()
    hours += sum(description.parts_h.values())
    assert [stage["steps"] for stage in description.stages] == [300, 85, 125]
    assert description.hours == pytest.approx(hours)
    assert description.gpu_hours == pytest.approx(64 * hours)
    assert description.cost == pytest.approx(2 * 64 * hours)


def test_a_job_whose_model_is_missing_is_not_ready(description):
    assert not description.ready
    assert any(message.startswith("model:") for message in description.failed)
    assert description._repr_html_().count("<tr") == len(description.rows())


def test_the_command_prints_json_and_fails_with_the_checks(tmp_path):
    result = CliRunner().invoke(app, ["describe", "qwen3_14b_mi300x", "--profile", "mi300x_8x8", "--json"])
    row = json.loads(result.output)
    assert result.exit_code == 1 and row["ready"] is False and row["cost"] is None
