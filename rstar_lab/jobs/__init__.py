"""Jobs: a recipe sent away as a local process, a Ray job or a Slurm job, and found again by its id."""

from rstar_lab.jobs.job import Job, JobStatus, attach, list_jobs, submit

__all__ = ["Job", "JobStatus", "attach", "list_jobs", "submit"]
