"""Packages and files that programs can use in addition to those of the sandbox's interpreter."""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from rstar_lab.common.errors import UserError

# Folders that the root file system of programs replaces, or that would expose the whole machine.
_FORBIDDEN = ("/", "/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/etc", "/box")


def check_readable(path: str | Path) -> str:
    """Return the absolute path, with symbolic links resolved.

    Raises UserError if the path does not exist, must not be shown to programs, or is not readable for their user id.
    """
    resolved = Path(path).resolve()
    if not resolved.exists():
        raise UserError(f"--readable {path}: no such file or folder")
    if str(resolved) in _FORBIDDEN:
        raise UserError(f"--readable {path}: name a folder below {resolved}, not {resolved} itself")
    if os.geteuid() == 0 and not resolved.stat().st_mode & 0o004:
        raise UserError(
            f"--readable {path}: programs run under another user id; allow it with `chmod -R o+rX {resolved}`"
        )
    return str(resolved)


def install_packages(file: str | Path) -> str:
    """Install the packages of a requirements file into a virtual environment of their own; return its folder of packages.

    The environment is kept in ~/.cache/rstar_lab (or XDG_CACHE_HOME) and used again for the same file and Python version.
    Raises UserError if the file does not exist or pip fails.
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"--packages {file}: {error.strerror}") from error
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(version.encode() + content).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rstar_lab" / "sandbox-packages"
    folder = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _run(file, [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
            python = str(folder / "bin" / "python")
            _run(file, [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-r", str(file)])
            (folder / "complete").touch()
    return str(folder / "lib" / f"python{version}" / "site-packages")


def _run(file: str | Path, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, umask=0o022)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(f"--packages {file}: {lines[-1] if lines else ' '.join(command)}")
