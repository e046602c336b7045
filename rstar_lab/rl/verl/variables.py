"""Environment variables by which `train` passes values to every process of a run."""

# Path of a file with the secrets of the run, because Ray shows environment variables to other users.
SECRETS_FILE = "RSTAR_LAB_SECRETS_FILE"
