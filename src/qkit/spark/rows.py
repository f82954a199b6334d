"""Messages as rows: the schemas of what is read, and Arrow batches of it."""

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

BATCH: Final = 5_000
_MICRO: Final = 1_000_000

_TIME: Final = pa.timestamp("us", tz="UTC")
_HEADERS: Final = pa.map_(pa.string(), pa.string())
_MESSAGES: Final = pa.schema(
    [
        ("id", pa.string()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("key", pa.string()),
        ("priority", pa.int32()),
        ("attempt", pa.int32()),
        ("sent_at", _TIME),
        ("not_before", _TIME),
        ("expires_at", _TIME),
    ]
)
_LETTERS: Final = pa.schema(
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
        ("first_failed_at", _TIME),
        ("last_failed_at", _TIME),
        ("trace_id", pa.string()),
    ]
)


def schema_of(plan: Plan) -> StructType:
    """The columns of what is read."""
    return from_arrow_schema(_LETTERS if plan.dead_letters else _MESSAGES)


def check_schema(given: StructType, plan: Plan) -> None:
    """Spark hands over what a user said with ``.schema(…)``; here it is fixed."""
    if given.fieldNames() != schema_of(plan).fieldNames():
        raise ConfigError(
            "the columns of this format are fixed: leave .schema(…) out, and take the body apart "
            "with from_json(value.cast('string'), …)"
        )


def batches(envelopes: Iterable[Envelope], plan: Plan) -> Iterator[pa.RecordBatch]:
    """Rows of what lies in the queue that is read: messages, or dead letters of its channel."""
    limit = plan.settings.max_message_bytes
    if not plan.dead_letters:
        return _messages(envelopes, limit)
    found = (DeadLetter.from_envelope(item, channel=plan.channel) for item in envelopes)
    return _letters(found, limit)


def _messages(envelopes: Iterable[Envelope], limit: int) -> Iterator[pa.RecordBatch]:
    """Rows of messages; a compressed body is opened, up to ``limit`` bytes."""
    for group in _groups(envelopes):
        opened = [_opened(item, limit) for item in group]
        columns: list[list[Any]] = [
            [item.id for item in group],
            [body for body, _ in opened],
            [headers for _, headers in opened],
            [item.key for item in group],
            [item.priority for item in group],
            [max(1, item.attempt) for item in group],
            [_micro(sent_at(item.id)) for item in group],
            [_micro(item.not_before) for item in group],
            [_micro(item.expires_at) for item in group],
        ]
        yield _batch(columns, _MESSAGES)


def _letters(found: Iterable[DeadLetter], limit: int) -> Iterator[pa.RecordBatch]:
    """Rows of dead letters."""
    for group in _groups(found):
        opened = [_opened(item, limit) for item in group]
        columns: list[list[Any]] = [
            [item.message_id for item in group],
            [body for body, _ in opened],
            [headers for _, headers in opened],
            [item.key for item in group],
            [item.priority for item in group],
            [item.channel for item in group],
            [item.group for item in group],
            [item.reason for item in group],
            [item.error_type for item in group],
            [item.error for item in group],
            [item.attempts for item in group],
            [_micro(item.first_failed_at) for item in group],
            [_micro(item.last_failed_at) for item in group],
            [item.trace_id for item in group],
        ]
        yield _batch(columns, _LETTERS)


def _groups(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while group := list(islice(rest, BATCH)):
        yield group


def _batch(columns: list[list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _opened(item: Envelope | DeadLetter, limit: int) -> tuple[bytes, list[tuple[str, str]]]:
    """The body after decompression, and the headers that are true of it."""
    body, headers = item.body, dict(item.headers)
    if CONTENT_ENCODING in headers:
        try:
            body = decompress(body, headers, limit)
        except QueueError:
            pass  # it is shown as it is, with its header; a handler could not open it either
        else:
            del headers[CONTENT_ENCODING]
    return body, list(headers.items())


def _micro(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * _MICRO)
