"""Logs of other trainers as runs, in a cache: `rstar-lab view verl_rollouts`."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.doctor.files import existing, import_rollouts, sources
from rstar_lab.exchange.import_rows import default_run_id


def runs_folder(path: Path) -> Path:
    """Return a folder of runs for a path: itself, or the rollouts of its logs, imported into the user's cache.

    Raises UserError if the path holds neither runs nor a known log.
    """
    path = existing(path)
    if (path / "run.json").exists() or any(path.glob("*/run.json")):
        return path
    found, notes = sources(path)
    found = [source for source in found if source.kind != "metrics"]
    if not found:
        seen = "; ".join(notes[:3]) or "give a run, a folder of runs, or a log of another trainer"
        raise UserError(f"{path} holds no rollouts that can be shown: {seen}")
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for source in found for file in source.files]
    digest = hashlib.blake2b(repr((path.absolute(), states)).encode(), digest_size=10).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rstar_lab" / "view"
    if (base / digest).exists():
        return base / digest
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix=".import-") as temporary:
        made = Path(temporary) / "runs"
        for number, source in enumerate(found):
            name = default_run_id(source.folder if len(source.files) > 1 else source.files[0], source.kind)
            import_rollouts(source, made, name if number == 0 else f"{name}-{number + 1}", notes)
        shutil.move(made, base / digest)
    return base / digest
