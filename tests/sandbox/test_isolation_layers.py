"""Tests of the isolation layers for ordinary users, of `sandbox check` and of strict mode."""

import asyncio
import json
import subprocess
import sys

import pytest
from helpers.guarantees import MODES, table
from helpers.sandbox_processes import ROOT

from rstar_lab.sandbox import LocalSandbox
from rstar_lab.sandbox.check import GUARANTEES, LayersMissing, check, holds
from rstar_lab.sandbox.runtime import isolation, landlock
from rstar_lab.sandbox.runtime.isolation import LAYERS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


ORDINARY = """
import asyncio, json
from rstar_lab.sandbox import Limits, LocalSandbox
from rstar_lab.sandbox.check import LayersMissing
async def main():
    async with LocalSandbox(Limits(timeout_s=3, memory_mb=256), workers=2) as sandbox:
        calls = ["print(6 * 7)", "import os\\nprint(os.listdir('/tmp'), os.getuid())", "import time\\ntime.sleep(60)",
                 "x = []\\nwhile True: x.append(bytearray(10**6))", "open('/etc/shadow')",
                 "import tempfile\\ntempfile.TemporaryFile().write(b'x')",
                 "import os\\nif os.fork() == 0:\\n os.setsid()\\n import time\\n time.sleep(60)\\nprint('left')"]
        results = [await sandbox.run(call) for call in calls]
        calls = ["import mmap\\nm = mmap.mmap(-1, 600 << 20)\\nfor i in range(0, len(m), 4096): m[i] = 1\\nwhile True: pass",
                 "import os\\nif os.fork() == 0:\\n if os.fork() == 0:\\n  x = b'x' * (500 << 20)\\n  while True: pass\\n"
                 " os._exit(0)\\nwhile True: pass"]
        memory = [await sandbox.run(call) for call in calls]
        await sandbox.run("x = 20", session="s")
        names = await sandbox.fork("s", 2)
        session = [await sandbox.run("x + 1", session=name) for name in ("s", *names)]
        await sandbox.close_session(names[0])
        assert (await sandbox.run("x", session=names[1])).value == "20"
        missing = sorted(sandbox.missing_layers)
    try:
        await LocalSandbox(strict=True).start()
        strict = "started"
    except LayersMissing as error:
        strict = str(error)
    print(json.dumps([[r.outcome, r.stdout] for r in results] + [[session[1].outcome, session[1].value],
                     [r.outcome for r in memory], missing, strict]))
asyncio.run(main())
"""


def ordinary(as_other_user, wrapper: tuple[str, ...] = ()):
    done = as_other_user(ORDINARY, wrapper=wrapper)
    *results, memory, missing, strict = json.loads(done.stdout)
    assert memory == ["memory", "memory"]
    return results, missing, strict, done.stderr


async def test_an_ordinary_user_gets_all_layers_that_need_no_root(as_other_user):
    results, missing, strict, warnings = await asyncio.to_thread(ordinary, as_other_user)
    assert results[:2] == [["ok", "42\n"], ["ok", "[] 1000\n"]]
    assert [outcome for outcome, _ in results[2:6]] == ["timeout", "memory", "exception", "ok"]
    assert results[6] == ["ok", "left\n"]
    assert results[7] == ["ok", "21"]
    # All layers except those that require root.
    assert set(missing) <= {"cgroup", "user_id"}
    if "cgroup" in missing:
        assert "sandbox runs without cgroup" in warnings
        assert "cgroup" in strict
    else:
        assert strict == "started"


async def test_without_user_namespaces_other_layers_apply_with_a_warning(as_other_user):
    """In a container without user namespaces, Landlock, seccomp and limits still apply."""
    refuse = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all --inh-caps -all "$@"'
    results, missing, strict, warnings = await asyncio.to_thread(
        ordinary, as_other_user, ("unshare", "-U", "-r", "sh", "-c", refuse, "sh")
    )
    assert results[0] == ["ok", "42\n"]
    assert [outcome for outcome, _ in results[2:6]] == ["timeout", "memory", "exception", "ok"]
    assert results[6] == ["ok", "left\n"]
    assert results[7] == ["ok", "21"]
    assert {"pid_namespace", "mount_namespace", "user_namespace", "cgroup"} <= set(missing)
    assert "landlock" not in missing
    assert "pid namespace" in strict
    assert "sandbox runs without pid namespace" in warnings


async def test_check_reports_every_layer():
    found = check()
    assert len({layer.name for layer in found}) == len(found) >= 11
    assert all(layer.present or layer.leaves_open for layer in found)


async def test_the_documentation_contains_the_table_of_guarantees():
    assert table() in (ROOT / "docs" / "sandbox-boundary.md").read_text()


async def test_every_layer_is_part_of_a_guarantee_or_of_the_root_file_system():
    named = {layer for alternatives in GUARANTEES.values() for needed in alternatives for layer in needed}
    assert named <= {*LAYERS, "gvisor", "preemption"} and set(LAYERS) - named == {"uts_namespace"}
    assert not holds("memory of all its processes limited by the kernel", MODES["user"])
    assert holds("cannot read or change files of the host", MODES["user, no user namespaces"])


@pytest.mark.parametrize(("abi", "namespaces", "enough"), [(5, True, True), (5, False, False), (6, False, True)])
async def test_an_old_landlock_is_reported_where_namespaces_are_missing(monkeypatch, abi, namespaces, enough):
    monkeypatch.setattr(landlock, "abi", lambda: abi)
    monkeypatch.setattr(isolation, "_bound", lambda *_: None)  # do not change the limits of this process
    missing = {} if namespaces else {"pid_namespace": "refused"}
    isolation.Isolation(missing, True, []).prepare()
    assert ("landlock_abi" not in missing) is enough


async def test_strict_starts_only_if_no_layer_is_missing():
    missing = [layer for layer in check() if not layer.present]
    sandbox = LocalSandbox(strict=True)
    if missing:
        with pytest.raises(LayersMissing, match=missing[0].name):
            await sandbox.start()
    else:
        await sandbox.start()
    await sandbox.aclose()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("local", "torch numpy sympy fastapi psutil"), ("runtime.zygote", "shutil tempfile pathlib zlib asyncio")],
)
def test_importing_the_sandbox_imports_no_heavy_packages(module, heavy):
    """The interface needs no package; what the zygote imports is copied by the fork of every program."""
    code = f"import sys; before = {{*sys.modules}}; import rstar_lab.sandbox.{module}; print({{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(heavy.split()) & set(eval(done.stdout))
