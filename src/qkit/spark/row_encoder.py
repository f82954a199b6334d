"""From a row to an envelope, or to the dead letter of a row that cannot be one."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, cast

from pydantic_core import to_json

from qkit._internal.clock import SystemClock
from qkit.codec.codec import Codec
from qkit.errors import ConfigError, DecodeError, InvalidBody, QueueError, Unsupported
from qkit.handlers.route import Route
from qkit.message import CONTENT_TYPE, DeadLetter, Envelope, Reason
from qkit.sending.envelope_builder import SendOptions, build_encoded_envelope
from qkit.spark.columns import Columns
from qkit.spark.options import Plan

__all__ = ["RowEncoder", "is_row_error", "message_ids", "preview"]

_BYTES: Final = "application/octet-stream"
_ROW: Final = 500  # characters of a row that an error shows
_ROWS: Final = 1 << 28  # rows that one millisecond of ids has room for


def message_ids(job: str, partition: int, started: float) -> Iterator[str]:
    """Yield the ids of a partition's messages, of the usual form; a retried task gets the same.

    >>> numbers = message_ids("load-1", 3, 1_700_000_000.0)
    >>> next(numbers), next(numbers)
    ('018bcfe568007ba08805000030000000', '018bcfe568007ba08805000030000001')
    """
    mark = blake2b(job.encode(), digest_size=3).hexdigest()
    milliseconds = int(started * 1000)
    while True:
        start = f"{milliseconds:012x}7{mark[:3]}8{mark[3:]}{partition & 0xFFFFF:05x}"
        for row in range(_ROWS):
            yield f"{start}{row:07x}"
        milliseconds += 1


class RowEncoder:
    """Encodes rows as envelopes; checks what ``QueueService.send`` would check."""

    def __init__(self, plan: Plan, columns: Columns, route: Route) -> None:
        self._kind = columns.kind
        self._channel = plan.channel
        self._route = route
        self._clock = SystemClock()
        type_ = None if plan.model is None else _load(plan.model)
        compression, limit = plan.settings.compression, plan.settings.max_message_bytes
        self._codec: Codec[object] = Codec(
            cast("type[object]", type_), compression=compression, max_bytes=limit
        )
        # Bytes and text are sent as they are: the model only looks at them.
        self._raw = Codec(bytes, compression=compression, max_bytes=limit)
        self._checked = type_ is not None
        self._content_type = plan.content_type or (_BYTES if self._kind == "bytes" else None)

    def envelope(self, id: str, body: Any, options: SendOptions) -> Envelope:
        """The message of a row. Raises a ``QueueError`` or ``ValueError`` for a bad row."""
        if self._kind in ("row", "struct"):
            if body is None:
                raise InvalidBody("'value' is null: a message needs a body")
            data, headers = self._codec.encode(body)
        else:
            data, headers = self._as_it_is(body)
        return build_encoded_envelope(self._route, id, data, headers, self._clock, options)

    def _as_it_is(self, body: bytes | str | None) -> tuple[bytes, dict[str, str]]:
        if body is None:
            raise InvalidBody("'value' is null: a message needs a body")
        raw = body.encode() if isinstance(body, str) else body
        if self._checked:
            try:
                self._codec.decode(raw, {})
            except DecodeError as error:
                raise InvalidBody(error.message) from error
        data, headers = self._raw.encode(raw)
        del headers[CONTENT_TYPE]
        return data, headers | ({CONTENT_TYPE: self._content_type} if self._content_type else {})

    def dead_letter(self, id: str, body: Any, options: SendOptions, error: Exception) -> Envelope:
        """The record of a row that is no message, with the row as its body."""
        raw = body if isinstance(body, bytes) else _readable(body)
        key = options.get("key")
        letter = DeadLetter.of(
            Envelope(id, raw, key=key if isinstance(key, str) else None),
            channel=self._channel,
            reason=Reason.UNDECODABLE,
            at=time.time(),
            error=error,
        )
        return letter.to_envelope()


def is_row_error(error: Exception) -> bool:
    """Return whether the error concerns this row only; else the whole write is impossible."""
    return isinstance(error, QueueError | ValueError) and not isinstance(
        error, Unsupported | ConfigError
    )


def preview(body: object, options: SendOptions) -> str:
    """Return a row as an error shows it, cut if it is long."""
    text = (body if isinstance(body, bytes) else _readable(body)).decode(errors="replace")
    text += f" with {options}" if options else ""
    return text if len(text) <= _ROW else f"{text[: _ROW - 1]}…"


def _readable(body: object) -> bytes:
    """JSON of whatever it is; what JSON has no word for as Python shows it."""
    if isinstance(body, str):
        return body.encode(errors="replace")
    return to_json(body, inf_nan_mode="strings", fallback=repr, bytes_mode="base64")


@lru_cache
def _load(name: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model={name!r} cannot be loaded: {error}. It must be importable on the executors "
            "too: install it there, or send it with spark.submit.pyFiles",
            cause=error,
        ) from error
