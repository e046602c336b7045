"""The GPU check: its structure on a CPU with a tiny model, and its message without a GPU."""

import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import bench, cosine_and_norms
from rstar_lab.common.errors import UserError
from rstar_lab.rl.preflight.context import Architecture

TINY = Architecture(2, 64, 4, 2, 16, 128, 512, True)


@pytest.mark.soak
def test_every_part_of_the_gpu_check_runs_at_tiny_size():
    lines = {line["name"]: line for line in bench(device="cpu", shapes={"tiny": TINY}, tokens=64)}
    assert not [line for line in lines.values() if str(line["against"]).startswith("failed")]
    assert lines["parity_log_probs"]["value"] < 0.05
    assert lines["parity_gradients"]["value"] > 0.99
    assert lines["parity_gradients"]["ratio"] == pytest.approx(1, abs=0.05)
    for name in ("update_mfu_tiny", "update_tokens_tiny", "sft_tokens", "weight_sync"):
        assert lines[name]["value"] > 0
    assert "estimate" in lines["update_memory_tiny"]["against"]
    assert "no GPU" in lines["demo"]["against"]


@pytest.mark.slow
def test_a_failed_part_does_not_hide_the_others():
    wrong = Architecture(2, 64, 4, 3, 16, 128, 512, True)  # 4 heads cannot share 3 key-value heads
    lines = list(bench(device="cpu", shapes={"wrong": wrong}, tokens=64, parts=["update", "demo"]))
    assert lines[0]["value"] is None and lines[0]["against"].startswith("failed: ")
    assert lines[-1]["name"] == "demo"


@pytest.mark.slow
def test_gpu_check_without_a_gpu_fails_with_a_message():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(UserError, match="bench gpu: no GPU"):
        next(bench())
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True)
    assert done.returncode == 1 and "no GPU" in done.stderr and "Traceback" not in done.stderr


def test_the_cosine_of_long_gradients_is_never_above_one():
    """The sums of 5 x 10^8 products in fp32 gave 1.032 on a GPU."""
    gradient = [torch.full((1000, 1000), 1e-3).flatten() for _ in range(20)]
    cosine, ratio = cosine_and_norms(gradient, [1.5 * part for part in gradient])
    assert cosine == pytest.approx(1, abs=1e-7) and ratio == pytest.approx(1.5, abs=1e-6)
