"""Control groups (version 1 or 2): limit the memory, the number of processes and the CPU share of a call."""

import contextlib
import errno
import fcntl
import math
import os
import re
import time

from rstar_lab.sandbox.runtime import kernel, procfs

# Groups of a sandbox are named PREFIX-PID and PREFIX-PID-..., and locked while they are used (`lock_group`).
PREFIX = "rstar-lab-sandbox"
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
# CPU shares; an ordinary process has 1024. A call gets four times that, because rollouts wait for it. A preempted call gets less
# than the service. A background call runs only while no other process wants the CPU (cpu.idle, Linux 5.15 or later).
BACKGROUND, PREEMPTED, NORMAL, BOOSTED = 2, 512, 4096, 32768

# Period over which the kernel limits CPU time (its default, µs), and the smallest limit that it accepts.
PERIOD_US, LEAST_QUOTA_US = 100_000, 1000
# Seconds in which killed processes of a group must end.
KILL_S = 2.0
_CONTROL = b"+memory +pids +cpu"
MEMORY_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


# Files of version 2 that a supervisor writes. It opens them before it enters its own cgroup namespace (`Group.join`).
_WRITTEN_FILES = ("memory.max", "memory.swap.max", "pids.max", "cpu.weight", "cpu.idle", "cpu.max")


def _own_paths() -> dict[str, str]:
    """Return controller -> path of this process's group. The version 2 hierarchy has the key ''."""
    paths = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, names, path = line.rstrip("\n").split(":", 2)
            for name in names.split(","):
                paths[name] = path
    return paths


def _mounts() -> list[tuple[str, str, str, set[str]]]:
    """Return (type, root, mount point, options) of every mounted cgroup hierarchy."""
    mounts = []
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            left, right = line.rstrip("\n").split(" - ")
            kind, _, options = right.split(" ")[:3]
            if kind in ("cgroup", "cgroup2"):
                fields = left.split(" ")
                mounts.append((kind, fields[3], fields[4], set(options.split(","))))
    return mounts


def _folder(root: str, point: str, path: str) -> str:
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return os.path.join(point, inside.lstrip("/"))


def lock_group(folder: str, parent: int | None = None) -> int:
    """Create a folder if it does not exist, and return a descriptor. The group is in use while a process has a copy of it.

    Other users cannot open the folder, so they cannot lock it. parent: descriptor of the folder to which a relative path belongs.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o711, dir_fd=parent)
        with contextlib.suppress(FileNotFoundError):  # another process has removed the group before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                os.stat(folder, dir_fd=parent)
                return lock
            os.close(lock)


class Group:
    """A control group: a folder in each hierarchy (version 1) or one folder (version 2).

    above: controller -> folder of the parent. For these controllers, children of this group are created beside it. With a
    separate CPU hierarchy (version 1) the weight of a child then counts against all other work on the machine. If it were
    nested, a background call that runs alone would get the weight of the whole sandbox.
    """

    def __init__(
        self, version: int, folders: dict[str, int], name: str = "", above: dict[str, int] | None = None
    ) -> None:
        self.version = version
        self.folders = folders
        self.name = name
        self.above = above or {}
        self._memory_mb = self._processes = 0
        self._weight = 0
        self._cpus = 0.0
        self._kills = self._limit_hits = 0
        self._cpu_base = 0.0
        self._out = self._back = self._peak = -1
        self._entries: list[int] = []
        self._own_entries: list[int] = []
        self._open_files: dict[str, int] = {}
        self._read_files: dict[str, int] = {}
        self.in_background = self._supervisor_outside = False

    def child(self, name: str) -> "Group":
        """Create a child group, or open it if it exists."""
        found = self._child_folders(name)
        opened = {place: lock_group(place[1], place[0]) for place in set(found.values())}
        return Group(self.version, {controller: opened[place] for controller, place in found.items()})

    def _child_folders(self, child: str) -> dict[str, tuple[int, str]]:
        """Return controller -> (parent folder, name) of a child."""
        return {
            controller: (self.above[controller], f"{self.name}-{child}")
            if controller in self.above
            else (folder, child)
            for controller, folder in self.folders.items()
        }

    def remove(self, name: str) -> bool:
        """Remove a child group. Returns False if it still contains processes."""
        left = False
        for folder, full in set(self._child_folders(name).values()):
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(full, dir_fd=folder)
            except OSError:
                left = True
        return not left

    def close(self) -> None:
        """Close the folder descriptors; the group itself stays, and is stale if no other process uses it."""
        for fd in {*self.folders.values(), *self.above.values(), *self._read_files.values()}:
            os.close(fd)

    @property
    def own_processes(self) -> int:
        """Number of processes in this group that are not the program's: with version 2, the supervisor and the namespace's init."""
        return 0 if self.version == 1 else 2

    def join(self, supervisors: "Group") -> None:
        """Move this process, a supervisor, into the group.

        With version 1 only its CPU time counts in this group. It belongs to `supervisors`, so that the OOM killer of this group
        cannot choose it and its program cannot take its CPU time; its programs run `entering`. With version 2 it stays in this
        group for all controllers, because a move between groups waits for a lock of all forks; only oom_score_adj protects it.

        supervisors: group shared by all supervisors, to which a supervisor of version 2 moves while its program is a crowd or
        in the background. All files to write are opened now. After the process has entered its own cgroup namespace, others cannot
        be opened, and the kernel refuses writes to a limit if its file was opened in the namespace (mount option `nsdelegate`,
        which systemd sets).
        """
        if self.version == 1:
            kernel.write_file("cgroup.procs", b"0", self.folders["cpuacct"])
            for controller in ("memory", "pids", "cpu"):
                # `tasks` moves one thread, without the lock on `cgroup.procs` for which every fork on the machine waits.
                entry = os.open("tasks", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.folders[controller])
                self._own_entries.append(entry)
                kernel.write_file("cgroup.procs", b"0", supervisors.folders[controller])
            name = "memory.max_usage_in_bytes"
            self._open_files[name] = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.folders["memory"])
        else:
            kernel.write_file("cgroup.procs", b"0", self.folders["memory"])
            self._out, self._back = supervisors._open_procs_file(), self._open_procs_file()
            for name in _WRITTEN_FILES:
                # cpu.idle requires Linux 5.15; memory.swap.max requires swap accounting.
                with contextlib.suppress(FileNotFoundError):
                    self._open_files[name] = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.folders["memory"])
            with contextlib.suppress(OSError):  # a peak that can be reset: Linux 6.12
                self._peak = os.open("memory.peak", os.O_RDWR | os.O_CLOEXEC, dir_fd=self.folders["memory"])
        self._entries = [
            os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder) for folder in set(self.folders.values())
        ]

    def _write(self, controller: str, name: str, text: str) -> None:
        if name in self._open_files:
            os.pwrite(self._open_files[name], text.encode(), 0)
        else:
            kernel.write_file(name, text.encode(), self.folders[controller])

    def read(self, controller: str, name: str) -> str:
        """Return the content of a file, which stays open. Not for lists of processes: version 1 returns an old list then."""
        if name not in self._read_files:
            self._read_files[name] = os.open(name, os.O_RDONLY, dir_fd=self.folders[controller])
        return os.pread(self._read_files[name], 1 << 16, 0).decode()

    def entering(self) -> list[kernel.Step]:
        """Return the steps with which the process of a program, forked from its supervisor, moves itself into the group."""
        return [("cgroup", os.write, (entry, b"0")) for entry in self._own_entries]

    def add(self, pid: int) -> None:
        """Move a process into this group."""
        for entry in self._entries:
            os.write(entry, b"%d" % pid)

    def kill(self, kept: set[int]) -> None:
        """Kill the processes of this group that are not in `kept`, including those that they fork meanwhile."""
        deadline = time.monotonic() + KILL_S
        while (others := set(self.tasks()) - kept) and time.monotonic() < deadline:
            for task in others:
                procfs.kill(task)
            time.sleep(0.001)

    def _open_procs_file(self) -> int:
        """Open the file that moves a process into this group by writing 0."""
        return os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.folders["cpu"])

    def enter_background(self) -> None:
        """Give this group's processes only CPU time that no other process wants. Raises OSError if the kernel refuses."""
        self.move_supervisor_out()
        self.in_background = True
        self.set_weight(BACKGROUND)

    def move_supervisor_out(self) -> None:
        """Move the calling supervisor out of this group's CPU share, so that it gets enough CPU time to end the call.

        With version 1 it is always outside. Raises OSError.
        """
        if self.version == 2 and not self._supervisor_outside:
            os.write(self._out, b"0")
            self._supervisor_outside = True

    def leave_background(self) -> None:
        """Restore the normal weight and move the supervisor back, so that it forks the next program in this group."""
        self.set_weight(NORMAL)
        self.in_background = False
        if self._supervisor_outside:
            os.write(self._back, b"0")
            self._supervisor_outside = False

    def limit(self, memory_mb: int, processes: int) -> None:
        """Set the limits on memory (MiB) and on the number of processes and threads."""
        if memory_mb != self._memory_mb:
            self.limit_memory(memory_mb)
            if self.version == 2 and not self._memory_mb:
                with contextlib.suppress(OSError):
                    self._write("memory", "memory.swap.max", "0")
            self._memory_mb = memory_mb
        if processes != self._processes:
            self._write("pids", "pids.max", str(processes))
            self._processes = processes

    def limit_memory(self, memory_mb: int) -> None:
        """Set the limit on memory (MiB) of this group and the groups below it."""
        for attempts_left in range(100, -1, -1):
            try:
                self._write("memory", MEMORY_LIMIT[self.version], str(memory_mb << 20))
                return
            except OSError as error:
                # EBUSY: the kernel may still be freeing files of the previous call.
                if error.errno != errno.EBUSY or not attempts_left:
                    raise
                time.sleep(0.005)

    def boost_ending(self, *, killed: bool) -> None:
        """Raise the weight of a call that ends, so that its killed processes exit soon.

        killed: the sandbox has ended the call. Otherwise nothing is done if only the first process is left.
        """
        if killed or self._weight != NORMAL or int(self.read("pids", "pids.current")) > self.own_processes + 1:
            self.set_weight(BOOSTED)

    def set_weight(self, weight: int) -> None:
        """Set the CPU share relative to other groups; an ordinary process has 1024."""
        if weight == self._weight:
            return
        # cpu.idle, because a group with low shares alone yields to a waking process only after a delay.
        if BACKGROUND in (weight, self._weight):
            with contextlib.suppress(OSError):
                self._write("cpu", "cpu.idle", str(int(weight == BACKGROUND)))
        try:
            if self.version == 1:
                self._write("cpu", "cpu.shares", str(min(weight, 2**18)))
            else:
                self._write("cpu", "cpu.weight", str(min(max(1, weight * 100 // 1024), 10_000)))
        except OSError:
            if weight != BACKGROUND:  # the kernel refuses to change the weight of an idle group
                raise
        self._weight = weight

    def limit_cpus(self, cpus: float) -> None:
        """Limit the CPU seconds per second of all processes of this group. Has no effect on a kernel without CFS bandwidth control."""
        if cpus == self._cpus:
            return
        quota_us = max(LEAST_QUOTA_US, int(cpus * PERIOD_US))
        with contextlib.suppress(OSError):
            if self.version == 1:
                self._write("cpu", "cpu.cfs_quota_us", str(quota_us))
            else:
                self._write("cpu", "cpu.max", f"{quota_us} {PERIOD_US}")
        self._cpus = cpus

    def start_accounting(self) -> None:
        """Start counting CPU time for a new call."""
        self._cpu_base = self._cpu()
        with contextlib.suppress(OSError):
            if self.version == 1:
                self._write("memory", "memory.max_usage_in_bytes", "0")
            elif self._peak >= 0:
                os.pwrite(self._peak, b"0", 0)

    def cpu_s(self) -> float:
        """Return CPU seconds since `start_accounting`."""
        return self._cpu() - self._cpu_base

    def _cpu(self) -> float:
        if self.version == 1:
            return int(self.read("cpuacct", "cpuacct.usage")) / 1e9
        return int(self.read("cpuacct", "cpu.stat").split()[1]) / 1e6

    def out_of_memory(self) -> bool:
        """Return whether the OOM killer has killed a process of this group since the previous call of this method."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        # Called for every program: a regular expression would write to many pages that forks share.
        kills = int(f"\n{self.read('memory', name)}".partition("\noom_kill ")[2].partition("\n")[0] or 0)
        more, self._kills = kills > self._kills, kills
        return more

    def limit_was_reached(self, much_mb: float = math.inf) -> bool:
        """Return whether the group ran out of memory by its own use, and not because other groups filled the host or a parent.

        True if the group reached its limit since the previous call of this method. With version 1 or Linux 6.12 also if it has
        used half of its limit, or `much_mb` MiB.
        """
        if self._most_mb() >= min(self._memory_mb / 2, much_mb):
            return True
        if self.version == 1:
            hits = int(self.read("memory", "memory.failcnt"))
        else:
            match = re.search(r"^max (\d+)$", self.read("memory", "memory.events"), re.MULTILINE)
            hits = int(match[1]) if match else 0
        more, self._limit_hits = hits > self._limit_hits, hits
        return more

    def _most_mb(self) -> float:
        """Return the most memory (MiB) since `start_accounting`; -1 if the kernel cannot tell."""
        if self.version == 1:
            return int(self.read("memory", "memory.max_usage_in_bytes")) / 2**20
        return int(os.pread(self._peak, 32, 0)) / 2**20 if self._peak >= 0 else -1.0

    def tasks(self) -> list[int]:
        """Return the thread ids in this group, as seen in this process's PID namespace."""
        return self._ids("tasks" if self.version == 1 else "cgroup.threads")

    def processes(self) -> list[int]:
        """Return the process ids in this group, as seen in this process's PID namespace."""
        return self._ids("cgroup.procs")

    def _ids(self, name: str) -> list[int]:
        with open(os.open(name, os.O_RDONLY, dir_fd=next(iter(self.folders.values())))) as lines:
            return [int(line) for line in lines]


def _version_1(name: str) -> Group:
    """Create a group, in the hierarchies in which this user can."""
    own = _own_paths()
    folders, above = {}, {}
    for kind, root, point, options in _mounts():
        for controller in CONTROLLERS:
            if kind == "cgroup" and controller in options and controller in own and controller not in folders:
                parent = _folder(root, point, own[controller])
                with contextlib.suppress(OSError):
                    folders[controller] = lock_group(os.path.join(parent, name))
                    if controller.startswith("cpu") and not {"memory", "pids"} & options:
                        above[controller] = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return Group(1, folders, name, above)


def _version_2(name: str) -> Group | None:
    """Create a group; return None if no parent group allows it."""
    own = _own_paths().get("", "/")
    for root, point in [(root, point) for kind, root, point, _ in _mounts() if kind == "cgroup2"]:
        parent = _folder(root, point, own).rstrip("/")
        # A group that contains processes cannot enable controllers for children; search upwards for one that can.
        while parent.startswith(point):
            with contextlib.suppress(OSError):
                kernel.write_file(f"{parent}/cgroup.subtree_control", _CONTROL)
                folder = lock_group(f"{parent}/{name}")
                group = Group(2, dict.fromkeys(CONTROLLERS, folder), name)
                with contextlib.suppress(OSError):
                    kernel.write_file("cgroup.subtree_control", _CONTROL, folder)
                    return group
                destroy(group)
                return None
            parent = os.path.dirname(parent)
    return None


def create(name: str) -> Group | None:
    """Create the group of a sandbox below that of this process. Returns None if this user cannot create one with all controllers."""
    with contextlib.suppress(OSError):
        group = _version_2(name) or _version_1(name)
        if set(group.folders) == set(CONTROLLERS):
            return group
        destroy(group)
    return None


def destroy(group: Group) -> None:
    """Remove a sandbox's group and its children, which must have no processes left."""
    group.close()
    remove_stale_groups()


def remove_stale_groups() -> None:
    """Remove the groups of sandboxes that were killed."""
    own = _own_paths()
    for kind, root, point, options in _mounts():
        names = [c for c in CONTROLLERS if c in options and c in own] if kind == "cgroup" else [""]
        parents = [_folder(root, point, own.get(controller, "/")).rstrip("/") for controller in names]
        if kind == "cgroup2":  # `_version_2` creates the group in the first of these that allows it
            while parents[-1].startswith(f"{point.rstrip('/')}/"):
                parents.append(os.path.dirname(parents[-1]))
        for parent in parents:
            with contextlib.suppress(OSError):
                for name in os.listdir(parent):
                    if name.startswith(f"{PREFIX}-"):
                        _remove(f"{parent}/{name}")


def _remove(folder: str) -> None:
    """Remove a group that no process uses and its children, as far as they contain no processes."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for child in [f"{folder}/{name}" for name in os.listdir(folder)] + [folder]:
            with contextlib.suppress(OSError):
                os.rmdir(child)
