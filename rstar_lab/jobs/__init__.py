"""Run a recipe as a job: on this machine, on Ray, Slurm or Kubernetes, or on another machine over ssh. A job can be
reattached by its id."""

from rstar_lab.jobs.backend import JobStatus
from rstar_lab.jobs.board import JobBoard
from rstar_lab.jobs.grid import Grid, run_grid, submit_grid
from rstar_lab.jobs.job import (
    Job,
    JobDescription,
    attach,
    describe,
    find_job_runs_dir,
    job_row,
    list_jobs,
    submit,
)

__all__ = [
    "Grid", "Job", "JobBoard", "JobDescription", "JobStatus", "attach", "describe", "find_job_runs_dir", "job_row",
    "list_jobs", "run_grid", "submit", "submit_grid",
]  # fmt: skip
