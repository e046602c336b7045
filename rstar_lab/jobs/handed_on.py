"""`python -m rstar_lab.jobs.handed_on JOB_FOLDER`: shell lines that export what the submitter handed on, for the batch script."""

import shlex
import sys
from pathlib import Path

from rstar_lab.jobs.store import JobFolder
from rstar_lab.jobs.supervisor import SECRETS_FILE

if __name__ == "__main__":
    for name, value in (JobFolder(Path(sys.argv[1])).read(SECRETS_FILE) or {}).items():
        print(f"export {name}={shlex.quote(value)}")
