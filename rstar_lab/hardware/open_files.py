"""The limit of open files."""

import contextlib
import resource


def raise_open_files() -> None:
    """Raise this process's limit of open files to its hard limit. Slurm passes on the limit of a login shell, often 1,024, which
    a trainer with as many connections to the sandbox exceeds."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS rejects its own hard limit, which is infinite
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
