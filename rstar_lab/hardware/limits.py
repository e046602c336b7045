"""Limits of this process."""

import contextlib
import resource


def raise_open_files() -> int:
    """Raise this process's limit of open files to its hard limit, and return the limit. Slurm passes on the limit of a login
    shell, often 1,024, which a trainer or a service with many connections exceeds."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS rejects its own hard limit, which is infinite
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
