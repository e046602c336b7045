"""Tests of `isolation: gvisor`: the command line and bundle with a stand-in for runsc, and calls with the real one."""

import asyncio
import json
import os
import shutil
import stat
import sys

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox
from rstar_lab.sandbox.call import ForkError
from rstar_lab.sandbox.gvisor import GvisorPool, find_runsc
from rstar_lab.sandbox.supervisor_pool import View

needs_runsc = pytest.mark.skipif(
    shutil.which("runsc") is None or os.geteuid() != 0, reason="runsc is not installed, or this is not root"
)


def test_a_missing_runsc_is_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"isolation: gvisor requires `runsc`.*https://gvisor.dev"):
        find_runsc()


def test_an_unknown_isolation_is_refused():
    with pytest.raises(UserError, match="isolation: 'docker' must be one of namespaces, gvisor"):
        LocalSandbox(isolation="docker")


async def test_a_container_gets_read_only_files_and_no_network(monkeypatch, tmp_path):
    """The stand-in records its arguments and the bundle, and ends, as a runsc that cannot start does."""
    runsc = tmp_path / "runsc"
    runsc.write_text(
        f"#!{sys.executable}\nimport json, shutil, sys\n"
        f"json.dump(sys.argv[1:], open({str(tmp_path / 'arguments')!r}, 'w'))\n"
        f"shutil.copy(sys.argv[sys.argv.index('--bundle') + 1] + '/config.json', {str(tmp_path / 'config')!r})\n"
        "open(sys.argv[sys.argv.index('--log') + 1], 'w').write('no platform')\n"
    )
    runsc.chmod(runsc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    data = tmp_path / "data"
    data.mkdir()
    pool = GvisorPool(1, View([str(data)]))
    with pytest.raises(RuntimeError, match="could not start a container: no platform"):
        await pool.start()
    arguments = json.loads((tmp_path / "arguments").read_text())
    assert arguments[arguments.index("--network") + 1] == "none"
    assert arguments[-4:-2] == ["run", "--bundle"]
    config = json.loads((tmp_path / "config").read_text())
    assert config["root"]["readonly"] and {"type": "network"} in config["linux"]["namespaces"]
    binds = {mount["destination"]: mount for mount in config["mounts"] if mount["type"] == "bind"}
    assert str(data) in binds and "/etc" not in binds and "/home" not in binds
    assert all("ro" in mount["options"] for mount in binds.values())
    assert not pool._folder.exists()


@needs_runsc
@pytest.mark.slow
async def test_calls_and_sessions_run_in_gvisor():
    async with LocalSandbox(Limits(timeout_s=2.0, memory_mb=256), workers=2, isolation="gvisor") as sandbox:
        result = await sandbox.run("print(input())\n6 * 7", "hello")
        assert (result.outcome, result.stdout, result.value) == (Outcome.OK, "hello\n", "42")
        kernel = await sandbox.run("print(open('/proc/version').read())")
        assert os.uname().release not in kernel.stdout
        codes = ["1 / 0", "while True: pass", "import time; time.sleep(9)", "x = bytearray(10**9)", "x = ("]
        results = await asyncio.gather(*map(sandbox.run, codes))
        assert [result.outcome for result in results] == [
            Outcome.EXCEPTION, Outcome.TIMEOUT, Outcome.TIMEOUT, Outcome.MEMORY, Outcome.SYNTAX_ERROR,
        ]  # fmt: skip
        assert (await sandbox.run("x = 20", session="s")).outcome == Outcome.OK
        assert (await sandbox.run("x + 1", session="s")).value == "21"
        with pytest.raises(ForkError, match="gvisor does not support forks"):
            await sandbox.fork("s", 2)
        await sandbox.close_session("s")
        escape = "import os\nprint(os.path.exists('/etc/shadow'), os.getuid() == 0)"
        assert (await sandbox.run(escape)).stdout == "False False\n"


@needs_runsc
@pytest.mark.slow
async def test_a_container_ends_with_its_call():
    pool = GvisorPool(1)
    await pool.start()
    container = await pool.acquire("bare")
    pool.release(container)
    assert await asyncio.to_thread(container.process.wait, 10) is not None
    await pool.close()
    assert not pool._folder.exists()
