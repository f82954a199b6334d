"""Parser for batches with header names that are not UTF-8.

Kafka allows any bytes in a header name, but the driver's parser rejects the whole batch if a name
is not UTF-8. This parser is slower and is used only for such batches.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from qkit.backends.common.raw_text import RAW, text_of

__all__ = ["Batch", "EncodedBatch", "Record", "records_from"]

LOG_OVERHEAD: Final = 12  # bytes of the base offset and the length at the start of each batch
MAGIC_AT: Final = 16  # position of the format version in a batch
WITH_HEADERS: Final = 2  # first record format with headers
LOG_APPEND_TIME: Final = 1


class Record(NamedTuple):
    """Parsed record with the attributes of the driver's records."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


class Batch(NamedTuple):
    """Remaining records of a batch, and the offset at which the next batch starts."""

    records: Iterator[Record]
    next_offset: int


class EncodedBatch(NamedTuple):
    """Header fields of a batch, and a function that returns its decompressed records."""

    base_offset: int
    next_offset: int
    record_count: int
    first_timestamp: int
    max_timestamp: int
    timestamp_type: int
    payload: Callable[[], bytes]


def records_from(data: bytes, offset: int, open_batch: Callable[[bytes], EncodedBatch]) -> Batch:
    """Return the records from ``offset`` to the end of the batch that contains it.

    A byte of a header name that is not UTF-8 is replaced with an escape. The header ``qkit-raw``
    keeps the original bytes.

    Args:
        data: Complete batches, as fetched.
        offset: First offset to return.
        open_batch: Parses the header of a batch.

    Raises:
        ValueError: No batch contains ``offset``.
    """
    at = 0
    while at + LOG_OVERHEAD <= len(data):
        end = at + LOG_OVERHEAD + int.from_bytes(data[at + 8 : at + LOG_OVERHEAD], "big")
        if data[at + MAGIC_AT] >= WITH_HEADERS:
            batch = open_batch(data[at:end])
            if batch.next_offset > offset:
                return Batch(_records(batch, offset), batch.next_offset)
        at = end
    raise ValueError(f"no batch contains offset {offset}")


def _records(batch: EncodedBatch, first: int) -> Iterator[Record]:
    data, at = batch.payload(), 0
    for _ in range(batch.record_count):
        length, at = _varint(data, at)
        end = at + length
        record = _record(batch, data, at)
        if record.offset >= first:
            yield record
        at = end


def _record(batch: EncodedBatch, data: bytes, at: int) -> Record:
    at += 1  # skip the attributes byte, which is unused
    timestamp_delta, at = _varint(data, at)
    offset_delta, at = _varint(data, at)
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
    timestamp = batch.max_timestamp if appended else batch.first_timestamp + timestamp_delta
    offset = batch.base_offset + offset_delta
    return Record(offset, timestamp, batch.timestamp_type, key, value, headers)


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
