"""Seccomp filter: an allowlist of system calls by name, compiled to classic BPF without a library.

A call that is not on the list fails with EPERM; a call that is newer than the list fails with ENOSYS.
"""

import ctypes
import platform
import struct
import sys

from rstar_lab.sandbox.runtime import kernel
from rstar_lab.sandbox.runtime.syscalls import ALLOWED, NUMBERS

_LAST = 460
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}

_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x50000
_SUCCESS, _EPERM, _ENOMEM, _EINVAL, _ENOTTY, _ENOSYS, _EAFNOSUPPORT = 0, 1, 12, 22, 25, 38, 97
_LOAD, _RETURN, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45

_CLONE_FILES, _CLONE_VFORK, _CLONE_THREAD = 0x400, 0x4000, 0x10000
_CLOSE_RANGE_UNSHARE = 0x2
# CLONE_PARENT makes children that the program's supervisor would have to reap; CLONE_PTRACE hands over the tracer.
_CLONE_REFUSED = 0x8000 | 0x2000 | kernel.CLONE_NAMESPACES
_AF_UNIX = 1
# PR_GET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, GET_SECCOMP, CAPBSET_READ, GET_TIMERSLACK, GET_NO_NEW_PRIVS, SET_VMA
_PRCTL = (2, 3, 15, 16, 21, 23, 30, 39, 0x53564D41)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK, OFD_GETLK, DUPFD_CLOEXEC, SETPIPE_SZ, GETPIPE_SZ, ADD_SEALS, GET_SEALS.
# Not F_NOTIFY, F_SETLEASE and F_SETSIG, which report how other processes use files of the host.
_FCNTL = (0, 1, 2, 3, 4, 5, 36, 1030, 1031, 1032, 1033, 1034)
_F_SETPIPE_SZ = 1031
# F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW: locks on files of the read-only root file system are visible to all calls.
_FCNTL_LOCKS = (6, 7, 37, 38)
_RLIMIT_CORE = 4
# QUERY, PRIVATE_EXPEDITED, PRIVATE_EXPEDITED_SYNC_CORE and _RSEQ with their registrations. Not GLOBAL, which waits for all CPUs.
_MEMBARRIER = (0, 8, 16, 32, 64, 128, 256)
# SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF
_SOCKET_FILTERS = (26, 50, 51, 52)
# SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE
_SOCKET_BUFFERS = (7, 8, 32, 33)
_S_IFIFO = 0x1000
_MSG_OOB, _MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x1, 0x40000, 0x4, 0o4000

Instruction = tuple[int, int, int, int]
_SKIP: Instruction = (0x05, 0, 0, 1)


def _errno(number: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, _ERROR | number)]


def _allow() -> list[Instruction]:
    return [(_RETURN, 0, 0, _ALLOW)]


def _argument(index: int, *, high: bool = False) -> Instruction:
    """Load the low (or high) 32 bits of an argument."""
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def _tests(values: tuple[int, ...]) -> list[Instruction]:
    """Skip the instruction that follows the tests if the loaded argument is one of the values."""
    return [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]


def _allow_values(index: int, values: tuple[int, ...], errno: int) -> list[Instruction]:
    return [_argument(index), *_tests(values), *_errno(errno), *_allow()]


def _refuse_values(index: int, values: tuple[int, ...], errno: int) -> list[Instruction]:
    return [_argument(index), *_tests(values), *_allow(), *_errno(errno)]


def _refuse_bits(index: int, mask: int, errno: int) -> list[Instruction]:
    return [_argument(index), (_JUMP_ANY_BIT, 0, 1, mask), *_errno(errno), *_allow()]


def _fcntl() -> list[Instruction]:
    """Allow some commands; report success for locks without taking them."""
    commands = _allow_values(1, _FCNTL, _EINVAL)
    return [commands[0], *_tests(_FCNTL_LOCKS), _SKIP, *_errno(_SUCCESS), *commands[1:]]


def _clone() -> list[Instruction]:
    """Refuse namespaces, CLONE_PARENT, and two kinds of threads: with CLONE_VFORK (the creator waits in uninterruptible sleep), and
    without CLONE_FILES (the supervisor counts only the descriptors that the threads of a process share)."""
    return [
        *_refuse_bits(0, _CLONE_REFUSED, _EPERM)[:-1],
        (_JUMP_ANY_BIT, 0, 3, _CLONE_THREAD),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_VFORK),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_FILES),
        *_errno(_EPERM),
        *_allow(),
    ]


def _prlimit() -> list[Instruction]:
    """Ignore a new core limit. RLIMIT_CORE of 1 is the only value that also stops dumps to a piped core_pattern."""
    return [
        _argument(1),
        (_JUMP_EQUAL, 0, 5, _RLIMIT_CORE),
        _argument(2),
        (_JUMP_EQUAL, 0, 2, 0),
        _argument(2, high=True),
        (_JUMP_EQUAL, 1, 0, 0),
        *_errno(_SUCCESS),
        *_allow(),
    ]


def _argument_rules() -> dict[str, list[Instruction]]:
    """Return name -> instructions of the system calls that are allowed or refused depending on their arguments."""
    no_oob = {"sendto": 3, "recvfrom": 3, "sendmsg": 2, "recvmsg": 2, "sendmmsg": 3, "recvmmsg": 3}
    return {
        "socket": _allow_values(0, (_AF_UNIX,), _EAFNOSUPPORT),
        "socketpair": _allow_values(0, (_AF_UNIX,), _EAFNOSUPPORT),
        "setsockopt": _refuse_values(2, _SOCKET_FILTERS, _EPERM),
        **{name: _refuse_bits(flags, _MSG_OOB, _EINVAL) for name, flags in no_oob.items()},
        "clone": _clone(),
        "close_range": _refuse_bits(2, _CLOSE_RANGE_UNSHARE, _EINVAL),  # see `_clone`
        "clone3": _errno(_ENOSYS),  # a filter cannot read its flags, which are in memory; libc falls back to clone
        "prctl": _allow_values(0, _PRCTL, _EPERM),
        "ioctl": _allow_values(1, _IOCTL, _ENOTTY),
        "fcntl": _fcntl(),
        "flock": _errno(_SUCCESS),
        # All writable files are in memory. On a read-only file of the host, these calls would wait for its disk.
        **dict.fromkeys(("fsync", "fdatasync", "sync_file_range", "msync"), _errno(_SUCCESS)),
        "membarrier": _allow_values(0, _MEMBARRIER, _EINVAL),
        "setrlimit": _refuse_values(0, (_RLIMIT_CORE,), _SUCCESS),
        "prlimit64": _prlimit(),
        # Huge pages are not charged to the memory control group.
        "mmap": _refuse_bits(3, _MAP_HUGETLB, _ENOMEM),
        "memfd_create": _refuse_bits(1, _MFD_HUGETLB, _ENOMEM),
        "shmget": _refuse_bits(2, _SHM_HUGETLB, _ENOMEM),
    }


def allowed_numbers(machine: str) -> set[int]:
    """Return the numbers of the calls that are allowed with any arguments."""
    column = COLUMN[machine]
    return {
        number for group in ALLOWED.values() for numbers in group.values() if (number := numbers[column]) is not None
    }


def _without_kernel_memory(column: int) -> dict[int, list[Instruction]]:
    """Return number -> instructions of the calls that would take memory that only a control group counts.

    Files in memory that no process has mapped, semaphores of System V (up to 4 MB a set) and named pipes are refused. The buffers
    of pipes and sockets keep their default size.
    """
    rules = {
        "memfd_create": _errno(_ENOSYS),
        "shmget": _errno(_ENOSYS),
        "semget": _errno(_ENOSYS),
        # The buffers of named pipes cannot be counted.
        "mknod": _refuse_bits(1, _S_IFIFO, _EPERM),
        "mknodat": _refuse_bits(2, _S_IFIFO, _EPERM),
        "fcntl": [_argument(1), (_JUMP_EQUAL, 0, 1, _F_SETPIPE_SZ), *_errno(_EPERM), *_fcntl()],
        "setsockopt": [
            _argument(2),
            *_tests(_SOCKET_BUFFERS),
            _SKIP,
            *_errno(_SUCCESS),
            *_refuse_values(2, _SOCKET_FILTERS, _EPERM),
        ],
    }
    numbers = {name: NUMBERS[name][column] for name in rules}
    return {number: rules[name] for name, number in numbers.items() if number is not None}


def build(machine: str, *, kernel_memory: bool = True) -> bytes:
    """Return the filter's instructions as an array of struct sock_filter. Raises KeyError for an unknown machine.

    kernel_memory: allow calls that take memory which no process has mapped. Only a control group counts it.
    """
    column = COLUMN[machine]
    blocks: dict[int, list[Instruction]] = {0: _errno(_EPERM), _LAST + 1: _errno(_ENOSYS), 0x40000000: _errno(_EPERM)}
    decisions = dict.fromkeys(allowed_numbers(machine), _allow())
    for name, block in _argument_rules().items():
        number = NUMBERS[name][column]
        if number is not None:
            decisions[number] = block
    if not kernel_memory:
        decisions |= _without_kernel_memory(column)
    for number in sorted(decisions):
        if decisions.get(number - 1) != decisions[number]:
            blocks[number] = decisions[number]
        if number + 1 not in decisions:
            blocks[number + 1] = _errno(_EPERM)
    starts = sorted(blocks)

    def search(low: int, high: int) -> list[Instruction]:
        """Binary search over the numbers, which keeps the kernel's check of the filter at installation short."""
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


def is_supported() -> bool:
    """Return whether there is a filter for this architecture."""
    return platform.machine() in COLUMN and sys.maxsize > 2**32


class Filter:
    """A compiled filter that many forks can install."""

    def __init__(self, *, kernel_memory: bool) -> None:
        program = build(platform.machine(), kernel_memory=kernel_memory)
        self._code = ctypes.create_string_buffer(program, len(program))
        self._header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(self._code)))

    def step(self) -> kernel.Step:
        """Return the step that installs the filter for a process and its children. Requires no_new_privs."""
        return "seccomp", kernel.locked_libc.prctl, (kernel.PR_SET_SECCOMP, 2, self._header, 0, 0)
