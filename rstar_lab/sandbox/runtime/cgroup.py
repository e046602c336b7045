"""Control groups, version 1 or 2: bounds on the memory, processes and processor share of all of a call's processes."""

import contextlib
import os
import re
import time

CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
# Shares of the processor beside other work, where an ordinary process has 1024. A rollout waits for every call, so one of
# ours weighs as much as four of them. One that made room weighs less than the service itself, and in the background it takes
# what all others leave (idle, from Linux 5.15).
BACKGROUND, PREEMPTED, NORMAL, BOOSTED = 2, 512, 4096, 32768


def _write(folder: int, name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(folder: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def _own_paths() -> dict[str, str]:
    """Controller -> path of this process's group; the version 2 hierarchy has the name ''."""
    paths = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, names, path = line.rstrip("\n").split(":", 2)
            for name in names.split(","):
                paths[name] = path
    return paths


def _mounts() -> list[tuple[str, str, str, set[str]]]:
    """(type, root, mount point, options) of every mounted hierarchy."""
    found = []
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            left, right = line.rstrip("\n").split(" - ")
            kind, _, options = right.split(" ")[:3]
            if kind in ("cgroup", "cgroup2"):
                fields = left.split(" ")
                found.append((kind, fields[3], fields[4], set(options.split(","))))
    return found


def _folder(root: str, point: str, path: str) -> str:
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return os.path.join(point, inside.lstrip("/"))


class Group:
    """One group: a folder in each hierarchy (version 1) or one folder (version 2).

    above: folders in which children lie beside this group, not beneath it. In a processor's hierarchy of its own this lets
    a child's weight hold against all other work, not against its siblings alone: a call in the background, alone in its
    sandbox, would else have the weight of the whole sandbox.
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
        self._kills = 0
        self._cpu_base = 0.0
        self._out = self._back = -1
        self.in_background = False

    def child(self, name: str) -> "Group":
        """Make a group beneath this one."""
        folders: dict[str, int] = {}
        for controller, (folder, full) in self._child_folders(name).items():
            with contextlib.suppress(FileExistsError):
                os.mkdir(full, 0o755, dir_fd=folder)
            folders[controller] = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        return Group(self.version, folders)

    def _child_folders(self, child: str) -> dict[str, tuple[int, str]]:
        """Controller -> folder and name of a child there."""
        return {
            controller: (self.above[controller], f"{self.name}-{child}")
            if controller in self.above
            else (folder, child)
            for controller, folder in self.folders.items()
        }

    def remove(self, name: str) -> bool:
        """Remove a child; False while it still has processes."""
        for folder, full in set(self._child_folders(name).values()):
            try:
                os.rmdir(full, dir_fd=folder)
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Let go of its folders; the group stays."""
        for folder in set(self.folders.values()):
            os.close(folder)

    def join(self, background: "Group") -> None:
        """Move this process, a supervisor, in; it waits in `background` while its program is in the background.

        The ways there and back are opened now: a cgroup namespace of one's own shuts them.
        """
        for folder in set(self.folders.values()):
            _write(folder, "cgroup.procs", "0")
        self._out, self._back = background._open_procs_file(), self._open_procs_file()

    def _open_procs_file(self) -> int:
        """A file: who writes 0 to it moves under this group's weight (version 2: into all of it)."""
        # Version 1: one thread, itself, moves without the lock that every fork on the machine would wait for.
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.folders["cpu"])

    def enter_background(self) -> None:
        """Take what all others leave. The supervisor goes background: it has to end the others, and would get no processor for it.

        Raises OSError where the kernel does not let it go.
        """
        if not self.in_background:
            os.write(self._out, b"0")
            self.in_background = True
        self.set_weight(BACKGROUND)

    def leave_background(self) -> None:
        """The supervisor comes back, to fork the next program here."""
        self.set_weight(NORMAL)
        if self.in_background:
            os.write(self._back, b"0")
            self.in_background = False

    def limit(self, memory_mb: int, processes: int) -> None:
        if memory_mb != self._memory_mb:
            self._limit_memory(memory_mb)
            if self.version == 2 and not self._memory_mb:
                with contextlib.suppress(OSError):
                    _write(self.folders["memory"], "memory.swap.max", "0")
            self._memory_mb = memory_mb
        if processes != self._processes:
            _write(self.folders["pids"], "pids.max", str(processes))
            self._processes = processes

    def _limit_memory(self, memory_mb: int) -> None:
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        for left in range(100, -1, -1):
            try:
                _write(self.folders["memory"], name, str(memory_mb << 20))
                return
            except OSError:
                # The last call's files may still be on their way out.
                if not left:
                    raise
                time.sleep(0.005)

    def set_weight(self, weight: int) -> None:
        """Share of the processor beside other groups; an ordinary process has 1024."""
        if weight == self._weight:
            return
        # An idle group takes no shares. One that only shares would give its weight to a waking process late.
        with contextlib.suppress(OSError):
            _write(self.folders["cpu"], "cpu.idle", str(int(weight == BACKGROUND)))
        with contextlib.suppress(OSError) if weight == BACKGROUND else contextlib.nullcontext():
            if self.version == 1:
                _write(self.folders["cpu"], "cpu.shares", str(min(weight, 2**18)))
            else:
                _write(self.folders["cpu"], "cpu.weight", str(min(max(1, weight * 100 // 1024), 10_000)))
        self._weight = weight

    def start_accounting(self) -> None:
        """A call begins: count from here."""
        self._cpu_base = self._cpu()

    def cpu_s(self) -> float:
        """CPU seconds since `begin`."""
        return self._cpu() - self._cpu_base

    def _cpu(self) -> float:
        if self.version == 1:
            return int(_read(self.folders["cpuacct"], "cpuacct.usage")) / 1e9
        return int(_read(self.folders["cpuacct"], "cpu.stat").split()[1]) / 1e6

    def out_of_memory(self) -> bool:
        """Has the kernel killed a process of this group for its memory since the last question?"""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        match = re.search(r"^oom_kill (\d+)$", _read(self.folders["memory"], name), re.MULTILINE)
        kills = int(match[1]) if match else 0
        more, self._kills = kills > self._kills, kills
        return more

    def tasks(self) -> list[int]:
        """Threads in this group, as this process's PID namespace numbers them."""
        folder = next(iter(self.folders.values()))
        name = "tasks" if self.version == 1 else "cgroup.threads"
        return [int(line) for line in _read(folder, name).split()]


def _version_1(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """The folders of a new group, and those above it in the hierarchies that only share out the processor."""
    own = _own_paths()
    folders, above = {}, {}
    for kind, root, point, options in _mounts():
        for controller in CONTROLLERS:
            if kind == "cgroup" and controller in options and controller in own and controller not in folders:
                folder = os.path.join(_folder(root, point, own[controller]), name)
                with contextlib.suppress(OSError):
                    with contextlib.suppress(FileExistsError):  # two controllers in one hierarchy
                        os.mkdir(folder)
                    folders[controller] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    if controller.startswith("cpu") and not {"memory", "pids"} & options:
                        above[controller] = os.open(
                            os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                        )
    return folders, above


def _version_2(name: str) -> dict[str, int]:
    own = _own_paths().get("", "/")
    for kind, root, point, _ in _mounts():
        if kind != "cgroup2":
            continue
        parent = _folder(root, point, own).rstrip("/")
        # A group with processes cannot hand controllers down, so look upwards for one that can.
        while parent.startswith(point):
            folder = os.path.join(parent, name)
            try:
                at = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    _write(at, "cgroup.subtree_control", "+memory +pids +cpu")
                finally:
                    os.close(at)
                os.mkdir(folder)
            except OSError:
                parent = os.path.dirname(parent)
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _write(fd, "cgroup.subtree_control", "+memory +pids +cpu")
            except OSError:
                os.rmdir(folder)
                return {}
            return {controller: fd for controller in CONTROLLERS}
    return {}


def create(name: str) -> Group | None:
    """A group for a whole sandbox, beneath this process's own; None where this user may make none that bounds memory."""
    try:
        version, folders = 2, _version_2(name)
        above: dict[str, int] = {}
        if "memory" not in folders:
            version, (folders, above) = 1, _version_1(name)
    except OSError:
        return None
    group = Group(version, folders, name, above)
    if set(folders) != set(CONTROLLERS):
        destroy(group, name)
        return None
    return group


def destroy(group: Group, name: str) -> None:
    """Remove a sandbox's group with all beneath it. Its processes are gone."""
    for folder in set(group.above.values()):
        for entry in os.listdir(folder):
            if entry.startswith(f"{name}-"):
                with contextlib.suppress(OSError):
                    os.rmdir(entry, dir_fd=folder)
        os.close(folder)
    for folder in set(group.folders.values()):
        for child in os.listdir(folder):
            with contextlib.suppress(OSError):
                os.rmdir(child, dir_fd=folder)
        path = os.readlink(f"/proc/self/fd/{folder}")
        with contextlib.suppress(OSError):
            os.rmdir(path)
        os.close(folder)


def remove_stale_groups(prefix: str) -> None:
    """Remove groups that sandboxes left which were killed outright. Names end in `-<pid>` of the owner."""
    own = _own_paths()
    for kind, root, point, options in _mounts():
        names = [c for c in CONTROLLERS if c in options and c in own] if kind == "cgroup" else [""]
        for controller in names:
            parent = _folder(root, point, own.get(controller, "/"))
            with contextlib.suppress(OSError):
                for entry in os.listdir(parent):
                    owner = entry.removeprefix(prefix + "-").split("-")[0]
                    if not entry.startswith(prefix + "-") or os.path.exists(f"/proc/{owner}"):
                        continue
                    left = os.path.join(parent, entry)
                    with contextlib.suppress(OSError):
                        for child in os.listdir(left):
                            with contextlib.suppress(OSError):
                                os.rmdir(os.path.join(left, child))
                        os.rmdir(left)
