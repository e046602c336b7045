"""Environment variables by which `train` passes values to every process of a run."""

SECRETS_FILE = (
    "RSTAR_LAB_SECRETS_FILE"  # file with the secrets of the run: Ray shows environment variables to other users
)
OWN_LOSS = "RSTAR_LAB_LOSS"  # a loss of the user, `module:function`
