"""Run a recipe as a job: on this machine, on Ray, Slurm or Kubernetes, or on another machine over ssh. A job can be
reattached by its id. Names are imported at first use."""

# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from rstar_lab.jobs.backend import JobStatus
    from rstar_lab.jobs.board import JobBoard
    from rstar_lab.jobs.grid import Grid, run_grid, submit_grid
    from rstar_lab.jobs.job import Job, attach, describe, find_job_runs_dir, job_row, list_jobs, preview, submit
    from rstar_lab.jobs.preflight import JobDescription

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
