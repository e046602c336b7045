"""Supervise one vLLM server: `python -m rstar_lab.rl.serving.keeper LIFE_FD COMMAND...`, started by `serve`.

A vLLM server consists of several processes, and its engine processes survive if only the HTTP process is killed. All of
them are in the keeper's process group. The keeper kills this group when the HTTP process ends, or when the pipe LIFE_FD
closes: its other end is in `serve`, so it also closes when `serve` is killed.
"""

import os
import select
import signal
import subprocess
import sys

GRACE_S = 5.0
KILLED = "the server was killed by"


def main() -> None:
    life_fd, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `serve` handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = subprocess.Popen(command, preexec_fn=_default_signals)
    ended = os.pidfd_open(server.pid)
    select.select([life_fd, ended], [], [])
    if server.poll() is None:
        server.terminate()
        select.select([ended], [], [], GRACE_S)
    elif server.returncode < 0:
        print(f"{KILLED} {signal.Signals(-server.returncode).name}", flush=True)
    os.killpg(0, signal.SIGKILL)


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
