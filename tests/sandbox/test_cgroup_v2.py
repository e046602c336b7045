"""Control groups of version 2: the files that are written, in a folder instead of a hierarchy of the kernel."""

import os
import signal
import subprocess

import pytest

from rstar_lab.sandbox.runtime import cgroup
from rstar_lab.sandbox.runtime.cgroup import BACKGROUND, BOOSTED, NORMAL, PREEMPTED, Group
from rstar_lab.sandbox.runtime.pressure import Crowds, Pressure, available_cpus
from rstar_lab.sandbox.runtime.protocol import KILL_PROGRAM
from rstar_lab.sandbox.runtime.zygote import Zygote

FILES = {
    "cpu.weight": "100", "cpu.idle": "0", "cpu.max": "max 100000", "memory.max": "max", "memory.swap.max": "max",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "memory.stat": "anon 0\nshmem 0\n", "memory.current": "0",
    "pids.max": "max", "pids.current": "1", "cpu.stat": "usage_usec 2500000\nuser_usec 1\n", "cgroup.procs": "",
    "cgroup.subtree_control": "", "cgroup.threads": "",
}  # fmt: skip


def make_folder(path):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "hierarchy" / "call")


@pytest.fixture
def group(folder):
    fd = os.open(folder, os.O_RDONLY)
    yield Group(2, dict.fromkeys(cgroup.CONTROLLERS, fd))
    os.close(fd)


def read(folder, name):
    """Return what was written over the beginning of a file."""
    return (folder / name).read_text()


@pytest.mark.parametrize(
    ("weight", "written"), [(NORMAL, "400"), (PREEMPTED, "50"), (BOOSTED, "3200"), (BACKGROUND, "1")]
)
def test_weights_have_the_proportions_of_version_1(folder, group, weight, written):
    """An ordinary process has 100 here and 1024 there."""
    (folder / "cpu.weight").write_text("")
    group.set_weight(weight)
    assert read(folder, "cpu.weight") == written and read(folder, "cpu.idle") == str(int(weight == BACKGROUND))
    if weight != BACKGROUND:
        assert int(written) / 100 == weight / 1024


def test_limits_are_written_and_counters_are_read(folder, group):
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (folder / name).write_text("")
    group.limit(256, 130)
    group.limit_cpus(1.1)
    written = {name: read(folder, name) for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert written == {
        "memory.max": str(256 << 20),
        "memory.swap.max": "0",
        "pids.max": "130",
        "cpu.max": "110000 100000",
    }
    group.start_accounting()
    (folder / "cpu.stat").write_text("usage_usec 4000000\n")
    assert group.cpu_s() == 1.5
    assert not group.out_of_memory() and not group.limit_was_reached()
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n")
    assert group.out_of_memory() and group.limit_was_reached()
    assert not group.out_of_memory() and not group.limit_was_reached()  # counted once


@pytest.mark.parametrize("has_peak", [True, False])
def test_a_call_that_used_much_memory_is_blamed_if_its_peak_is_known(folder, group, tmp_path, has_peak):
    """The limit of the whole sandbox was reached, so the OOM killer ended the call below its own limit."""
    if has_peak:
        (folder / "memory.peak").write_text("")
    fd = os.open(make_folder(tmp_path / "hierarchy" / "supervisors"), os.O_RDONLY)
    group.join(Group(2, dict.fromkeys(cgroup.CONTROLLERS, fd)))
    group.limit(256, 130)
    group.start_accounting()
    assert not group.limit_was_reached()
    if has_peak:
        assert read(folder, "memory.peak") == "0"
        (folder / "memory.peak").write_text(str(130 << 20))
        assert group.limit_was_reached()
    os.close(fd)


def test_the_share_of_cpus_follows_the_groups_above(folder, group):
    (folder.parent / "cpu.max").write_text("50000 100000")
    (folder.parent.parent / "cpu.max").write_text("max 100000")
    assert available_cpus(group) == 0.5
    assert Pressure(group).crowds.call_cpus == pytest.approx(0.45)
    assert Crowds(2.0).first_cpus == 1.1


def test_a_supervisor_leaves_the_group_of_a_crowd_and_returns(folder, group, tmp_path):
    """It stays in the group otherwise, because a move between groups waits for a lock of all forks."""
    supervisors = make_folder(tmp_path / "hierarchy" / "supervisors")
    fd = os.open(supervisors, os.O_RDONLY)
    group.join(Group(2, dict.fromkeys(cgroup.CONTROLLERS, fd)))
    assert read(folder, "cgroup.procs") == "0" and read(supervisors, "cgroup.procs") == ""
    group.move_supervisor_out()
    group.enter_background()
    assert read(supervisors, "cgroup.procs") == "0" and read(folder, "cpu.idle") == "1"
    group.leave_background()
    assert read(folder, "cpu.idle") == "0" and not group.in_background
    os.close(fd)


def test_groups_of_killed_sandboxes_are_removed_where_they_were_created(tmp_path, monkeypatch):
    """A group that contains processes cannot have groups with controllers, so a group above it gets them."""
    stale = tmp_path / "user" / f"{cgroup.PREFIX}-{os.getpid()}"  # the process id may be that of another process by now
    live = tmp_path / "user" / f"{cgroup.PREFIX}-1"
    for path in (stale / "supervisors", live, tmp_path / "user" / "app"):
        path.mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_own_paths", lambda: {"": "/user/app"})
    monkeypatch.setattr(cgroup, "_mounts", lambda: [("cgroup2", "/", str(tmp_path), set())])
    lock = cgroup.lock_group(str(live))
    cgroup.remove_stale_groups()
    assert not stale.exists() and live.exists()
    os.close(lock)
    cgroup.remove_stale_groups()
    assert not live.exists()


def test_limits_are_written_through_files_opened_before_the_namespace(folder, group, tmp_path):
    """With the mount option `nsdelegate` the kernel refuses writes to limits through files that were opened in the namespace."""
    fd = os.open(make_folder(tmp_path / "hierarchy" / "supervisors"), os.O_RDONLY)
    group.join(Group(2, dict.fromkeys(cgroup.CONTROLLERS, fd)))
    limits = ("memory.max", "memory.swap.max", "pids.max", "cpu.max", "cpu.weight", "cpu.idle")
    for name in limits:
        os.truncate(folder / name, 0)
        (folder / name).rename(tmp_path / name)
    group.limit(256, 130)
    group.limit_cpus(1.1)
    for weight in (BACKGROUND, PREEMPTED):
        group.set_weight(weight)
    written = {name: read(tmp_path, name) for name in limits}
    assert written == dict(zip(limits, (str(256 << 20), "0", "130", "110000 100000", "50", "0"), strict=True))
    os.close(fd)


def test_the_program_of_a_late_supervisor_is_killed(folder, group, monkeypatch):
    """The supervisor may wait for memory that its program takes again and again: both are in one group."""
    program, supervisor = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        zygote = Zygote(None, "bare", None, None)
        zygote.group = group
        monkeypatch.setattr(group, "child", lambda name: Group(2, {"memory": os.open(folder, os.O_RDONLY)}))
        zygote.supervisors = {supervisor.pid: "bare-7"}
        (folder / "cgroup.threads").write_text(f"{program.pid}\n{supervisor.pid}\n")
        monkeypatch.setattr(cgroup, "KILL_S", 0.01)
        zygote._kill(KILL_PROGRAM | 8)
        assert program.poll() is None
        zygote._kill(KILL_PROGRAM | 7)
        assert program.wait(10) == -signal.SIGKILL and supervisor.poll() is None
    finally:
        for process in (program, supervisor):
            process.kill()
            process.wait()
