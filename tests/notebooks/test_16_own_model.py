"""Tests of notebook 16, which trains a pretrained chat model."""

import pytest
from helpers.notebooks import SMALL_OWN_MODEL, execute, outputs

from rstar_lab.runs.reader import RunReader


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_notebook_16_trains_smollm2_with_its_defaults(tmp_path):
    parameters = {"runs_dir": str(tmp_path / "runs"), "overrides": SMALL_OWN_MODEL}
    notebook = execute("16_own_model.ipynb", tmp_path, parameters, timeout_s=3000)
    assert "SFT, then" in outputs(notebook, "init") and "0 fail" in outputs(notebook, '"preflight"')
    assert "first step: " in outputs(notebook, "job.watch")
    assert "134.5M parameters" in outputs(notebook, "AutoModelForCausalLM.from_pretrained")
    assert [line["step"] for line in RunReader(tmp_path / "runs" / "own_model-rl").metrics()] == [1, 2]
