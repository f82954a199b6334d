"""A batch of records read once more, where the names of headers are not UTF-8.

Kafka takes any bytes as the name of a header, and the driver's parser refuses the whole batch. This
one is slower and reads such a batch alone.
"""

# pyright: reportMissingTypeStubs=false
# The driver has none.

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from aiokafka.record import default_records

from qkit.backends.common.raw_text import RAW, text_of

__all__ = ["Batch", "Record", "records_from"]

_parser: Any = default_records  # without types
LOG_OVERHEAD: Final = 12  # bytes of the base offset and the length in front of a batch
MAGIC_AT: Final = 16  # where the version of a batch stands
WITH_HEADERS: Final = 2  # the first version that has headers
LOG_APPEND_TIME: Final = 1


class Record(NamedTuple):
    """A record as the driver gives it."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


class Batch(NamedTuple):
    """What is left of a batch, and the offset behind it."""

    records: Iterator[Record]
    next_offset: int


def records_from(data: bytes, offset: int) -> Batch:
    """Return the records from ``offset`` on of the batch that holds it; ``data`` is whole batches.

    Headers whose names are not UTF-8 have replaced names, and ``qkit-raw`` keeps the bytes.
    """
    at = 0
    while at + LOG_OVERHEAD <= len(data):
        end = at + LOG_OVERHEAD + int.from_bytes(data[at + 8 : at + LOG_OVERHEAD], "big")
        if data[at + MAGIC_AT] >= WITH_HEADERS:
            batch = _parser._DefaultRecordBatchPy(data[at:end])
            if batch.next_offset > offset:
                return Batch(_records(batch, offset), batch.next_offset)
        at = end
    raise ValueError(f"no batch has the offset {offset}")


def _records(batch: Any, first: int) -> Iterator[Record]:
    batch._maybe_uncompress()
    data, at = bytes(batch._buffer), batch._pos
    for _ in range(batch._num_records):
        length, at = _varint(data, at)
        end = at + length
        record = _record(batch, data, at)
        if record.offset >= first:
            yield record
        at = end


def _record(batch: Any, data: bytes, at: int) -> Record:
    at += 1  # attributes, of which there are none
    later, at = _varint(data, at)
    behind, at = _varint(data, at)
    key, at = _bytes(data, at)
    value, at = _bytes(data, at)
    count, at = _varint(data, at)
    headers: list[tuple[str, bytes | None]] = []
    raw: dict[str, str] = {}
    for _ in range(count):
        name, at = _bytes(data, at)
        content, at = _bytes(data, at)
        text = text_of(name or b"")
        if text.encode() != name:
            raw[f"name:{text}"] = b64encode(name or b"").decode()
        headers.append((text, content))
    if raw:
        headers.append((RAW, json.dumps(raw).encode()))
    appended = batch.timestamp_type == LOG_APPEND_TIME
    timestamp = batch.max_timestamp if appended else batch.first_timestamp + later
    return Record(batch.base_offset + behind, timestamp, batch.timestamp_type, key, value, headers)


def _bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at)
    return (None, at) if size < 0 else (data[at : at + size], at + size)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return (found >> 1) ^ -(found & 1), at
        shift += 7
