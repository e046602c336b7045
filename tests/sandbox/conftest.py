import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
from helpers.sandbox_processes import ROOT

from benchmarks.redis_server import temporary_redis
from rstar_lab.sandbox.launch import serving


@pytest.fixture(scope="session")
def service():
    """Start a sandbox service on loopback. Its calls may use 2 s of CPU time. Yields {"url", "workers", "pid"}."""
    with serving("serve", "--no-token", "--port", "0", "--workers", "2", "--time-limit", "2") as ready:
        yield ready


@pytest.fixture(scope="session")
def as_other_user():
    """Return a function that runs code with the system's Python and a copy of the package as an ordinary user without capabilities."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or shutil.which("setpriv") is None or not Path(python).exists():
        pytest.skip("requires root, setpriv and a system Python to become an ordinary user")
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip("requires a system Python of at least 3.11")

    def run(code: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *wrapper]
        command = [*become, python, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(
            ROOT / "rstar_lab", f"{folder}/rstar_lab", ignore=shutil.ignore_patterns("__pycache__", "static")
        )
        yield run


@pytest.fixture
def http(service):
    with httpx.Client(base_url=service["url"], timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def redis():
    """Start a redis-server for the test, on loopback, with a password and an append-only file."""
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT TESTED: redis-server is not installed (`make services` installs it where it may)")
    with temporary_redis() as server:
        yield server
