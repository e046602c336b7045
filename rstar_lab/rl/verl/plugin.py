"""What verl loads of this package in every process that imports it: entry point `verl.plugins`.

Light on purpose, since a run has many processes: the platform of a CPU only. The rest, `hooks`, is imported by those that
build a model (verl's `model.external_lib`) and by the trainer.
"""

import os

from rstar_lab.rl.verl import cpu

if os.environ.get("VERL_PLATFORM") == cpu.NAME:
    cpu.use_gloo()
