"""Messages as rows: the schemas of reads, and their Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from qkit._internal.ids import sent_at
from qkit.codec.compression import decompress
from qkit.errors import ConfigError, QueueError
from qkit.message import CONTENT_ENCODING, DeadLetter, Envelope
from qkit.spark.options import Plan

__all__ = ["batches", "check_schema", "schema_of"]

T = TypeVar("T")

ROWS_PER_BATCH: Final = 5_000
_MICROSECONDS_PER_SECOND: Final = 1_000_000

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_HEADERS: Final = pa.map_(pa.string(), pa.string())
_MESSAGE_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("key", pa.string()),
        ("priority", pa.int32()),
        ("attempt", pa.int32()),
        ("sent_at", _TIMESTAMP),
        ("not_before", _TIMESTAMP),
        ("expires_at", _TIMESTAMP),
    ]
)
_DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("key", pa.string()),
        ("priority", pa.int32()),
        ("channel", pa.string()),
        ("group", pa.string()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("attempts", pa.int32()),
        ("first_failed_at", _TIMESTAMP),
        ("last_failed_at", _TIMESTAMP),
        ("trace_id", pa.string()),
    ]
)


def schema_of(plan: Plan) -> StructType:
    """Return the columns of a read of messages or dead letters."""
    return from_arrow_schema(_DEAD_LETTER_SCHEMA if plan.dead_letters else _MESSAGE_SCHEMA)


def check_schema(given: StructType, plan: Plan) -> None:
    """Raise ``ConfigError`` if the user asked for other columns with ``.schema(…)``."""
    if given.fieldNames() != schema_of(plan).fieldNames():
        raise ConfigError(
            "the columns of this format are fixed: remove .schema(…), and parse the body with "
            "from_json(value.cast('string'), …)"
        )


def batches(envelopes: Iterable[Envelope], plan: Plan) -> Iterator[pa.RecordBatch]:
    """Yield the rows of messages or dead letters, depending on the plan."""
    limit = plan.settings.max_message_bytes
    if not plan.dead_letters:
        return _message_batches(envelopes, limit)
    found = (DeadLetter.from_envelope(item, channel=plan.channel) for item in envelopes)
    return _dead_letter_batches(found, limit)


def _message_batches(envelopes: Iterable[Envelope], limit: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of messages; a compressed body is decompressed, up to ``limit`` bytes."""
    for group in _groups(envelopes):
        contents = [_decompressed(item, limit) for item in group]
        columns: list[list[Any]] = [
            [item.id for item in group],
            [body for body, _ in contents],
            [headers for _, headers in contents],
            [item.key for item in group],
            [item.priority for item in group],
            [max(1, item.attempt) for item in group],
            [_microseconds(sent_at(item.id)) for item in group],
            [_microseconds(item.not_before) for item in group],
            [_microseconds(item.expires_at) for item in group],
        ]
        yield _batch(columns, _MESSAGE_SCHEMA)


def _dead_letter_batches(found: Iterable[DeadLetter], limit: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of dead letters, with bodies as in ``_message_batches``."""
    for group in _groups(found):
        contents = [_decompressed(item, limit) for item in group]
        columns: list[list[Any]] = [
            [item.message_id for item in group],
            [body for body, _ in contents],
            [headers for _, headers in contents],
            [item.key for item in group],
            [item.priority for item in group],
            [item.channel for item in group],
            [item.group for item in group],
            [item.reason for item in group],
            [item.error_type for item in group],
            [item.error for item in group],
            [item.attempts for item in group],
            [_microseconds(item.first_failed_at) for item in group],
            [_microseconds(item.last_failed_at) for item in group],
            [item.trace_id for item in group],
        ]
        yield _batch(columns, _DEAD_LETTER_SCHEMA)


def _groups(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while group := list(islice(remaining, ROWS_PER_BATCH)):
        yield group


def _batch(columns: list[list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _decompressed(item: Envelope | DeadLetter, limit: int) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the decompressed body, and the headers without the content encoding."""
    body, headers = item.body, dict(item.headers)
    if CONTENT_ENCODING in headers:
        try:
            body = decompress(body, headers, limit)
        except QueueError:
            pass  # show the body unchanged, with its header: a handler could not decode it either
        else:
            del headers[CONTENT_ENCODING]
    return body, list(headers.items())


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * _MICROSECONDS_PER_SECOND)
