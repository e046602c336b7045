"""Keeps one vLLM server: `python -m rstar_lab.rl.serving.keeper LIFE_FD COMMAND...`, started by `serve`.

A vLLM server is several processes, and those of the engine go on where the one that speaks HTTP is killed. They share the
keeper's process group, which the keeper ends when the server ends or when whoever holds the other end of the pipe LIFE_FD lets
go of it, in whatever way. It imports nothing heavy.
"""

import os
import select
import signal
import subprocess
import sys

GRACE_S = 5.0
KILLED = "the server was ended by"


def main() -> None:
    life, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = subprocess.Popen(command, preexec_fn=_plain_signals)
    ended = os.pidfd_open(server.pid)
    select.select([life, ended], [], [])
    if server.poll() is None:
        server.terminate()
        select.select([ended], [], [], GRACE_S)
    elif server.returncode < 0:
        print(f"{KILLED} {signal.Signals(-server.returncode).name}", flush=True)
    os.killpg(0, signal.SIGKILL)


def _plain_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
