"""History of an offline run of Weights & Biases (`*.wandb`), without the package wandb.

The file is a log of LevelDB: blocks of 32 KiB with records (checksum, length, type, data), of which a long message takes several. The
messages are protobuf. Only the fields that metrics need are read: Record.history (2); HistoryRecord.item (1), step (2);
HistoryItem.key (1), nested_key (2), value_json (16). Sources: wandb/proto/wandb_internal.proto, leveldb/doc/log_format.md.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from rstar_lab.doctor.rollout_rows import is_number
from rstar_lab.doctor.tensorboard import fields
from rstar_lab.untrusted.files import DataError, parse_json, read_bytes

BLOCK, HEADER, IDENT = 32768, 7, b":W&B"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def history(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, {metric: number}) of each logged step. A torn or damaged end ends the file."""
    for message in _messages(read_bytes(file)):
        for number, content in fields(message):
            if number == 2 and isinstance(content, bytes):
                step, values = _row(content)
                if values and step is not None:
                    yield step, values


def _messages(data: bytes) -> Iterator[bytes]:
    if data[:4] != IDENT:
        return
    at, parts = HEADER, bytearray()
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block that is too short for a record
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        content = data[at + HEADER : at + HEADER + length]
        if not FULL <= kind <= LAST or len(content) < length:
            return
        at += HEADER + length
        if kind in (FULL, FIRST):
            parts.clear()
        parts += content
        if kind in (FULL, LAST):
            yield bytes(parts)


def _row(data: bytes) -> tuple[int | None, dict[str, float]]:
    step: int | None = None
    values: dict[str, float] = {}
    for number, content in fields(data):
        if not isinstance(content, bytes):
            continue
        if number == 2:
            step = next((int(value) for field, value in fields(content) if field == 1), 0)
        elif number == 1:
            name, text = "", b""
            for field, value in fields(content):
                if field in (1, 2) and isinstance(value, bytes):
                    name += ("/" if name else "") + value.decode("utf-8", "replace")
                elif field == 16 and isinstance(value, bytes):
                    text = value
            try:
                loaded = parse_json(text, name)
            except DataError:
                continue
            if name == "_step" and isinstance(loaded, int):
                step = loaded
            elif is_number(loaded) and not name.startswith("_"):
                values[name] = float(loaded)
    return step, values
