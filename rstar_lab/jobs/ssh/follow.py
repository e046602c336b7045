"""Copy the runs of a job from its host until it ends: `python -m rstar_lab.jobs.ssh.follow RUNS_DIR JOB_ID`."""

import argparse
import fcntl
import time
from collections.abc import Callable
from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.jobs.job import Job, attach
from rstar_lab.jobs.ssh.connection import ConnectionLost
from rstar_lab.jobs.ssh.mirror import LOCK, NotACopy, pull

EVERY_S = 2.0


def follow(
    job: Job,
    *,
    checkpoints: bool = False,
    transcripts: bool | None = None,
    every_s: float = EVERY_S,
    log: Callable[[str], None] = print,
) -> None:
    """Pull the runs of a job until it has ended and everything is copied. A lost connection is opened again.

    checkpoints, transcripts: as in `pull`. every_s: pause between two pulls. log: called with a line per copied run.
    """
    known: dict[str, str] = {}
    failure: type[Exception] | str = ""  # what was logged last
    while True:
        ended = None
        try:
            ended = job.status().ended  # read before the pull, so that the last pull copies everything
            for pulled in pull(job.spec, checkpoints=checkpoints, transcripts=transcripts, known=known):
                log(str(pulled))
            if ended:
                return
            failure = ""
        except NotACopy as error:
            log(f"{error}: not copied")
        except (UserError, OSError) as error:
            lost = isinstance(error, ConnectionLost)
            if ended is not False and not lost:  # a full disk here, for example, may be free at the next attempt
                raise
            new = ConnectionLost if lost else str(error)
            if new != failure:
                log(f"{error}; trying again")
            failure = new
        time.sleep(every_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs_dir", type=Path)
    parser.add_argument("job_id")
    arguments = parser.parse_args()
    job = attach(arguments.job_id, runs_dir=arguments.runs_dir)
    with (job.folder.path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        follow(job, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
