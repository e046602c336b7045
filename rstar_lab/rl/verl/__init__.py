"""Adapters that run the agent loop, RoC, the objective and the run store inside verl.

This file imports nothing: verl loads the plug-in of this package while verl itself is being imported.
"""

# Environment variable with the path of a file that holds the secrets of the run: Ray shows environment variables to other users.
SECRETS_FILE = "RSTAR_LAB_SECRETS_FILE"

# Environment variable: train without dropout and router noise, as the local trainer does in RL. SFT keeps both.
WITHOUT_NOISE = "RSTAR_LAB_WITHOUT_NOISE"
