"""Read Parquet files that others may have made. A few kilobytes can stand for gigabytes: repeated values, and texts in dictionaries.

The footer bounds rows and bytes before anything is read. Texts are read as dictionaries and their size is added up before they are
expanded. pyarrow is imported at the first use, because the extra `sandbox` does not install it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rstar_lab.untrusted.files import max_unpacked, open_bytes, reading

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# A file may have this many rows, and one more per byte of its size.
MAX_ROWS = 1_000_000
# Bytes that a value takes in memory; of a text beside its characters.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12, "BYTE_ARRAY": 16}


def read_footer(path: str | Path) -> "pq.FileMetaData":
    """Return the metadata of a Parquet file. Raises DataError, also if its rows or bytes are far more than its size allows."""
    with reading(path), open_bytes(path) as file:
        return _checked_footer(file)


def read_parquet(path: str | Path, columns: Sequence[str] | None = None, groups: list[int] | None = None) -> "pa.Table":
    """Return the rows of a Parquet file. columns, groups: default: all columns and row groups. Raises DataError."""
    import pyarrow as pa

    with reading(path), _opened(path) as (file, schema, most):
        schema = schema if columns is None else pa.schema([schema.field(name) for name in columns], schema.metadata)
        tables, total = [pa.Table.from_batches([], schema)], 0
        for group in range(file.num_row_groups) if groups is None else groups:
            table = file.read_row_group(group, schema.names).select(schema.names)
            if (total := total + sum(map(_bytes_of, table.columns))) > most:
                raise ValueError("it unpacks to far more than its size")
            tables.append(table if table.schema == schema else table.cast(schema))
        return pa.concat_tables(tables)


def parquet_batches(path: str | Path) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of a Parquet file in batches. Raises DataError."""
    import pyarrow as pa

    with reading(path), _opened(path) as (file, schema, most):
        total = 0
        # A batch of two groups would need chunks, which nested columns do not support.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(8192, [group]):
                if (total := total + sum(map(_bytes_of, batch.columns))) > most:
                    raise ValueError("it unpacks to far more than its size")
                yield batch.cast(pa.schema([schema.field(name) for name in batch.schema.names]))


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple["pq.ParquetFile", "pa.Schema", int]]:
    """Yield the file with texts as dictionaries, its schema without them and without decimals, and the bytes that it may unpack to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_bytes(path) as opened:
        footer = _checked_footer(opened)
        schema = footer.schema.to_arrow_schema()
        leaves = [footer.schema.column(index) for index in range(footer.num_columns)]
        if any(leaf.logical_type.type == "DECIMAL" for leaf in leaves):
            schema = pa.schema([field.with_type(_without_decimals(field.type)) for field in schema], schema.metadata)
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        with pq.ParquetFile(opened, metadata=footer, read_dictionary=texts, pre_buffer=False) as file:
            yield file, schema, max_unpacked(os.fstat(opened.fileno()).st_size)


def _without_decimals(kind: "pa.DataType") -> "pa.DataType":
    """Return a type with floats, integers or (of more than 18 digits) texts for decimals, so that a value is of a type of JSON."""
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return pa.float64() if kind.scale > 0 else pa.int64() if kind.precision < 19 else pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_decimals(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_decimals(kind.value_type)))
    return kind


def _checked_footer(file: BinaryIO) -> "pq.FileMetaData":
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = os.fstat(file.fileno()).st_size
    try:
        footer = pq.read_metadata(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"truncated or not a Parquet file: {error}") from error
    if footer.num_rows > MAX_ROWS + size:
        raise ValueError(f"it has {footer.num_rows:,} rows in {size:,} bytes")
    total = 0
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(footer.num_columns)):
            unpacked, count = column.total_uncompressed_size, column.num_values
            total += max(unpacked, 0) + max(count, 0) * _WIDTHS.get(column.physical_type, 8)
            if "DELTA_BYTE_ARRAY" in column.encodings:  # each text may contain all of the one before
                total += unpacked * count if unpacked * count > max_unpacked(size) else 0
    if total > max_unpacked(size):
        raise ValueError(f"it unpacks to {total / 1e9:.1f} GB, far more than its {size:,} bytes")
    return footer


def _bytes_of(array: Any) -> int:
    """Return the bytes of an Arrow array after its dictionaries are expanded."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        return sum(map(_bytes_of, array.chunks))
    if pa.types.is_dictionary(array.type):
        import pyarrow.compute as pc

        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return array.nbytes + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    if pa.types.is_map(array.type):
        return _bytes_of(array.keys) + _bytes_of(array.items)
    if pa.types.is_nested(array.type):
        flat = array.flatten()
        return sum(map(_bytes_of, flat)) if isinstance(flat, list) else array.nbytes + _bytes_of(flat)
    return int(array.nbytes)
