"""Tests of the seccomp filter of both architectures with a small BPF interpreter."""

import struct

import pytest

from rstar_lab.sandbox.runtime import seccomp
from rstar_lab.sandbox.runtime.syscalls import ALLOWED, CHECKED, NUMBERS

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x50000, 0x80000000


def decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, *[0] * 6)[:6])
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator = at = 0
    while True:
        operation, yes, no, k = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif operation == 0x06:
            return k
        elif operation == 0x05:
            at += k
        else:
            true = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[operation]
            at += yes if true else no


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request):
    return request.param


def number_of(name: str, machine: str) -> int:
    number = NUMBERS[name][seccomp.COLUMN[machine]]
    assert number is not None
    return number


def test_the_filter_decides_every_number_as_listed(machine):
    program, arch = seccomp.build(machine), seccomp._AUDIT_ARCH[machine]
    allowed = seccomp.allowed_numbers(machine)
    checked = {NUMBERS[name][seccomp.COLUMN[machine]] for name in seccomp._argument_rules()}
    assert not allowed & checked
    for number in range(480):
        decision = decide(program, arch, number)
        if number in allowed:
            assert decision == ALLOW, number
        elif number not in checked:
            assert decision == ERRNO | (38 if number > seccomp._LAST else 1), number
    assert decide(program, arch, 0x40000000 + 1) == ERRNO | 1
    assert decide(program, arch ^ 1, 0) == KILL


def test_every_checked_call_has_a_rule():
    assert set(seccomp._argument_rules()) == set(CHECKED)
    assert len(NUMBERS) == sum(map(len, ALLOWED.values())) + len(CHECKED), "no call is in two groups"


REFUSED_ARGUMENTS = {
    "socket": [(2,), (10,), (16,), (17,), (40,)],
    "socketpair": [(2,), (16,), (40,)],
    "clone": [(flag | 17,) for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)]
    + [(0x8000 | 17,), (0x3D0F00 | 0x4000,), (0x3D0F00 & ~0x400,)],
    "close_range": [(900, 901, 2), (900, 901, 6)],
    "clone3": [()],
    "prctl": [(1,), (4,), (22,), (36,), (38,)],
    "ioctl": [(0, 0x5412)],
    "fcntl": [(3, 1026), (3, 1024), (3, 10), (3, 8)],
    "setsockopt": [(3, 1, 26), (3, 1, 50)],
    "sendto": [(3, 0, 1, 1)],
    "recvmsg": [(3, 0, 1)],
    "mmap": [(0, 4096, 3, 0x40022)],
    "memfd_create": [(0, 4)],
    "shmget": [(0, 4096, 0o4000)],
    "membarrier": [(1, 0), (2, 0), (4, 0)],
}
ALLOWED_ARGUMENTS = {
    "socket": (1,), "socketpair": (1,), "clone": (0x3D0F00,), "prctl": (15,), "ioctl": (0, 0x5401), "fcntl": (3, 2),
    "setsockopt": (3, 1, 7), "sendto": (3, 0, 1, 0x4000), "recvmsg": (3, 0, 0), "mmap": (0, 4096, 3, 0x22),
    "close_range": (3, 900, 4),
    "membarrier": (8, 0), "memfd_create": (0, 1), "shmget": (0, 4096, 0o1600), "setrlimit": (7, 1), "prlimit64": (0, 4, 0, 1),
}  # fmt: skip
# The filter reports success without executing the call.
IGNORED_ARGUMENTS = {
    "fsync": [(3,)], "fdatasync": [(3,)], "sync_file_range": [(3, 0, 0, 2)], "msync": [(4096, 4096, 4)],
    "flock": [(3, 2)], "fcntl": [(3, 6), (3, 7), (3, 37), (3, 38)], "setrlimit": [(4, 1)],
    "prlimit64": [(0, 4, 1, 0), (0, 4, 1 << 32, 0)],
}  # fmt: skip


def test_the_filter_checks_arguments(machine):
    program, arch = seccomp.build(machine), seccomp._AUDIT_ARCH[machine]
    for name, cases in REFUSED_ARGUMENTS.items():
        for arguments in cases:
            decision = decide(program, arch, number_of(name, machine), *arguments)
            assert decision & ERRNO and decision != ERRNO and decision != ALLOW, (name, arguments)
    for name, arguments in ALLOWED_ARGUMENTS.items():
        assert decide(program, arch, number_of(name, machine), *arguments) == ALLOW, (name, arguments)
    for name, cases in IGNORED_ARGUMENTS.items():
        for arguments in cases:
            assert decide(program, arch, number_of(name, machine), *arguments) == ERRNO, (name, arguments)


def test_memory_that_no_process_has_mapped_needs_a_control_group(machine):
    program, arch = seccomp.build(machine, kernel_memory=False), seccomp._AUDIT_ARCH[machine]
    for name in ("memfd_create", "shmget", "semget"):
        assert decide(program, arch, number_of(name, machine), 0, 0, 0) == ERRNO | 38
    fcntl, setsockopt = number_of("fcntl", machine), number_of("setsockopt", machine)
    assert decide(program, arch, fcntl, 3, 1031, 1 << 20) == ERRNO | 1  # F_SETPIPE_SZ
    assert decide(program, arch, fcntl, 3, 1030, 5) == ALLOW
    assert decide(program, arch, fcntl, 3, 6, 0) == ERRNO  # F_SETLK
    for option in (7, 8, 32, 33):  # sizes of the buffers
        assert decide(program, arch, setsockopt, 3, 1, option) == ERRNO
    assert decide(program, arch, setsockopt, 3, 1, 26) == ERRNO | 1  # SO_ATTACH_FILTER
    assert decide(program, arch, setsockopt, 3, 1, 2) == ALLOW


def test_dangerous_calls_are_not_allowed():
    dangerous = "unshare setns mount pivot_root chroot ptrace process_vm_writev pidfd_getfd io_uring_setup bpf userfaultfd keyctl"
    dangerous += " setuid capset personality setpriority sched_setaffinity setxattr mq_open inotify_init init_module reboot mlock"
    assert not set(dangerous.split()) & set(NUMBERS)


def test_the_filter_is_short():
    assert all(len(seccomp.build(machine)) // 8 < 600 for machine in ("x86_64", "aarch64"))
