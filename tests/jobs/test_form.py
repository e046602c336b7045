"""The form: Submit is enabled only for settings that were checked, and starts a real job."""

import pytest

from rstar_lab.jobs import JobStatus
from rstar_lab.jobs.form import SubmitForm


@pytest.mark.slow
def test_submit_needs_a_check_of_exactly_these_settings(tmp_path):
    form = SubmitForm("tiny_fast", runs_dir=tmp_path)
    assert form.submit_button.disabled
    form.submit()
    assert form.job is None
    form.command.value = "SFT"
    form.overrides.value = "sft.problems.synthetic.count=60\n"
    form.check()
    assert not form.submit_button.disabled and "<table>" in form.message.value
    form.overrides.value = "sft.problems.synthetic.count=40\n"
    assert form.submit_button.disabled, "the settings changed"
    form.check()
    form.submit_button.click()
    assert form.job.id in form.message.value and form.submit_button.disabled
    assert form.job.wait(timeout_s=240) == JobStatus.FINISHED, form.job.logs()


@pytest.mark.soak
def test_a_failed_check_keeps_submit_disabled_and_is_shown(tmp_path):
    form = SubmitForm("qwen3_14b_mi300x", "mi300x_8x8", runs_dir=tmp_path)
    form.check()
    assert form.submit_button.disabled and "no folder with a config.json" in form.message.value


def test_a_wrong_override_is_an_error_in_the_form(tmp_path):
    form = SubmitForm(runs_dir=tmp_path)
    form.overrides.value = "rl.lr"
    form.check()
    assert "expected key=value" in form.message.value and form.submit_button.disabled
