"""Print shell lines that export a job's secrets: `python -m rstar_lab.jobs.export_secrets JOB_FOLDER`.

The batch script evaluates them, so that the processes it starts on every node inherit the secrets.
"""

import shlex
import sys
from pathlib import Path

from rstar_lab.jobs.sandbox_service import ADDRESS_FILE
from rstar_lab.jobs.store import SECRETS_FILE, JobFolder


def main(folder: JobFolder) -> None:
    """Print the variables that the submitter forwarded, then those of the job's sandbox service if it is running."""
    forwarded = folder.read(SECRETS_FILE) or {}
    service = (folder.read(ADDRESS_FILE) or {}).get("environment", {})
    for name, value in {**forwarded, **service}.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main(JobFolder(Path(sys.argv[1])))
