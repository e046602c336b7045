"""Tests of notebook 16, which trains a pretrained chat model."""

import pytest
from helpers.notebooks import execute, outputs

from rstar_lab.runs.reader import RunReader

TINY = {
    "sft.problems.synthetic.count": 16, "sft.batch_size": 8, "stages.0.steps": 2, "rl.problems_per_step": 2,
    "rl.group_size": 2, "rl.limits.max_response_tokens": 64, "evaluate.max_response_tokens": 64,
    "evaluate.samples": 1, "evaluate.sets.held_out.limit": 2,
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_notebook_16_trains_smollm2_with_its_defaults(tmp_path):
    parameters = {"runs_dir": str(tmp_path / "runs"), "overrides": TINY}
    notebook = execute("16_own_model.ipynb", tmp_path, parameters, timeout_s=3000)
    assert "SFT, then" in outputs(notebook, "init") and "0 fail" in outputs(notebook, '"preflight"')
    assert "first step: " in outputs(notebook, "job.watch")
    assert "134.5M parameters" in outputs(notebook, "AutoModelForCausalLM.from_pretrained")
    assert [line["step"] for line in RunReader(tmp_path / "runs" / "own_model-rl").metrics()] == [1, 2]
