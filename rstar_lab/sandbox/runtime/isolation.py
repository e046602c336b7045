"""The isolation layers around a program. Zygotes set up some of them once; every forked program sets up the others."""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator

from rstar_lab.sandbox.runtime import kernel, landlock, procfs, rootfs, seccomp
from rstar_lab.sandbox.runtime.protocol import Request

# All layers, in the order in which `sandbox check` prints them.
LAYERS = (
    "cgroup", "pid_namespace", "mount_namespace", "network_namespace", "ipc_namespace", "uts_namespace",
    "user_namespace", "user_id", "private_proc", "landlock", "seccomp",
)  # fmt: skip
INSIDE_ID = 1000
# Timers and queued signals of one call.
PENDING_SIGNALS = 512
# Host user ids of programs: a range that systemd does not assign, or a small free one where few ids are mapped.
FIRST_UID, UIDS = 1_900_000_000, 5_000
FIRST_MAPPED_UID, MAPPED_UIDS = 60_578, 606
Missing = dict[str, str]


def _attempt(missing: Missing, layer: str, step: Callable[..., object], *arguments: object) -> bool:
    try:
        step(*arguments)
    except OSError as error:
        missing[layer] = error.strerror or str(error)
    return layer not in missing


def id_maps(inside: int, uid: int, gid: int) -> list[tuple[str, bytes]]:
    """Return (path, content) of the id maps of a process that has just entered a new user namespace. uid, gid: outside of it."""
    maps = [("setgroups", b"deny"), ("uid_map", b"%d %d 1" % (inside, uid)), ("gid_map", b"%d %d 1" % (inside, gid))]
    return [(f"/proc/self/{name}", text) for name, text in maps]


def create_pid_namespace(missing: Missing) -> bool:
    """Create the sandbox's PID namespace. Called in the launcher before it forks the first zygote.

    Layers that fail are added to `missing`. Returns whether programs can run under user ids of their own.
    """
    if _attempt({}, "", kernel.unshare, kernel.CLONE_NEWPID):
        return True
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID)
        for path, text in id_maps(0, uid, gid):
            kernel.write_file(path, text)
    except OSError as error:
        reason = f"user namespaces are refused ({error.strerror})"
        missing.update(dict.fromkeys(["private_proc", *(layer for layer in LAYERS if "namespace" in layer)], reason))
    return "private_proc" in missing and uid == 0


def create_namespaces(missing: Missing) -> None:
    """Create the other namespaces and the read-only root file system. Called in the first zygote before its imports."""
    if "pid_namespace" in missing:
        return
    _attempt(missing, "network_namespace", kernel.unshare, kernel.CLONE_NEWNET)
    _attempt(missing, "ipc_namespace", kernel.unshare, kernel.CLONE_NEWIPC)
    if _attempt(missing, "uts_namespace", kernel.unshare, kernel.CLONE_NEWUTS):
        _attempt({}, "", socket.sethostname, "sandbox")
    if not _attempt(missing, "mount_namespace", kernel.unshare, kernel.CLONE_NEWNS) or not _attempt(
        missing, "mount_namespace", rootfs.build
    ):
        missing.setdefault("private_proc", "requires the mount namespace")


def _is_mapped(uid: int) -> bool:
    """Return whether a user id exists in this process's user namespace."""
    with open("/proc/self/uid_map") as lines:
        ranges = [line.split() for line in lines]
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)


class Isolation:
    """Isolates the calling process, a fork of a supervisor, with every layer that is not missing."""

    def __init__(self, missing: Missing, root: bool, readable: list[str], scratch: str = "") -> None:
        """scratch: folder on the host for programs without a private file system."""
        self.missing = missing
        self.scratch = scratch
        self.root = root
        self._first_uid, self._uids = (
            (FIRST_UID, UIDS) if _is_mapped(FIRST_UID + UIDS) else (FIRST_MAPPED_UID, MAPPED_UIDS)
        )
        # The root file system contains only readable files, and only harmless devices in /dev.
        self._devices = ["/dev"] if self.has("mount_namespace") else [f"/dev/{name}" for name in rootfs.DEVICES]
        self._readable = ["/"] if self.has("mount_namespace") else readable
        self._rules: landlock.Rules | None = None
        self._filter: seccomp.Filter | None = None
        self._key: tuple[object, ...] = ()
        self._prepared: list[kernel.Step] = []

    def has(self, layer: str) -> bool:
        return layer not in self.missing

    def uid(self, number: int) -> int:
        """Return the host user id for programs of a supervisor. With separate ids the kernel's per-user limits are separate."""
        return self._first_uid + number % self._uids

    def prepare(self) -> None:
        """Prepare the rules and filters that all forks share. Called once, in the first zygote."""
        if self.has("pid_namespace"):
            self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        # 1 and not 0: the kernel ignores a limit of 0 if core_pattern is a pipe.
        _bound(resource.RLIMIT_CORE, 1)
        _bound(resource.RLIMIT_MSGQUEUE, 0)
        if not self.root:
            self.missing.setdefault("user_id", "programs run under the id of the user who started the sandbox")
        version = landlock.abi()
        writable = [rootfs.SCRATCH] if self.has("mount_namespace") else []
        if version:
            self._rules = landlock.Rules(version, self._readable, writable, self._devices)
            namespaces = self.has("pid_namespace") and self.has("network_namespace") and self.has("mount_namespace")
            if version < landlock.ABI_WITH_SCOPES and not namespaces:
                needed = landlock.ABI_WITH_SCOPES
                self.missing["landlock_abi"] = (
                    f"without namespaces ABI {needed} (Linux 6.12) is required; this kernel has ABI {version}"
                )
        else:
            self.missing.setdefault("landlock", "the kernel does not support Landlock")
        if seccomp.is_supported():
            self._filter = seccomp.Filter(kernel_memory=self.has("cgroup"))
        else:
            self.missing.setdefault("seccomp", "no filter for this architecture")

    def steps(self, request: Request, number: int, scratch: str, fd: int) -> list[kernel.Step]:
        """Return steps that apply all layers to a process, and close its descriptors from `fd` on.

        scratch: writable folder on the host, used if there is no mount namespace.
        """
        key = (request[1:], number, scratch, fd)
        if key != self._key or not self.has("cgroup"):  # without a control group, a limit depends on what else runs
            steps = self._steps(request, number, scratch, fd)
            self._key, self._prepared = key, [step for step in steps if step[0] == "other" or self.has(step[0])]
        return self._prepared

    def _steps(self, request: Request, number: int, scratch: str, fd: int) -> Iterator[kernel.Step]:
        libc = kernel.locked_libc
        yield kernel.closing(fd, landlock.FIRST_FD - 1)
        # If memory is short, the kernel then kills the program and not its supervisor.
        yield from kernel.writing("", "/proc/self/oom_score_adj", b"1000", fd)
        namespaces = kernel.CLONE_NEWNS | (kernel.CLONE_NEWIPC if self.has("ipc_namespace") else 0)
        yield "mount_namespace", libc.unshare, (namespaces,)
        flags, size = kernel.MS_NOSUID | kernel.MS_NODEV, b"size=%dm,nr_inodes=16384,mode=777" % (4 * request.file_mb)
        yield "mount_namespace", libc.mount, (b"scratch", rootfs.SCRATCH.encode(), b"tmpfs", flags, size)
        flags |= kernel.MS_NOEXEC
        yield "private_proc", libc.mount, (b"proc", b"/proc", b"proc", flags, b"hidepid=2,subset=pid")
        uid, gid = os.geteuid(), os.getegid()
        if self.root:
            uid = gid = self.uid(number)
            yield "user_id", os.setgroups, ([],)
            yield "user_id", os.setresgid, (gid, gid, gid)
            yield "user_id", os.setresuid, (uid, uid, uid)
        yield "user_namespace", libc.prctl, (kernel.PR_SET_DUMPABLE, 1, 0, 0, 0)
        yield "user_namespace", libc.unshare, (kernel.CLONE_NEWUSER,)
        for path, text in id_maps(INSIDE_ID, uid, gid):
            yield from kernel.writing("user_namespace", path, text, fd)
        if self.has("mount_namespace"):
            yield from rootfs.temporary()
            for folder in (rootfs.WORK, rootfs.SHARED_MEMORY):
                yield "mount_namespace", os.mkdir, (folder, 0o700)
            yield "mount_namespace", os.chdir, (rootfs.WORK,)
        else:
            yield "other", os.chdir, (scratch or "/",)
            yield "other", os.environ.update, ({"HOME": scratch, "TMPDIR": scratch},)
        for kind, limit in self._limits(request, uid):
            yield "other", resource.setrlimit, (kind, (limit, limit))
        yield "", os.setpriority, (os.PRIO_PROCESS, 0, 0 if self.root else 5)
        yield "other", libc.prctl, (kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        yield "other", libc.prctl, (kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # No capabilities.
        yield "other", libc.syscall, (kernel.SYS_CAPSET, struct.pack("=Ii", 0x20080522, 0), bytes(24))
        if self._rules:
            yield from self._rules.steps(scratch, fd)
        yield kernel.closing(fd)
        if self._filter:
            yield self._filter.step()

    def prepare_imports(self, request: Request) -> None:
        """Give a zygote a temporary file system of its own, for modules that write files when they are imported."""
        steps = self._steps(request, 0, "", landlock.FIRST_FD)
        kernel.run_steps(step for step in steps if step[0] == "mount_namespace" and self.has("mount_namespace"))

    def fork(self) -> tuple[int, int]:
        """Fork a child into a new PID namespace. Raises OSError.

        Returns the process ids of the namespace's init (0 without namespaces) and of the child (0 in the child).
        """
        if not self.has("pid_namespace"):
            return 0, kernel.fork()
        init, pid = kernel.new_pid_namespace(), -1
        namespace = os.pidfd_open(init)
        try:
            os.setpgid(init, init)
            kernel.setns(namespace, kernel.CLONE_NEWPID)
            pid = kernel.fork()
            return init, pid
        finally:
            os.close(namespace)
            if pid:
                kernel.setns(self._own_pid_namespace, kernel.CLONE_NEWPID)
            if pid < 0:
                kernel.kill_child(init)

    def new_scratch(self, number: int, previous: str) -> str:
        """Create a folder on the host's disk for a program without a private file system; remove `previous`."""
        import shutil

        shutil.rmtree(previous, ignore_errors=True)
        folder = f"{self.scratch}/{os.urandom(8).hex()}"
        os.mkdir(folder, 0o700)
        if self.root and self.has("user_id"):
            os.chown(folder, self.uid(number), -1)
        return folder

    def _limits(self, request: Request, uid: int) -> Iterator[tuple[int, int]]:
        """Yield the limits of a program as (kind, value)."""
        yield resource.RLIMIT_FSIZE, request.file_mb << 20
        yield resource.RLIMIT_NOFILE, request.open_files
        if self.has("user_namespace"):
            # Timers and queued signals count here and for the user who started the sandbox, whose limit all calls share.
            yield resource.RLIMIT_SIGPENDING, PENDING_SIGNALS
        if not self.has("cgroup"):
            others = 0 if self.has("user_namespace") else procfs.threads_of_user(uid) + 1
            yield resource.RLIMIT_NPROC, others + min(request.processes, 128)
            yield resource.RLIMIT_AS, (request.memory_mb + 1024) << 20
        elif self.has("user_namespace") and not request.session:
            # Not for sessions: their copies share the namespace. The control group limits each of them.
            yield resource.RLIMIT_NPROC, request.processes
        if not request.session:
            yield resource.RLIMIT_CPU, int(request.timeout_s) + 2


def _bound(kind: int, value: int) -> None:
    try:
        resource.setrlimit(kind, (value, value))
    except ValueError:
        pass  # above the hard limit, which then applies


def dry_run(isolation: Isolation, request: Request) -> Missing:
    """Fork a process, apply all layers in it, and return the layers that the machine refuses: name -> reason."""
    reading, writing = os.pipe()
    init, pid = isolation.fork()
    if pid == 0:
        try:
            os.dup2(writing, 3)
            steps = isolation.steps(request, 0, "", 4)
            kernel.run_steps(steps, lambda layer, error: os.write(3, f"{layer}\t{error}\n".encode()))
        except BaseException as error:
            os.write(3, f"other\t{error!r}\n".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    if init:
        kernel.kill_child(init)
    os.close(writing)
    text = os.read(reading, 65536)
    os.close(reading)
    return dict(line.split("\t", 1) for line in text.decode().splitlines() if "\t" in line)


def freeze_heap() -> None:
    """Prepare the memory of this process for forks: exclude all objects from garbage collection, disable it, use huge pages.

    Programs enable garbage collection again.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):
        kernel.libc.malloc_trim(0)
    gc.freeze()
    gc.disable()
    kernel.collapse_memory()
