"""Model folders that verl exports."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rstar_lab.rl.verl.checkpoints import write_stored_dtype


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_config_json_has_the_dtype_of_the_stored_weights(stored, tmp_path):
    """verl writes bfloat16, whatever the weights are."""
    save_file({"weight": torch.ones(2, dtype=getattr(torch, stored))}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "hidden_size": 2}))
    write_stored_dtype(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": stored, "hidden_size": 2}
