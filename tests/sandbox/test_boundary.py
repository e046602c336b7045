"""Tests of isolation: what programs cannot access."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import site
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from helpers.sandbox_processes import ROOT, sandbox_processes
from helpers.sandbox_tmp import OWN_TMP

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox
from rstar_lab.sandbox.check import check

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    os.environ["SECRET_OF_THE_HOST"] = "hunter2"
    try:
        async with LocalSandbox(Limits(timeout_s=10), workers=2) as sandbox:
            yield sandbox
    finally:
        del os.environ["SECRET_OF_THE_HOST"]


async def output_of(sandbox, code: str):
    result = await sandbox.run(code)
    assert result.outcome == Outcome.OK, result
    return json.loads(result.stdout)


needs_every_layer = pytest.mark.skipif(
    not all(layer.present for layer in check()), reason="this machine lacks a layer; see rstar-lab sandbox check"
)


@needs_every_layer
async def test_programs_cannot_see_host_files(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    tmp_path.chmod(0o777)
    places = [
        str(secret),
        str(ROOT / "pyproject.toml"),
        "/etc/shadow",
        "/root/.bashrc",
        "/home",
        "/proc/1/environ",
        "/sys",
    ]
    found = await output_of(sandbox, f"import json, os\nprint(json.dumps([p for p in {places} if os.path.exists(p)]))")
    assert found == []


async def test_programs_cannot_see_the_host_environment(sandbox):
    code = """
import json, os
text = str(dict(os.environ)) + open("/proc/self/environ").read()
print(json.dumps("hunter2" in text or "SECRET" in text))"""
    assert await output_of(sandbox, code) is False


@needs_every_layer
async def test_a_program_sees_only_its_own_processes(sandbox):
    code = """
import json, os
alive = []
for pid in range(1, 70000):
    try: os.kill(pid, 0)
    except ProcessLookupError: continue
    except PermissionError: pass
    alive.append(pid)
print(json.dumps([sorted(p for p in os.listdir("/proc") if p.isdigit()), alive]))"""
    listed, alive = await output_of(sandbox, code)
    # Process 1 is the namespace's init, which no program may signal.
    assert (listed, alive) == (["2"], [1, 2])


@needs_every_layer
async def test_only_the_standard_streams_are_open(sandbox):
    code = """
import json, os
fds = []
for fd in range(3, 4096):
    try: os.fstat(fd)
    except OSError: continue
    fds.append(fd)
print(json.dumps(fds))"""
    assert await output_of(sandbox, code) == []


async def test_a_program_can_write_only_to_its_own_folders(sandbox):
    code = """
import json, os
def writable(folder):
    try:
        open(folder + "/mark", "w").close()
    except OSError:
        return False
    return True
places = [folder for folder, _, _ in os.walk("/") if not folder.startswith(("/proc", "/box"))]
print(json.dumps([folder for folder in places if writable(folder)]))"""
    assert (
        await output_of(sandbox, code) == ["/tmp", "/dev/shm", "/var/tmp"]
        or sorted(await output_of(sandbox, code)) == []
    )


# Numbers of x86-64. These calls must be refused with any arguments.
REFUSED = {
    "ptrace": 101, "syslog": 103, "setuid": 105, "personality": 135, "pivot_root": 155, "chroot": 161, "mount": 165,
    "umount2": 166, "reboot": 169, "sethostname": 170, "init_module": 175, "add_key": 248, "keyctl": 250,
    "unshare": 272, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428, "fsopen": 430, "clone3": 435, "mount_setattr": 442,
    "setpriority": 141, "sched_setscheduler": 144, "sched_setattr": 314, "setxattr": 188, "capset": 126,
}  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
async def test_system_calls_outside_the_allowlist_are_refused(sandbox):
    code = f"""
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
def refused(number):
    return libc.syscall(number, 0, 0, 0, 0, 0) < 0 and ctypes.get_errno() in (1, 38)
print(json.dumps([name for name, number in {REFUSED}.items() if not refused(number)]))
"""
    assert await output_of(sandbox, code) == []


@needs_every_layer
async def test_concurrent_calls_do_not_see_sockets_of_others(sandbox):
    """/proc/self/net/unix lists the sockets of a network namespace."""
    speak = "import socket, time\ns = socket.socket(socket.AF_UNIX); s.bind('/tmp/spoken word')\ntime.sleep(1.5)"
    listen = "import time\ntime.sleep(0.7)\nprint('spoken' in open('/proc/self/net/unix').read())"
    _, heard = await asyncio.gather(sandbox.run(speak), sandbox.run(listen))
    assert (heard.outcome, heard.stdout) == (Outcome.OK, "False\n")


@needs_every_layer
async def test_file_locks_are_not_visible_to_other_calls(sandbox):
    """Locks are not taken, so one call cannot see the lock of another."""
    lock = "import fcntl, sys, time\nf = open(sys.executable)\n{}"
    speak = lock.format("fcntl.flock(f, fcntl.LOCK_EX)\nfcntl.lockf(f, fcntl.LOCK_SH)\ntime.sleep(1.5)")
    listen = lock.format("time.sleep(0.7)\nfcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('free')")
    first, second = await asyncio.gather(sandbox.run(speak), sandbox.run(listen))
    assert (first.outcome, second.stdout) == (Outcome.OK, "free\n"), (first, second)


@needs_every_layer
async def test_programs_cannot_observe_file_accesses_of_others(sandbox):
    code = """
import fcntl, json, os
fd = os.open("/usr/lib", os.O_RDONLY)
def refused(command, argument):
    try:
        fcntl.fcntl(fd, command, argument)
    except OSError:
        return True
    return False
print(json.dumps([refused(fcntl.F_NOTIFY, fcntl.DN_ACCESS), refused(fcntl.F_SETLEASE, 0), refused(fcntl.F_SETSIG, 10)]))"""
    assert await output_of(sandbox, code) == [True, True, True]


@needs_every_layer
async def test_the_process_group_does_not_contain_the_supervisor(sandbox):
    code = "import json, os\nprint(json.dumps([os.getpgrp(), os.getpgid(1)]))"
    assert await output_of(sandbox, code) == [1, 1]
    assert (await sandbox.run("import os\nos.kill(0, 9)")).outcome == Outcome.KILLED
    assert (await sandbox.run("import os\nos.setsid()\nprint(1)")).stdout == "1\n"


async def test_no_core_is_dumped_to_a_piped_core_pattern(sandbox):
    """Only a core limit of 1 prevents it; a program cannot change that."""
    code = """
import json, resource
before = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(json.dumps([before, resource.getrlimit(resource.RLIMIT_CORE)]))"""
    assert await output_of(sandbox, code) == [[1, 1], [1, 1]]


async def test_opening_dev_stdout_does_not_delete_earlier_output(sandbox):
    result = await sandbox.run("import os\nprint('before', flush=True)\nos.system('echo after > /dev/stdout')")
    assert result.stdout.startswith("before\n")


async def test_programs_cannot_connect_to_host_sockets(sandbox):
    name = f"\0rstar-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as tcp:
        abstract.bind(name)
        abstract.listen()
        port = tcp.getsockname()[1]
        code = f"""
import json, socket
def reached(family, address):
    try:
        socket.socket(family).connect(address)
    except OSError:
        return False
    return True
print(json.dumps([reached(socket.AF_UNIX, {name!r}), reached(socket.AF_INET, ("127.0.0.1", {port}))]))"""
        assert await output_of(sandbox, code) == [False, False]


async def test_concurrent_calls_cannot_communicate(sandbox):
    """Concurrent calls share no abstract socket name, System V segment or file."""
    speak = """
import ctypes, socket, time
s = socket.socket(socket.AF_UNIX); s.bind("\\0meet"); s.listen()
print(ctypes.CDLL(None).shmget(4711, 4096, 0o1777 | 0o1000) >= 0)
open("/tmp/meet", "w").write("x"); open("/dev/shm/meet", "w").write("x")
time.sleep(1.5)"""
    listen = """
import ctypes, json, os, socket, time
time.sleep(0.7)
try:
    socket.socket(socket.AF_UNIX).connect("\\0meet"); met = True
except OSError:
    met = False
print(json.dumps([met, ctypes.CDLL(None).shmget(4711, 4096, 0) >= 0, os.path.exists("/tmp/meet"), os.path.exists("/dev/shm/meet")]))"""
    spoken, heard = await asyncio.gather(sandbox.run(speak), sandbox.run(listen))
    assert spoken.stdout == "True\n"
    assert json.loads(heard.stdout) == [False] * 4


async def test_calls_share_no_writable_memory(sandbox):
    """A mark that one call writes into all its shared mappings must not appear in a concurrent call."""
    scan = """
import ctypes, time
mine = []
for line in open("/proc/self/maps"):
    span, mode = line.split()[:2]
    if mode.startswith("rw") and mode.endswith("s"):
        low, high = (int(end, 16) for end in span.split("-"))
        mine.append((ctypes.c_char * (high - low)).from_address(low))
{}
print(sum(b"MARKED" in bytes(memory) for memory in mine))"""
    write = scan.format("for memory in mine: memory[256:262] = b'MARKED'\ntime.sleep(1.0)")
    read = scan.format("time.sleep(0.5)")
    marked, seen_marks = await asyncio.gather(sandbox.run(write), sandbox.run(read))
    assert int(marked.stdout) >= 1, marked
    assert (seen_marks.outcome, seen_marks.stdout) == (Outcome.OK, "0\n")


async def test_a_call_leaves_no_state_for_the_next_call(sandbox):
    litter = """
import os, random, sys, builtins, math
for folder in ("/tmp", "/dev/shm", "."): open(folder + "/left", "w").write("x")
builtins.left = math.left = sys.left = 1
os.environ["LEFT"] = "1"; os.umask(0); sys.setrecursionlimit(50)
import ctypes; ctypes.CDLL(None).shmget(4712, 4096, 0o1777)"""
    look = f"""
import builtins, ctypes, json, math, os, sys
print(json.dumps([{OWN_TMP}, os.listdir("/dev/shm"), os.listdir("."), hasattr(builtins, "left"), hasattr(math, "left"),
  "LEFT" in os.environ, sys.getrecursionlimit() < 100, ctypes.CDLL(None).shmget(4712, 4096, 0) >= 0]))"""
    for _ in range(3):
        assert (await sandbox.run(litter)).outcome == Outcome.OK
        assert await output_of(sandbox, look) == [[], [], [], False, False, False, False, False]


@needs_every_layer
def test_programs_have_a_private_tmp_if_the_interpreter_is_in_tmp():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    script = """
import asyncio, json
from rstar_lab.sandbox import LocalSandbox
async def main():
    async with LocalSandbox(workers=1) as sandbox:
        calls = ["open('/tmp/left', 'w').write('x')", "import os, held\\nprint(held.__file__, os.listdir('/tmp'))"]
        print(json.dumps([(await sandbox.run(call)).stdout for call in calls]))
asyncio.run(main())"""
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        module = next(folder.glob("env/lib/python*/site-packages")) / "held.py"
        module.touch()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}
        done = subprocess.run(
            [folder / "env/bin/python", "-c", script], capture_output=True, text=True, timeout=120, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == ["", f"{module} {[folder.name]}\n"]
    finally:
        shutil.rmtree(folder)


@needs_every_layer
async def test_data_of_the_previous_call_is_not_in_memory():
    """Programs are forks of one supervisor, whose memory must not contain data of earlier calls."""
    scan = """
import re
needle = re.compile(b"(?:whispe[r]){3}")  # a pattern that does not match itself
found = 0
memory = open("/proc/self/mem", "rb", 0)
for line in open("/proc/self/maps"):
    span, mode = line.split()[:2]
    low, high = (int(end, 16) for end in span.split("-"))
    if mode[0] != "r" or "[v" in line: continue
    try:
        memory.seek(low); found += len(needle.findall(memory.read(high - low)))
    except (OSError, ValueError, OverflowError): pass
print(found)"""
    async with LocalSandbox(workers=1) as sandbox:
        # Check of the scan: it finds data in its own memory.
        own = await sandbox.run(f"kept = b'{'whisper' * 3}'\n{scan}")
        assert int(own.stdout) > 0
        for _ in range(3):
            spoken = await sandbox.run("import sys\nx = sys.stdin.read()\nprint(x * 3)\nx * 3", "whisper" * 50)
            assert spoken.stdout.count("whisper") == 150
            assert (await sandbox.run(f"'{'whisper' * 50}'")).outcome == Outcome.OK
            await sandbox.run("import sys\nsys.stdin.read()\n", "whisper" * 300_000)
            assert (await sandbox.run(scan)).stdout == "0\n"


async def test_zygotes_have_no_descriptors_or_modules_of_the_parent(sandbox):
    """Zygotes are started by exec, without descriptors, environment or modules of the parent."""
    processes = sandbox_processes(os.getpid())
    assert processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert "SECRET_OF_THE_HOST" not in process.environ()
