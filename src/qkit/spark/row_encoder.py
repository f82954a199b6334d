"""Encoding of rows as envelopes, and of invalid rows as dead letters."""

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

_BINARY_CONTENT_TYPE: Final = "application/octet-stream"
_PREVIEW_CHARACTERS: Final = 500  # how much of a row an error message shows
_IDS_PER_MILLISECOND: Final = 1 << 28  # 7 hexadecimal digits


def message_ids(job: str, partition: int, started: float) -> Iterator[str]:
    """Yield the ids of a partition's messages; a retried task gets the same ids.

    Like all message ids, they are UUIDv7 without dashes.

    >>> ids = message_ids("load-1", 3, 1_700_000_000.0)
    >>> next(ids), next(ids)
    ('018bcfe568007ba08805000030000000', '018bcfe568007ba08805000030000001')
    """
    job_digest = blake2b(job.encode(), digest_size=3).hexdigest()
    milliseconds = int(started * 1000)
    while True:
        prefix = f"{milliseconds:012x}7{job_digest[:3]}8{job_digest[3:]}{partition & 0xFFFFF:05x}"
        for row in range(_IDS_PER_MILLISECOND):
            yield f"{prefix}{row:07x}"
        milliseconds += 1


class RowEncoder:
    """Encoder of rows as envelopes, with the checks of ``QueueService.send``."""

    def __init__(self, plan: Plan, columns: Columns, route: Route) -> None:
        self._kind = columns.kind
        self._channel = plan.channel
        self._route = route
        self._clock = SystemClock()
        type_ = None if plan.model is None else _load_model(plan.model)
        compression, limit = plan.settings.compression, plan.settings.max_message_bytes
        self._codec: Codec[object] = Codec(
            cast("type[object]", type_), compression=compression, max_bytes=limit
        )
        # Bytes and text are sent unchanged; the model only validates them.
        self._raw = Codec(bytes, compression=compression, max_bytes=limit)
        self._validate = type_ is not None
        self._content_type = plan.content_type or (
            _BINARY_CONTENT_TYPE if self._kind == "bytes" else None
        )

    def envelope(self, id: str, body: Any, options: SendOptions) -> Envelope:
        """Return the envelope of a row.

        Raises:
            QueueError: The row is invalid; see ``is_row_error``.
            ValueError: A value of the row cannot be encoded.
        """
        if self._kind in ("row", "struct"):
            if body is None:
                raise InvalidBody("'value' is null: a message needs a body")
            data, headers = self._codec.encode(body)
        else:
            data, headers = self._encode_raw(body)
        return build_encoded_envelope(self._route, id, data, headers, self._clock, options)

    def _encode_raw(self, body: bytes | str | None) -> tuple[bytes, dict[str, str]]:
        if body is None:
            raise InvalidBody("'value' is null: a message needs a body")
        raw = body.encode() if isinstance(body, str) else body
        if self._validate:
            try:
                self._codec.decode(raw, {})
            except DecodeError as error:
                raise InvalidBody(error.message) from error
        data, headers = self._raw.encode(raw)
        del headers[CONTENT_TYPE]
        return data, headers | ({CONTENT_TYPE: self._content_type} if self._content_type else {})

    def dead_letter(self, id: str, body: Any, options: SendOptions, error: Exception) -> Envelope:
        """Return the dead letter of an invalid row, with the row as its body."""
        raw = body if isinstance(body, bytes) else _as_json(body)
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
    """Return whether the error concerns a single row; other errors fail the whole write."""
    return isinstance(error, QueueError | ValueError) and not isinstance(
        error, Unsupported | ConfigError
    )


def preview(body: object, options: SendOptions) -> str:
    """Return the text of a row for an error message, truncated if it is long."""
    text = (body if isinstance(body, bytes) else _as_json(body)).decode(errors="replace")
    text += f" with {options}" if options else ""
    return text if len(text) <= _PREVIEW_CHARACTERS else f"{text[: _PREVIEW_CHARACTERS - 1]}…"


def _as_json(body: object) -> bytes:
    """Return the value as JSON, with the ``repr`` of values that JSON cannot express."""
    if isinstance(body, str):
        return body.encode(errors="replace")
    return to_json(body, inf_nan_mode="strings", fallback=repr, bytes_mode="base64")


@lru_cache
def _load_model(name: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot load model={name!r}: {error}. The executors must be able to import it too: "
            "install it there, or ship it with spark.submit.pyFiles",
            cause=error,
        ) from error
