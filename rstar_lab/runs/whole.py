"""What of a run is whole: position, lines of metrics, tables and checkpoints, compared before a run is continued."""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict

from rstar_lab.common.errors import UserError
from rstar_lab.runs.reader import RunReader, checkpoints
from rstar_lab.untrusted.files import DataError, open_bytes, read_json, reading

MANIFEST = "manifest.json"  # file of a checkpoint
_BLOCKS, _BLOCK_BYTES = 16, 2**16


class Manifest(TypedDict):
    """files: size and checksum of each file, by its path in the checkpoint."""

    step: int
    files: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Wholeness:
    """usable: checkpoints from which the run can continue. damages: what is lost or damaged, one line each."""

    usable: dict[int, Path]
    damages: list[str]


def examine(run_dir: Path) -> Wholeness:
    """Compare the parts of a run. Raises UserError if run.json, metrics.jsonl or the rollup is damaged."""
    reader = RunReader(run_dir)
    last = max(reader.steps(), default=-1)
    damaged = reader.damages()
    whole = min([last, *(min(damage.steps) - 1 for damage in damaged)])
    damages, usable = [str(damage.error) for damage in damaged], {}
    for step, folder in checkpoints(run_dir).items():
        try:
            check_checkpoint(folder, step)
        except UserError as error:
            damages.append(str(error))
            continue
        if step <= whole:
            usable[step] = folder
        elif step > last:
            damages.append(f"{run_dir / 'metrics.jsonl'} ends at step {max(last, 0)}, before checkpoint {folder.name}")
    return Wholeness(usable, damages)


def write_manifest(folder: Path, step: int) -> None:
    """Write the sizes and checksums of the files of a checkpoint, which `check_checkpoint` compares."""
    files = {str(path.relative_to(folder)): fingerprint(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}))


def check_checkpoint(folder: Path, step: int) -> None:
    """Raise DataError if a file of a checkpoint is missing or another than was written. One without a manifest is accepted."""
    if not (folder / MANIFEST).exists():  # made by an earlier version
        return
    manifest = read_json(folder / MANIFEST, Manifest)
    if manifest["step"] != step:
        raise DataError(f"{folder / MANIFEST} is of step {manifest['step']}")
    for name, written in manifest["files"].items():
        with reading(folder / name):
            if fingerprint(folder / name) != written:
                raise ValueError(f"damaged; {written[0]:,} bytes with another checksum were written")


def fingerprint(path: Path) -> tuple[int, int]:
    """Return the size of a file and the checksum of blocks that are spread over it: reading all of a large model takes minutes."""
    with open_bytes(path) as file:
        size, checksum = os.fstat(file.fileno()).st_size, 0
        for number in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            checksum = zlib.crc32(file.read(_BLOCK_BYTES), checksum)
    return size, checksum
