"""Run a recipe as a job: a local process, a Ray job or a Slurm job. A job is found again by its id."""

from rstar_lab.jobs.job import Job, JobStatus, attach, list_jobs
from rstar_lab.jobs.submit import submit

__all__ = ["Job", "JobStatus", "attach", "list_jobs", "submit"]
