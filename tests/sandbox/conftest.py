import shutil

import httpx
import pytest

from benchmarks.redis_server import temporary_redis
from rstar_lab.sandbox.launch import serving


@pytest.fixture(scope="session")
def service():
    """Start a sandbox service on loopback. Its calls may use 2 s of CPU time. Yields {"url", "workers", "pid"}."""
    with serving("serve", "--no-token", "--port", "0", "--workers", "2", "--time-limit", "2") as ready:
        yield ready


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
