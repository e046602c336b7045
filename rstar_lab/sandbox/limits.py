"""Limits of calls, sessions and of the whole sandbox."""

from dataclasses import dataclass, fields

MAX_TIMEOUT_S = 600.0
MAX_MEMORY_MB = 64 * 1024
MAX_STDIN_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a call, over all its processes together. A call can set another time or memory limit.

    timeout_s: seconds on a CPU, asleep or blocked. Seconds in which the call is ready but does not get a CPU do not count.
    wall_slack_s: seconds by which the wall time may exceed timeout_s because the call did not get a CPU. Without a
    control group, up to 40 times timeout_s more: the time in which other work of the machine had the CPU.
    memory_mb: MiB, including temporary files. processes: number of processes and threads.
    open_files: descriptors of one process. file_mb: MiB of one file; all files of a call may have four times as much.
    output_bytes: bytes of stdout, and of stderr. value_bytes: bytes of the repr of the last expression.
    queue_timeout_s: seconds in the queue after which the outcome is `queue_timeout`.
    session_idle_s: seconds without use after which a session is dropped. max_sessions: if there are more, the least
    recently used one is dropped.
    """

    timeout_s: float = 10.0
    wall_slack_s: float = 2.0
    memory_mb: int = 2048
    processes: int = 512
    open_files: int = 512
    file_mb: int = 64
    output_bytes: int = 1024 * 1024
    value_bytes: int = 64 * 1024
    queue_timeout_s: float = 600.0
    session_idle_s: float = 900.0
    max_sessions: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}: {getattr(self, field.name)!r} must be greater than 0")
        check_timeout(self.timeout_s)
        check_memory(self.memory_mb)


def check_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s: {timeout_s!r} must lie in (0, {MAX_TIMEOUT_S:g}] seconds")
    return float(timeout_s)


def check_memory(memory_mb: int) -> int:
    if not 16 <= memory_mb <= MAX_MEMORY_MB:
        raise ValueError(f"memory_mb: {memory_mb!r} must lie in [16, {MAX_MEMORY_MB}]")
    return int(memory_mb)
