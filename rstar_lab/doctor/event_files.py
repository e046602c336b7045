"""Metrics of TensorBoard event files and of offline runs of Weights & Biases, without these packages.

Both hold protobuf messages. Only the fields that metrics need are read. TensorBoard: Event.step (2), summary (5); Summary.value (1);
Value.tag (1), simple_value (2). W&B: Record.history (2); HistoryRecord.item (1), step (2); HistoryItem.key (1), nested_key (2),
value_json (16). Sources: tensorflow/core/util/event.proto, wandb/proto/wandb_internal.proto, leveldb/doc/log_format.md.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rstar_lab.exchange.rollout_rows import is_number
from rstar_lab.untrusted.files import DataError, parse_json, read_bytes

BLOCK, HEADER, IDENT = 32768, 7, b":W&B"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def scalars(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, {tag: value}) of each event with scalars. A torn last record ends the file.

    An event file is a sequence of records: length, checksum, payload, checksum.
    """
    data, start = read_bytes(file), 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length
        if end + 4 > len(data):
            return
        event = _message(data[start + 12 : end])
        values = [_message(value) for summary in event[5, bytes] for value in _message(summary)[1, bytes]]
        found = {_name(value[1, bytes]): value[2, float][-1] for value in values if value[2, float]}
        if found:
            yield (event[2, int] or [0])[-1], found
        start = end + 4


def history(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, {metric: number}) of each logged step of a `*.wandb` file. A torn or damaged end ends the file."""
    for record in _records(read_bytes(file)):
        for content in _message(record)[2, bytes]:
            row = _message(content)
            steps = [_message(step)[1, int] or [0] for step in row[2, bytes]]
            step, values = steps[-1][0] if steps else None, dict[str, float]()
            for item in map(_message, row[1, bytes]):
                name = _name(item[1, bytes] + item[2, bytes])
                with suppress(DataError):
                    value = parse_json((item[16, bytes] or [b""])[-1], name)
                    if name == "_step" and isinstance(value, int):
                        step = value
                    elif is_number(value) and not name.startswith("_"):
                        values[name] = float(value)
            if values and step is not None:
                yield step, values


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the messages of a log of LevelDB: blocks with records (checksum, length, type, data), of which a long message takes several."""
    at, parts = HEADER, bytearray()
    while data[:4] == IDENT and at + HEADER <= len(data):
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


def _name(parts: list[bytes]) -> str:
    return "/".join(part.decode("utf-8", "replace") for part in parts)


def _message(data: bytes) -> dict[tuple[int, type], list[Any]]:
    """Return the values of a protobuf message by field number and type."""
    found = defaultdict[tuple[int, type], list[Any]](list)
    for number, value in fields(data):
        found[number, type(value)].append(value)
    return found


def fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield (field number, value) of a protobuf message. Damaged messages end early."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind in (0, 2):
            value, at = _varint(data, at)
            if kind == 2:
                yield number, data[at : at + value]
                at += value
            else:
                yield number, value
        elif kind in (1, 5) and at + (size := 8 if kind == 1 else 4) <= len(data):
            yield number, struct.unpack_from("<d" if kind == 1 else "<f", data, at)[0]
            at += size
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at
