"""The processes of engines: the GPUs that this process may use, environment variables, and the end of a log."""

import os
from pathlib import Path

import torch

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

# On a CPU, vLLM gets one OpenMP thread, which sleeps when it is idle: two spinning threads on one core are thirty times
# slower.
CPU_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
TAIL_BYTES = 20_000


def visible_gpus() -> list[str]:
    """Return the names of the GPUs to use, as in CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG names."""
    for variable in VARIABLES:
        if (chosen := os.environ.get(variable)) is not None:
            return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]  # nvidia-smi may be missing in a container


def environment_for(gpus: list[str]) -> dict[str, str]:
    """Return the environment variables that restrict a child process to `gpus`."""
    variables = [variable for variable in VARIABLES if variable in os.environ] or VARIABLES[:1]
    return dict.fromkeys(variables, ",".join(gpus))


def end_of_log(log: Path | None) -> str:
    """Return the file and the last ten lines of a log that are not empty, to append to an error. Empty without a log."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    last = [f"  {line.rstrip()[:300]}" for line in text.splitlines() if line.strip()][-10:]
    return "\n".join([f"\nend of the log {log}:", *(last or ["  (empty)"])])
