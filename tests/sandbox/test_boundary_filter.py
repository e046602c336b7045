"""The seccomp filter, run by a small BPF interpreter for both architectures: it decides every number as its list says."""

import struct

import pytest

from rstar_lab.sandbox.runtime import seccomp

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


def test_every_number_is_decided_as_listed(machine):
    program, arch = seccomp.build(machine), seccomp._AUDIT_ARCH[machine]
    allowed = {n for low, high in seccomp._ranges(seccomp._ALLOWED[machine]) for n in range(low, high + 1)}
    special = {*seccomp._CHECKED[machine], seccomp._CLONE3}
    assert not allowed & special
    for number in range(480):
        verdict = decide(program, arch, number)
        if number in allowed:
            assert verdict == ALLOW, number
        elif number not in special:
            assert verdict == ERRNO | (38 if number > seccomp._LAST else 1), number
    assert decide(program, arch, 0x40000000 + 1) == ERRNO | 1
    assert decide(program, arch, seccomp._CLONE3) == ERRNO | 38
    assert decide(program, arch ^ 1, 0) == KILL


def test_arguments_are_looked_at(machine):
    program, arch = seccomp.build(machine), seccomp._AUDIT_ARCH[machine]
    socket, clone, prctl, ioctl = seccomp._CHECKED[machine]
    assert [decide(program, arch, socket, family) == ALLOW for family in (1, 2, 10, 16, 17, 40)] == [True] + [False] * 5
    assert decide(program, arch, clone, 0x3D0F00) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, arch, clone, flag | 17) == ERRNO | 1
    assert [decide(program, arch, prctl, option) == ALLOW for option in (15, 1, 4, 22, 36, 38)] == [True] + [False] * 5
    assert [decide(program, arch, ioctl, 0, request) == ALLOW for request in (0x5401, 0x5412)] == [True, False]


def test_the_program_is_short():
    assert all(len(seccomp.build(machine)) // 8 < 400 for machine in ("x86_64", "aarch64"))
