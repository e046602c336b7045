"""What a call may use."""

from dataclasses import dataclass, fields

MAX_TIMEOUT_S = 600.0
MAX_MEMORY_MB = 64 * 1024
MAX_STDIN_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Defaults of every call, over all of its processes together. A call may ask for another time or memory limit.

    timeout_s: CPU seconds; seconds spent waiting (sleeping, blocked) count too, waiting for a busy processor does not.
    wall_slack_s: a call that other load starves of the processor may run this much longer before it is ended.
    memory_mb: memory, temporary files included. processes: processes and threads.
    open_files: descriptors of one process. file_mb: one file; all files of a call together stay under four of them.
    output_bytes: each of stdout and stderr. value_bytes: the echoed value of the last expression.
    make_room: while calls wait and long ones are rare, a long call steps aside for the others, and is a timeout when its slack
    is gone, whatever it had. False: no call is a timeout that has not had its time.
    queue_timeout_s: waiting for a free slot, after which the call is answered `queue_timeout`.
    session_idle_s: a session unused for so long is dropped. max_sessions: past it the longest idle one is dropped.
    """

    timeout_s: float = 10.0
    wall_slack_s: float = 2.0
    memory_mb: int = 2048
    processes: int = 512
    open_files: int = 512
    file_mb: int = 64
    output_bytes: int = 1024 * 1024
    value_bytes: int = 64 * 1024
    make_room: bool = True
    queue_timeout_s: float = 600.0
    session_idle_s: float = 900.0
    max_sessions: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is not bool and not getattr(self, field.name) > 0:
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
