"""Linux system calls that Python's standard library does not have. They raise OSError."""

import _signal
import contextlib
import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

CLONE_VM = 0x100
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NAMESPACES = 0x7E020000  # all of these

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

MADV_COLLAPSE = 25
HUGE_PAGE = 2 << 20

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

# Numbers of system calls without a libc wrapper. Only the first two depend on the architecture.
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(platform.machine(), -1)
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(platform.machine(), -1)
SYS_CLOSE_RANGE = 436
SYS_PIDFD_GETFD = 438
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446

# signal.signal also converts its arguments and its result to enums, which writes to about 30 pages that forks share.
set_signal_handler = _signal.signal
libc = ctypes.CDLL(None, use_errno=True)
# Calls through PyDLL keep the interpreter's lock, so that a child of `fork` holds it too.
locked_libc = ctypes.PyDLL(None, use_errno=True)
# Missing in older gVisor releases. os.closerange does not use it if Python was built with an old glibc.
_HAS_CLOSE_RANGE = libc.syscall(SYS_CLOSE_RANGE, 0x7FFFFFFF, 0x7FFFFFFF, 0) == 0
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
libc.syscall.restype = ctypes.c_long
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]

# A step that isolates a program: its layer, a function in C, and its arguments. Layer "other": always needed; "": may fail.
Step = tuple[str, Callable[..., Any], tuple[Any, ...]]


def _checked(result: int, name: str, path: bytes = b"") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {os.fsdecode(path)}".rstrip() + f": {os.strerror(number)}")
    return result


def fork() -> int:
    """Fork without Python's at-fork handlers, which write to about 110 shared pages; return 0 in the child.

    The caller seeds `random` for it. A process with several threads is forked with `os.fork`, because the handlers reset locks
    that another thread can hold.
    """
    if threading.active_count() > 1:
        return os.fork()
    return _checked(locked_libc.fork(), "fork")


def collapse_memory() -> None:
    """Move the private memory of this process to huge pages as far as the kernel can. A fork then copies a page table entry per 2 MiB.

    Has no effect before Linux 6.1.
    """
    with open("/proc/self/maps") as file:
        mappings = [line.split()[:5] for line in file]
    for addresses, access, *_, inode in mappings:
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access == "rw-p" and inode == "0" and start < end:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def unshare(flags: int) -> None:
    _checked(libc.unshare(flags), "unshare")


def run_steps(steps: Iterable[Step], report: Callable[[str, Exception], object] | None = None) -> None:
    """Call the functions of `steps` in turn. A negative result of a C function is an error.

    report: called with (layer, error) for a step that fails; the other steps of its layer are skipped. Without it the first
    failure raises OSError. Failures of steps without a layer are ignored.

    A program, a fork, copies every page that it writes to, which takes as long as several system calls. So a supervisor prepares
    the steps that isolate its programs, and a program runs no other code for them.
    """
    failed = set()
    for layer, function, arguments in steps:
        if layer in failed:
            continue
        try:
            if (function(*arguments) or 0) < 0:
                raise OSError(number := ctypes.get_errno(), os.strerror(number))
        except (OSError, ValueError) as error:  # ValueError: a limit above the hard limit, which then applies
            if not layer or isinstance(error, ValueError):
                continue
            if report is None:
                raise
            report(layer, error)
            failed.add(layer)


def closing(first: int, last: int = 0x7FFFFFFF) -> Step:
    """Return the step that closes the descriptors from `first` to `last`."""
    if _HAS_CLOSE_RANGE:
        return "other", locked_libc.syscall, (SYS_CLOSE_RANGE, first, last, 0)
    return "other", os.closerange, (first, min(last + 1, os.sysconf("SC_OPEN_MAX")))


def writing(layer: str, path: str, data: bytes, fd: int) -> list[Step]:
    """Return steps that write an existing file. fd: the lowest free descriptor at that time."""
    return [(layer, os.open, (path, os.O_WRONLY)), (layer, os.write, (fd, data)), (layer, os.close, (fd,))]


def setns(fd: int, kind: int) -> None:
    _checked(libc.setns(fd, kind), "setns")


def prctl(option: int, value: int = 0, pointer: int = 0) -> int:
    return _checked(libc.prctl(option, value, pointer, 0, 0), "prctl")


def mount(source: bytes, target: bytes, kind: bytes | None = None, flags: int = 0, data: bytes | None = None) -> None:
    _checked(libc.mount(source, target, kind, flags, data), "mount", target)


def unmount(target: bytes, flags: int = MNT_DETACH) -> None:
    _checked(libc.umount2(target, flags), "umount", target)


def pivot_root(new: bytes, old: bytes) -> None:
    _checked(libc.syscall(SYS_PIVOT_ROOT, new, old), "pivot_root")


def mount_setattr(path: bytes, set_flags: int) -> None:
    """Set flags (MS_RDONLY, MS_NOSUID, MS_NODEV) on a mount and on all mounts below it."""
    attributes = struct.pack("=QQQQ", set_flags, 0, 0, 0)
    at_fdcwd, recursive = -100, 0x8000
    _checked(libc.syscall(SYS_MOUNT_SETATTR, at_fdcwd, path, recursive, attributes, len(attributes)), "mount_setattr")


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Return a duplicate of another process's descriptor."""
    return _checked(libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0), "pidfd_getfd")


def write_file(path: str, data: bytes, folder: int | None = None) -> None:
    """Write an existing file. folder: descriptor of the folder to which a relative path belongs."""
    fd = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def kill_child(pid: int) -> None:
    """Kill a child of this process and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def end_descriptor(child: int) -> int:
    """Return a descriptor that becomes readable when a child of this process ends: a pidfd if the kernel supports it."""
    try:
        return os.pidfd_open(child)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    # Older gVisor releases do not support pidfd_open.
    reading, writing = os.pipe2(os.O_CLOEXEC)

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.close(writing)

    threading.Thread(target=wait, daemon=True).start()
    return reading


def run_and_exit(action: Callable[..., None], *arguments: Any) -> NoReturn:
    """Run `action` in a forked process and exit. Prints the traceback of an exception to stderr."""
    try:
        action(*arguments)
    except BaseException:
        import traceback

        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()  # type: ignore[union-attr]
    finally:
        os._exit(1)


# A private mapping: a program is a fork with the same mappings, and could otherwise overwrite the return addresses of every init.
_STUB_STACK = mmap.mmap(-1, 16384, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
_STUB_STACK_TOP = ctypes.addressof(ctypes.c_char.from_buffer(_STUB_STACK)) + 16384 - 64
_PAUSE = ctypes.cast(libc.pause, ctypes.c_void_p)


def new_pid_namespace() -> int:
    """Create a PID namespace; return the process id of its init. Killing the init kills every process in the namespace.

    The init shares this process's memory (CLONE_VM) and sleeps in pause(2), so it needs no page tables. Programs join
    the namespace as siblings of the init and keep ordinary signal semantics, which process 1 does not have. All inits
    use one stack, because only pause runs on it. The caller must not have signal handlers, which would end the pause.
    The init ignores SIGCHLD, so that orphans are reaped.
    """
    set_signal_handler(_signal.SIGCHLD, _signal.SIG_IGN)
    init = libc.clone(_PAUSE, _STUB_STACK_TOP, CLONE_VM | CLONE_NEWPID | signal.SIGCHLD, None)
    set_signal_handler(_signal.SIGCHLD, _signal.SIG_DFL)
    return _checked(init, "clone")
