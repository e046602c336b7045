"""The plug-in that verl loads in every process that imports it (entry point `verl.plugins`).

It registers the CPU platform only, because a run has many processes. Processes that build a model (verl's
`model.external_lib`) and the trainer import `hooks`, which registers the rest.
"""

import json
import os
from pathlib import Path

from rstar_lab.rl.verl import SECRETS_FILE, cpu

if (path := Path(os.environ.get(SECRETS_FILE, ""))).is_file():
    os.environ.update(json.loads(path.read_text()))

if os.environ.get("VERL_PLATFORM") == cpu.NAME:
    cpu.use_gloo()
