"""Tests of isolation: what programs cannot access, and what ends with the sandbox."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from helpers.sandbox_tmp import OWN_TMP

import rstar_lab
from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox
from rstar_lab.sandbox.check import check
from rstar_lab.sandbox.local import LayersMissing

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
ROOT = Path(rstar_lab.__file__).parent.parent


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    os.environ["SECRET_OF_THE_HOST"] = "hunter2"
    try:
        async with LocalSandbox(Limits(timeout_s=10), workers=2) as sandbox:
            yield sandbox
    finally:
        del os.environ["SECRET_OF_THE_HOST"]


def box_processes(parent: int) -> list[psutil.Process]:
    """Return the zygotes, supervisors and programs of all sandboxes of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(parent).children(recursive=True)
    return []


async def seen(sandbox, code: str):
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
    found = await seen(sandbox, f"import json, os\nprint(json.dumps([p for p in {places} if os.path.exists(p)]))")
    assert found == []


async def test_programs_cannot_see_the_host_environment(sandbox):
    code = """
import json, os
text = str(dict(os.environ)) + open("/proc/self/environ").read()
print(json.dumps("hunter2" in text or "SECRET" in text))"""
    assert await seen(sandbox, code) is False


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
    listed, alive = await seen(sandbox, code)
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
    assert await seen(sandbox, code) == []


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
    assert await seen(sandbox, code) == ["/tmp", "/dev/shm", "/var/tmp"] or sorted(await seen(sandbox, code)) == []


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
    assert await seen(sandbox, code) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
async def test_system_calls_with_dangerous_arguments_are_refused(sandbox):
    code = """
import ctypes, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def errno(*call):
    return ctypes.get_errno() if libc.syscall(*call) < 0 else 0
print(json.dumps([
    errno(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),  # clone into a user namespace
    errno(157, 1, 0, 0, 0, 0),                           # prctl: outlive the supervisor
    errno(157, 22, 2, 0, 0, 0),                          # prctl: another seccomp filter
    errno(16, 0, 0x5412, 0),                             # ioctl: type into a terminal
    errno(41, 2, 1, 0), errno(41, 10, 1, 0), errno(41, 16, 3, 0), errno(41, 17, 3, 0),  # inet, inet6, netlink, packet
]))"""
    assert await seen(sandbox, code) == [1, 1, 1, 25, 97, 97, 97, 97]


@needs_every_layer
async def test_concurrent_calls_do_not_see_each_other_s_sockets(sandbox):
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
    assert await seen(sandbox, code) == [True, True, True]


@needs_every_layer
async def test_the_process_group_does_not_contain_the_supervisor(sandbox):
    code = "import json, os\nprint(json.dumps([os.getpgrp(), os.getpgid(1)]))"
    assert await seen(sandbox, code) == [1, 1]
    assert (await sandbox.run("import os\nos.kill(0, 9)")).outcome == Outcome.KILLED
    assert (await sandbox.run("import os\nos.setsid()\nprint(1)")).stdout == "1\n"


async def test_no_core_is_dumped_to_a_piped_core_pattern(sandbox):
    """Only a core limit of 1 prevents it; a program cannot change that."""
    code = """
import json, resource
before = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(json.dumps([before, resource.getrlimit(resource.RLIMIT_CORE)]))"""
    assert await seen(sandbox, code) == [[1, 1], [1, 1]]


async def test_socket_pairs_are_unix_only_without_filters_or_urgent_data(sandbox):
    code = """
import json, socket
def works(action):
    try:
        action()
    except OSError:
        return False
    return True
a, b = socket.socketpair()
print(json.dumps([
    works(lambda: socket.socketpair(socket.AF_INET)),
    works(lambda: a.setsockopt(socket.SOL_SOCKET, 26, bytes(16))),
    works(lambda: a.send(b"x", socket.MSG_OOB)),
    works(lambda: a.send(b"x")),
]))"""
    assert await seen(sandbox, code) == [False, False, False, True]


async def test_sympy_s_random_numbers_differ_between_calls_and_follow_the_seed(sandbox):
    code = "import sympy\nprint(sympy.randprime(10**9, 10**12))"
    results = await asyncio.gather(*(sandbox.run(code, seed=seed) for seed in (None, None, None, 7, 7)))
    texts = [result.stdout for result in results]
    assert len(set(texts[:4])) == 4 and texts[3] == texts[4]


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
        assert await seen(sandbox, code) == [False, False]


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
        assert await seen(sandbox, look) == [[], [], [], False, False, False, False, False]


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
        # The scan does see what is in its own memory.
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
    box = box_processes(os.getpid())
    assert box
    for process in box:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert "SECRET_OF_THE_HOST" not in process.environ()


async def test_closing_ends_every_process():
    before = set(box_processes(os.getpid()))
    sandbox = LocalSandbox(workers=2)
    await sandbox.start()
    await sandbox.run("x = 1", session="kept")
    running = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)", timeout_s=60))
    await asyncio.sleep(0.5)
    started = set(box_processes(os.getpid())) - before
    assert len(started) > 3
    await sandbox.aclose()
    await sandbox.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await running
    with pytest.raises(RuntimeError, match="closed"):
        await sandbox.run("1")
    assert not psutil.wait_procs(started, timeout=10)[1]


EMBEDDER = """
import asyncio
from rstar_lab.sandbox import LocalSandbox
async def main():
    async with LocalSandbox(workers=2) as sandbox:
        await sandbox.run("x = 1", session="kept")
        code = "import os, time\\nos.fork()\\nos.setsid()\\ntime.sleep(60)"
        calls = [asyncio.create_task(sandbox.run(code, timeout_s=60)) for _ in range(2)]
        await asyncio.sleep(1)
        print("ready", flush=True)
        await asyncio.gather(*calls)
asyncio.run(main())
"""


async def test_all_processes_end_when_the_embedding_process_is_killed():
    embedder = subprocess.Popen([sys.executable, "-c", EMBEDDER], stdout=subprocess.PIPE, cwd=ROOT)  # noqa: ASYNC220
    assert embedder.stdout is not None
    assert await asyncio.to_thread(embedder.stdout.readline) == b"ready\n"
    box = box_processes(embedder.pid)
    assert len(box) > 6
    embedder.send_signal(signal.SIGKILL)
    embedder.wait()
    embedder.stdout.close()
    left = (await asyncio.to_thread(psutil.wait_procs, box, 15))[1]
    assert left == []


async def kill_later(processes: list[psutil.Process], seconds: float) -> None:
    await asyncio.sleep(seconds)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


async def test_calls_are_retried_when_zygotes_and_supervisors_are_killed():
    before = set(box_processes(os.getpid()))
    async with LocalSandbox(Limits(timeout_s=20), workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run("import numpy") for _ in range(2)))
        mine = [process for process in box_processes(os.getpid()) if process not in before]
        assert len(mine) > 4
        # CPU time and not sleep, because sleeping calls run all at once.
        calls = [Call(f"import time\nwhile time.process_time() < 0.2: pass\nprint({i})") for i in range(40)]
        # One after another: supervisors, tier zygotes, the first zygote and its parent.
        killer = asyncio.create_task(_kill_one_by_one(sandbox, mine))
        results = await sandbox.run_many(calls)
        await killer
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(40)]
        assert sandbox.retries > 0
        assert sandbox.outcomes == {Outcome.OK: 42}


async def _kill_one_by_one(sandbox: LocalSandbox, processes: list[psutil.Process]) -> None:
    """Wait for a result between two kills, so that no call runs out of retries."""
    for process in reversed(processes):
        answered = sandbox.outcomes.total()
        await kill_later([process], 0.2)
        for _ in range(200):
            if sandbox.outcomes.total() > answered:
                break
            await asyncio.sleep(0.05)


async def test_a_killed_supervisor_leaves_no_program_running():
    async with LocalSandbox(workers=1) as sandbox:
        await sandbox.run("1")
        before = set(box_processes(os.getpid()))
        call = asyncio.create_task(sandbox.run("import os, time\nos.fork()\nos.setsid()\ntime.sleep(3)", timeout_s=20))
        await asyncio.sleep(0.7)
        # Zygotes that are still warming up lead no session; the two halves of the program each do.
        programs = {p for p in set(box_processes(os.getpid())) - before if os.getsid(p.pid) == p.pid}
        assert len(programs) == 2
        parents = {program.parent() for program in programs} & before
        assert len(parents) == 1
        await kill_later(list(parents), 0)
        assert (await call).outcome == Outcome.OK
        assert not psutil.wait_procs(programs, timeout=10)[1]


async def test_control_groups_are_removed():
    groups = Path("/proc/self/cgroup").read_text()
    if "memory" not in groups:
        pytest.skip("no version 1 control groups here")
    base = Path("/sys/fs/cgroup/pids")
    before = set(base.glob("rstar-sandbox-*"))  # other sandboxes of this process
    async with LocalSandbox(workers=1) as sandbox:
        await sandbox.run("1")
        for i in range(5):
            await sandbox.run("x = 1", session=str(i))
            await sandbox.close_session(str(i))
        await asyncio.sleep(0.5)
        await sandbox.run("x = 1", session="last")
        new = set(base.glob("rstar-sandbox-*")) - before
        (mine,) = [path for path in new if psutil.Process().pid in _owners(path)]
        slots = [path.name for path in mine.iterdir() if path.is_dir()]
        assert len(slots) <= 4
    assert not mine.exists()


def _owners(path: Path) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {parent.pid for parent in psutil.Process(int(path.name.split("-")[-1])).parents()}
    return set()


ORDINARY = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from rstar_lab.sandbox import Limits, LocalSandbox
from rstar_lab.sandbox.local import LayersMissing
async def main():
    async with LocalSandbox(Limits(timeout_s=3, memory_mb=256), workers=2) as sandbox:
        calls = ["print(6 * 7)", "import os\\nprint(os.listdir('/tmp'), os.getuid())", "import time\\ntime.sleep(60)",
                 "x = []\\nwhile True: x.append(bytearray(10**6))", "open('/etc/shadow')",
                 "import tempfile\\ntempfile.TemporaryFile().write(b'x')",
                 "import os\\nif os.fork() == 0:\\n os.setsid()\\n import time\\n time.sleep(60)\\nprint('left')"]
        results = [await sandbox.run(call) for call in calls]
        session = [await sandbox.run(code, session="s") for code in ("x = 20", "x + 1")]
        missing = sorted(sandbox.missing_layers)
    try:
        await LocalSandbox(strict=True).start()
        strict = "started"
    except LayersMissing as error:
        strict = str(error)
    print(json.dumps([[r.outcome, r.stdout] for r in results] + [[session[1].outcome, session[1].value], missing, strict]))
asyncio.run(main())
"""


def as_ordinary_user(wrapper: list[str]):
    with tempfile.TemporaryDirectory() as folder:
        return _as_ordinary_user(Path(folder), wrapper)


def _as_ordinary_user(tmp_path: Path, wrapper: list[str]):
    """Run the package with the system's Python as an ordinary user without capabilities."""
    python = shutil.which("python3", path="/usr/bin")
    old = (
        python is None or subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode
    )
    if os.geteuid() != 0 or old or shutil.which("setpriv") is None:
        pytest.skip("needs root, setpriv and a system Python of at least 3.11 to become an ordinary user")
    tmp_path.chmod(0o755)
    shutil.copytree(ROOT / "rstar_lab", tmp_path / "rstar_lab", ignore=shutil.ignore_patterns("__pycache__", "static"))
    script = tmp_path / "ordinary.py"
    script.write_text(ORDINARY)
    become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run(
        [*become, *wrapper, python, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    *results, missing, strict = json.loads(done.stdout)
    return results, missing, strict, done.stderr


async def test_an_ordinary_user_gets_all_layers_that_need_no_root():
    results, missing, strict, warnings = await asyncio.to_thread(as_ordinary_user, [])
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


async def test_without_user_namespaces_other_layers_apply_with_a_warning():
    """In a container without user namespaces, Landlock, seccomp and limits still apply."""
    refuse = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all --inh-caps -all "$@"'
    results, missing, strict, warnings = await asyncio.to_thread(
        as_ordinary_user, ["unshare", "-U", "-r", "sh", "-c", refuse, "sh"]
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


async def test_strict_starts_only_if_no_layer_is_missing():
    missing = [layer for layer in check() if not layer.present]
    sandbox = LocalSandbox(strict=True)
    if missing:
        with pytest.raises(LayersMissing, match=missing[0].name):
            await sandbox.start()
    else:
        await sandbox.start()
    await sandbox.aclose()


def test_importing_the_sandbox_imports_no_heavy_packages():
    """Importing the interface loads neither torch nor numpy nor a web server."""
    code = "import sys, rstar_lab.sandbox.local; print([m for m in ('torch', 'numpy', 'sympy', 'fastapi') if m in sys.modules])"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
    assert time.monotonic() - started < 30
