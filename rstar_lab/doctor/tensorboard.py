"""Scalars of a TensorBoard event file, without the package tensorboard.

An event file is a sequence of records (length, checksum, payload, checksum); the payload is a protobuf message `Event`. Only the fields
that scalars need are read: step (2), summary (5), value (1), tag (1), simple_value (2). Source: tensorflow/core/util/event.proto.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from rstar_lab.untrusted.files import read_bytes


def scalars(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, {tag: value}) of each event with scalars. A torn last record ends the file."""
    data = read_bytes(file)
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length
        if end + 4 > len(data):
            return
        step, values = 0, dict[str, float]()
        for number, value in fields(data[start + 12 : end]):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                values |= dict(_summary(value))
        if values:
            yield step, values
        start = end + 4


def _summary(data: bytes) -> Iterator[tuple[str, float]]:
    for number, value in fields(data):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for field, content in fields(value):
            if field == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", "replace")
            elif field == 2 and isinstance(content, float):
                scalar = content
        if scalar is not None:
            yield tag, scalar


def fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield (field number, value) of a protobuf message. Damaged messages end early."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif kind == 1 and at + 8 <= len(data):
            yield key >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif kind == 5 and at + 4 <= len(data):
            yield key >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif kind == 2:
            length, at = _varint(data, at)
            yield key >> 3, data[at : at + length]
            at += length
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
