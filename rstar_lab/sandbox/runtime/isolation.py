"""The isolation layers around a program. Zygotes set up some of them once; every forked program sets up the others."""

import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable

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
Report = Callable[[str, OSError], object]


def _attempt(missing: Missing, layer: str, step: Callable[..., object], *arguments: object) -> bool:
    try:
        step(*arguments)
    except OSError as error:
        missing[layer] = error.strerror or str(error)
    return layer not in missing


def map_ids(inside: int, outside_uid: int, outside_gid: int) -> None:
    """Write the id maps of this process, which has just entered a new user namespace."""
    kernel.write_file("/proc/self/setgroups", b"deny")
    kernel.write_file("/proc/self/uid_map", b"%d %d 1" % (inside, outside_uid))
    kernel.write_file("/proc/self/gid_map", b"%d %d 1" % (inside, outside_gid))


def create_pid_namespace(missing: Missing) -> bool:
    """Create the sandbox's PID namespace. Called in the launcher before it forks the first zygote.

    Layers that fail are added to `missing`. Returns whether programs can run under user ids of their own.
    """
    if _attempt({}, "", kernel.unshare, kernel.CLONE_NEWPID):
        return True
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID)
        map_ids(0, uid, gid)
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

    def has(self, layer: str) -> bool:
        return layer not in self.missing

    def uid(self, number: int) -> int:
        """Return the host user id for programs of a supervisor. With separate ids the kernel's per-user limits are separate."""
        return self._first_uid + number % self._uids

    def prepare(self) -> None:
        """Prepare the rules and filters that all forks share. Called once, in the first zygote."""
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

    def enter(
        self,
        request: Request,
        number: int,
        scratch: str = "",
        first_fd: int = 0,
        report: Report | None = None,
    ) -> None:
        """Apply all layers to this process.

        scratch: writable folder on the host, used if there is no mount namespace. first_fd: close descriptors from here on.
        report: called with (layer, error) for a layer that fails. Without it the first failure raises OSError.
        """
        with contextlib.suppress(OSError):  # the OOM killer kills programs before their supervisor
            kernel.write_file("/proc/self/oom_score_adj", b"1000")
        flags = kernel.CLONE_NEWIPC if self.has("ipc_namespace") else 0
        self._apply(report, "mount_namespace", self._scratch, request, flags)
        self._apply(report, "private_proc", self._proc)
        uid = gid = self.uid(number)
        if self.root:
            self._apply(report, "user_id", self._drop_ids, uid, gid)
        else:
            uid, gid = os.geteuid(), os.getegid()
        self._apply(report, "user_namespace", self._user_namespace, uid, gid)
        if self.has("mount_namespace"):
            self._make_folders()
        else:
            os.chdir(scratch or "/")
            os.environ["HOME"] = os.environ["TMPDIR"] = scratch
        self._resources(request)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0 if self.root else 5)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
        if self._rules is not None:
            self._apply(report, "landlock", self._rules.enforce, scratch)
        if first_fd:
            kernel.close_from(first_fd)
        if self._filter is not None:
            self._apply(report, "seccomp", self._filter.install)

    def _apply(self, report: Report | None, layer: str, action: Callable[..., object], *arguments: object) -> None:
        """Apply one layer if it is not missing; `report` is that of `enter`."""
        if not self.has(layer):
            return
        try:
            action(*arguments)
        except OSError as error:
            if report is None:
                raise
            report(layer, error)

    def new_scratch(self, number: int, previous: str) -> str:
        """Create a folder on the host's disk for a program without a private file system; remove `previous`."""
        import shutil

        shutil.rmtree(previous, ignore_errors=True)
        folder = f"{self.scratch}/{os.urandom(8).hex()}"
        os.mkdir(folder, 0o700)
        if self.root and self.has("user_id"):
            os.chown(folder, self.uid(number), -1)
        return folder

    def prepare_imports(self, request: Request) -> None:
        """Give a zygote a temporary file system of its own, for modules that write files when they are imported."""
        if self.has("mount_namespace"):
            self._scratch(request, 0)
            self._make_folders()

    def _make_folders(self) -> None:
        rootfs.make_temporary()
        for folder in (rootfs.WORK, rootfs.SHARED_MEMORY):
            os.mkdir(folder, 0o700)
        os.chdir(rootfs.WORK)

    def _scratch(self, request: Request, flags: int) -> None:
        kernel.unshare(kernel.CLONE_NEWNS | flags)
        size = f"size={4 * request.file_mb}m,nr_inodes=16384,mode=777"
        kernel.mount(b"scratch", rootfs.SCRATCH.encode(), b"tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size.encode())

    def _proc(self) -> None:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount(b"proc", b"/proc", b"proc", flags, b"hidepid=2,subset=pid")

    def _drop_ids(self, uid: int, gid: int) -> None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)

    def _user_namespace(self, uid: int, gid: int) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.unshare(kernel.CLONE_NEWUSER)
        map_ids(INSIDE_ID, uid, gid)

    def _resources(self, request: Request) -> None:
        _bound(resource.RLIMIT_FSIZE, request.file_mb << 20)
        _bound(resource.RLIMIT_NOFILE, request.open_files)
        if self.has("user_namespace"):
            # Timers and queued signals count here and for the user who started the sandbox, whose limit all calls share.
            _bound(resource.RLIMIT_SIGPENDING, PENDING_SIGNALS)
        if not self.has("cgroup"):
            others = 0 if self.has("user_namespace") else procfs.threads_of_user(os.geteuid())
            _bound(resource.RLIMIT_NPROC, others + min(request.processes, 128))
            _bound(resource.RLIMIT_AS, (request.memory_mb + 1024) << 20)
        elif self.has("user_namespace") and not request.session:
            # Not for sessions: their copies share the namespace. The control group limits each of them.
            _bound(resource.RLIMIT_NPROC, request.processes)
        if not request.session:
            _bound(resource.RLIMIT_CPU, int(request.timeout_s) + 2)


def _bound(kind: int, value: int) -> None:
    try:
        resource.setrlimit(kind, (value, value))
    except ValueError:
        pass  # above the hard limit, which then applies. Not `suppress`: every call does this six times


def dry_run(isolation: Isolation, request: Request) -> Missing:
    """Fork a process, apply all layers in it, and return the layers that the machine refuses: name -> reason."""
    reading, writing = os.pipe()
    init = kernel.new_pid_namespace() if isolation.has("pid_namespace") else 0
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    pid = fork_into(init, own)
    if pid == 0:
        try:
            isolation.enter(request, 0, "", 0, lambda layer, error: os.write(writing, f"{layer}\t{error}\n".encode()))
            os.write(writing, b".")
        except BaseException as error:
            os.write(writing, f"other\t{error!r}\n".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    if init:
        kernel.kill_child(init)
    os.close(own)
    os.close(writing)
    text = os.read(reading, 65536)
    os.close(reading)
    return dict(line.split("\t", 1) for line in text.decode().splitlines() if "\t" in line)


def fork_into(init: int, own: int) -> int:
    """Fork a child into the PID namespace of `init`; return its pid, or 0 in the child.

    init: process id of the namespace's init; 0 forks in the current namespace. own: descriptor of the current namespace.
    """
    if not init:
        return kernel.fork()
    namespace = os.pidfd_open(init)
    try:
        kernel.setns(namespace, kernel.CLONE_NEWPID)
        pid = kernel.fork()
        if pid:
            kernel.setns(own, kernel.CLONE_NEWPID)
        return pid
    finally:
        os.close(namespace)


def freeze_heap() -> None:
    """Exclude all objects from garbage collection and disable it, so that forks share pages. Programs enable it again."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        kernel.libc.malloc_trim(0)
    gc.freeze()
    gc.disable()
