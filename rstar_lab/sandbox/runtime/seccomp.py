"""Which system calls a program may make: an allowlist, as a classic BPF filter built without a library.

Left out, among others: mount, unshare, setns, pivot_root, chroot, ptrace, process_vm_*, io_uring, bpf, perf_event_open,
userfaultfd, keyctl, set*id, capset, set*xattr, setpriority and sched_set* (a program must not be able to starve itself
and have that taken for our load), msg* queues, inotify, vmsplice, execveat, personality, mlock, quotactl, syslog, time
setting, modules, kexec and reboot.
"""

import ctypes
import platform
import struct
import sys

from rstar_lab.sandbox.runtime import kernel

# Allowed whatever their arguments.
_ALLOWED = {
    "x86_64": "0-15,17-40,42-55,57-67,72-100,102,104,107-112,115,118,120-121,124,127-128,130-133,137-138,140,143,145-148,"
    "158,160,186,200-204,213,217-226,228-235,239,247,257-271,273-277,280-293,295-296,299,302,307,309,316,318-319,324,"
    "326-328,332,334,424,434,436-437,439,441,452",
    "aarch64": "17,19-25,32-38,43-50,52-57,59,61-74,76-80,82-88,93-96,98-103,107-111,113-115,120-137,139,141,148,150,"
    "153-158,160,163-166,168-169,172-179,190-197,199-212,214-216,221-223,226-227,232-233,236,242-243,260-261,269,276,"
    "278-279,283,285-287,291,293,424,434,436-437,439,441,452",
}
# socket, clone, prctl, ioctl: allowed for some arguments; clone3 hides its flags in memory, so libc must fall back.
_CHECKED = {"x86_64": (41, 56, 157, 16), "aarch64": (198, 220, 167, 29)}
_CLONE3 = 435
_LAST = 460
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOTTY, _ENOSYS, _EAFNOSUPPORT = 1, 25, 38, 97
_LOAD, _RETURN, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45

_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
_AF_UNIX = 1
# PR_GET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, GET_SECCOMP, CAPBSET_READ, GET_TIMERSLACK, GET_NO_NEW_PRIVS, SET_VMA
_PRCTL = (2, 3, 15, 16, 21, 23, 30, 39, 0x53564D41)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

Instruction = tuple[int, int, int, int]


def _errno(number: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, 0x50000 | number)]


def _allow() -> list[Instruction]:
    return [(_RETURN, 0, 0, _ALLOW)]


def _argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index)


def _one_of(index: int, values: tuple[int, ...], errno: int) -> list[Instruction]:
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, *_errno(errno), *_allow()]


def _ranges(text: str) -> list[tuple[int, int]]:
    pairs = (part.partition("-") for part in text.split(","))
    return [(int(low), int(high or low)) for low, _, high in pairs]


def build(machine: str) -> bytes:
    """The filter's instructions, as struct sock_filter. Raises KeyError for a machine it does not know."""
    socket, clone, prctl, ioctl = _CHECKED[machine]
    blocks: dict[int, list[Instruction]] = {0: _errno(_EPERM), _LAST + 1: _errno(_ENOSYS), 0x40000000: _errno(_EPERM)}
    exact = {
        socket: _one_of(0, (_AF_UNIX,), _EAFNOSUPPORT),
        clone: [_argument(0), (_JUMP_ANY_BIT, 0, 1, _NAMESPACES), *_errno(_EPERM), *_allow()],
        prctl: _one_of(0, _PRCTL, _EPERM),
        ioctl: _one_of(1, _IOCTL, _ENOTTY),
        _CLONE3: _errno(_ENOSYS),
    }
    for low, high in _ranges(_ALLOWED[machine]):
        blocks[low] = _allow()
        blocks.setdefault(high + 1, _errno(_EPERM))
    for number, block in exact.items():
        after = max(start for start in blocks if start <= number)
        blocks.setdefault(number + 1, blocks[after])
        blocks[number] = block
    starts = sorted(blocks)

    def search(low: int, high: int) -> list[Instruction]:
        """Binary search, so that the kernel's own walk over all numbers at installation stays short."""
        if high - low == 1:
            return blocks[starts[low]]
        middle = (low + high) // 2
        left, right = search(low, middle), search(middle, high)
        if len(left) < 256:
            return [(_JUMP_AT_LEAST, len(left), 0, starts[middle]), *left, *right]
        return [(_JUMP_AT_LEAST, 0, 1, starts[middle]), (0x05, 0, 0, len(left)), *left, *right]

    head: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    program = head + search(0, len(starts))
    return b"".join(struct.pack("=HBBI", code, yes, no, k) for code, yes, no, k in program)


class Filter:
    """A filter ready to be installed by many forks."""

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in _ALLOWED or sys.maxsize < 2**32:
            raise OSError(f"no filter for {machine}")
        program = build(machine)
        self._code = ctypes.create_string_buffer(program, len(program))
        self._header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(self._code)))

    def install(self) -> None:
        """For this process and all it starts; no_new_privs must be set."""
        kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.addressof(self._header))
