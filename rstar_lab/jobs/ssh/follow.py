"""Copy the runs of a job from its host until it ends: `python -m rstar_lab.jobs.ssh.follow RUNS_DIR JOB_ID`."""

import math
import sys
import time
from collections.abc import Callable

from rstar_lab.common.errors import UserError, exit_with_message
from rstar_lab.jobs.job import Job, attach
from rstar_lab.jobs.ssh.connection import ConnectionLost
from rstar_lab.jobs.ssh.mirror import NotACopy, pull

EVERY_S = 2.0
GIVE_UP_S = 600.0  # the process in the background ends; reading the status of the job starts it again


def follow(
    job: Job,
    *,
    checkpoints: bool = False,
    transcripts: bool | None = None,
    every_s: float = EVERY_S,
    give_up_s: float = math.inf,
    log: Callable[[str], None] = print,
) -> None:
    """Pull the runs of a job until it has ended and everything is copied. A lost connection is opened again.

    checkpoints, transcripts: as in `pull`. every_s: pause between two pulls. log: called with a line per copied run.
    Raises ConnectionLost if the host cannot be reached for `give_up_s` seconds.
    """
    known: dict[str, str] = {}
    failure = ""  # what was logged last
    reached = time.monotonic()
    while True:
        ended = None
        try:
            ended = job.status().ended  # read before the pull, so that the last pull copies everything
            for pulled in pull(job.spec, checkpoints=checkpoints, transcripts=transcripts, known=known):
                log(str(pulled))
            if ended:
                return
            failure, reached = "", time.monotonic()
        except (UserError, OSError) as error:
            lost, is_other_run = isinstance(error, ConnectionLost), isinstance(error, NotACopy)
            if time.monotonic() - reached > give_up_s if lost else not is_other_run and ended is not False:
                raise  # while the job runs, a full disk here, for example, may be free at the next attempt
            if failure != (new := "lost" if lost else str(error)):
                log(f"{error}: not copied" if is_other_run else f"{error}; trying again")
            failure = new
        time.sleep(every_s)


def main(runs_dir: str, job_id: str) -> None:
    """Follow a job in the background."""
    with exit_with_message():
        follow(attach(job_id, runs_dir=runs_dir), give_up_s=GIVE_UP_S, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
