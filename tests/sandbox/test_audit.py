"""Tests of audit mode, which counts the system calls that the filter refuses."""

import logging

import httpx
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox
from rstar_lab.sandbox.launch import serving

pytestmark = pytest.mark.slow

REFUSED = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
errors = []
for _ in range(3):
    libc.ptrace(0, 0, 0, 0)
    errors.append(ctypes.get_errno())
try:
    socket.socket(socket.AF_INET)
except OSError as error:
    errors.append(error.errno)
print(errors)
"""


@pytest.mark.asyncio
async def test_refused_calls_are_counted_and_logged_with_the_id_of_the_call(caplog):
    async with LocalSandbox(Limits(timeout_s=5.0), workers=2, audit=True) as sandbox:
        with caplog.at_level(logging.WARNING):
            result = await sandbox.run(REFUSED)
        assert (result.outcome, result.stdout) == (Outcome.OK, "[1, 1, 1, 97]\n")
        assert (sandbox.events["denied:ptrace"], sandbox.events["denied:socket"]) == (3, 1)
        assert "denied system calls: ptrace 3, socket 1" in caplog.text
        assert (await sandbox.run("print(6 * 7)")).stdout == "42\n"
        assert sum(count for name, count in sandbox.events.items() if name.startswith("denied:")) == 4


@pytest.mark.asyncio
async def test_a_program_cannot_get_the_descriptor_of_the_notifications():
    """With it, the program could allow its own calls."""
    code = (
        "import os\n"
        "for fd in range(3, 100):\n"
        " if os.path.exists(f'/proc/self/fd/{fd}'): print(os.readlink(f'/proc/self/fd/{fd}').split(':')[0])"
    )
    async with LocalSandbox(Limits(timeout_s=5.0), workers=1, audit=True) as sandbox:
        audited = await sandbox.run(code)
    async with LocalSandbox(Limits(timeout_s=5.0), workers=1) as sandbox:
        assert audited.stdout == (await sandbox.run(code)).stdout


@pytest.mark.asyncio
async def test_many_refused_calls_of_many_processes_end_at_the_time_limit():
    flood = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nfor _ in range(6): os.fork()\nwhile True: libc.ptrace(0, 0, 0, 0)"
    )
    async with LocalSandbox(Limits(timeout_s=1.0, wall_slack_s=4.0), workers=2, audit=True) as sandbox:
        result = await sandbox.run(flood)
        assert result.outcome == Outcome.TIMEOUT and sandbox.events["denied:ptrace"] > 64
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert sandbox.events["supervisor_died"] == sandbox.events["supervisor_unresponsive"] == 0


@pytest.mark.asyncio
async def test_gvisor_does_not_support_audit_mode(monkeypatch, tmp_path):
    (tmp_path / "runsc").write_text("#!/bin/sh\n")
    (tmp_path / "runsc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UserError, match="audit"):
        await LocalSandbox(isolation="gvisor", audit=True).start()


def test_a_service_shows_the_counts_in_its_metrics():
    with serving("serve", "--no-token", "--port", "0", "--workers", "1", "--audit") as ready:
        call = {"calls": [{"code": "import os\ntry: os.setpriority(0, 0, 5)\nexcept OSError: pass"}]}
        httpx.post(f"{ready['url']}/calls", json=call, trust_env=False).raise_for_status()
        page = httpx.get(f"{ready['url']}/metrics", trust_env=False).text
    assert 'rstar_lab_sandbox_events_total{event="denied:setpriority"} 1.0' in page
