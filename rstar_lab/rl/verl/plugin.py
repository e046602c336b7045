"""What verl loads of this package in every process that imports it: entry point `verl.plugins`.

Light on purpose, since a run has many processes: the platform of a CPU only. The rest, `hooks`, is imported by those that
build a model (verl's `model.external_lib`) and by the trainer.
"""

import json
import os
from pathlib import Path

from rstar_lab.rl.verl import cpu

# Secrets of the run, in a file: what Ray is told as environment, others can look up.
HANDED_ON = "RSTAR_LAB_HANDED_ON"

if (path := Path(os.environ.get(HANDED_ON, ""))).is_file():
    os.environ.update(json.loads(path.read_text()))

if os.environ.get("VERL_PLATFORM") == cpu.NAME:
    cpu.use_gloo()
