"""Repair the model folders that verl exports."""

import json
from pathlib import Path

from rstar_lab.runs.files import atomic_write

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write_stored_dtype(model: Path) -> None:
    """Set `dtype` in config.json to the widest dtype of the stored weights: verl writes bfloat16 beside any weights."""
    from safetensors import safe_open

    stored = set()
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    dtype = next((name for short, name in _DTYPES.items() if short in stored), None)
    config = json.loads((model / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if dtype is not None and config.get(key) != dtype:
        with atomic_write(model / "config.json") as file:
            file.write((json.dumps(config | {key: dtype}, indent=2) + "\n").encode())
