"""Read some columns of a large data set on the Hugging Face Hub: its different rows, kept in a cache that an interruption leaves."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar_lab.rl.problems import ProblemError

Keep = Callable[[Mapping[str, Any]], bool]


def different_rows(hub: str, split: str, columns: Sequence[str], keep: Keep) -> Iterator[dict[str, Any]]:
    """Yield the different rows of the Parquet files of a split, with these columns only, for which `keep` is true.

    Each file is read over HTTP, only in its columns. Its rows are stored under HF_HOME before the next one is read, so that the same
    call continues after an interruption. Progress is written to stderr. Raises OSError and the errors of huggingface_hub if the Hub
    cannot be read, and ProblemError if the split has no Parquet files.
    """
    import pyarrow.parquet as pq
    from huggingface_hub import HfApi, HfFileSystem, constants
    from tqdm import tqdm

    from rstar_lab.runs.files import atomic_write

    info = HfApi().dataset_info(hub, timeout=30)
    name = re.compile(rf"(?:.*/)?{re.escape(split)}(?:-\d+-of-\d+)?\.parquet")
    files = sorted(entry.rfilename for entry in info.siblings or () if name.fullmatch(entry.rfilename))
    if not files:
        raise ProblemError(f"{hub}: the split {split} has no Parquet files")
    digest = hashlib.sha256(repr((info.sha, split, *columns)).encode()).hexdigest()[:16]
    folder = Path(constants.HF_HOME) / "rstar_lab" / hub.replace("/", "--") / digest
    folder.mkdir(parents=True, exist_ok=True)
    remote = HfFileSystem()
    for file in tqdm(files, desc=hub, unit="file", mininterval=1.0 if sys.stderr.isatty() else 60.0):
        part = folder / file.replace("/", "--")
        if part.exists():
            continue
        with remote.open(f"datasets/{hub}@{info.sha}/{file}", "rb") as opened:
            table = pq.read_table(opened, columns=list(columns), use_threads=False)
        with atomic_write(part) as out:
            pq.write_table(table.group_by(list(columns), use_threads=False).aggregate([]), out)
    seen: set[tuple[Any, ...]] = set()
    for file in files:
        for row in pq.read_table(folder / file.replace("/", "--")).select(list(columns)).to_pylist():
            if keep(row) and (key := tuple(row.values())) not in seen:
                seen.add(key)
                yield row
