"""The GPUs that this process may use."""

import os

from rstar_lab.runs.provenance import hardware

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_gpus() -> list[str]:
    """Return the names of the GPUs to use, as in CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG names."""
    for variable in VARIABLES:
        if (chosen := os.environ.get(variable)) is not None:
            return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number in range(len(hardware()["gpus"]))]


def environment_for(gpus: list[str]) -> dict[str, str]:
    """Return the environment variables that restrict a child process to `gpus`."""
    variables = [variable for variable in VARIABLES if variable in os.environ] or VARIABLES[:1]
    return dict.fromkeys(variables, ",".join(gpus))
