"""Views of messages and dead letters for the dashboard, the JSON API and the command line.

A body is decompressed and shown as text if possible, up to ``MAX_PREVIEW_BYTES``.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qkit._internal.ids import sent_at
from qkit.message import CONTENT_ENCODING, DeadLetter, Message, trace_id

__all__ = ["BodyView", "DeadLetterView", "MessageView", "body_view"]

MAX_PREVIEW_BYTES = 16_384  # of a decompressed body


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyView:
    """A body as text, or as base64 if it is binary.

    Attributes:
        format: The format of ``content``.
        content: The text of the body.
        size: The size of the body as sent, in bytes.
        truncated: Whether ``content`` is only the beginning of the body.
    """

    format: Literal["json", "text", "base64"]
    content: str
    size: int
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """A message that is waiting in a queue."""

    id: str
    body: BodyView
    headers: Mapping[str, str]
    key: str | None
    priority: int | None
    attempt: int
    sent_at: float | None
    expires_at: float | None
    trace_id: str | None

    @classmethod
    def of(cls, message: Message) -> MessageView:
        """Return the view of a message."""
        return cls(
            id=message.id,
            body=body_view(message.body, message.headers),
            headers=dict(message.headers),
            key=message.key,
            priority=message.priority,
            attempt=message.attempt,
            sent_at=message.sent_at,
            expires_at=message.expires_at,
            trace_id=message.trace_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterView:
    """A dead letter as shown to users."""

    id: str
    channel: str
    group: str | None
    reason: str
    error_type: str | None
    error: str | None
    attempts: int
    first_failed_at: float
    last_failed_at: float
    sent_at: float | None
    body: BodyView
    headers: Mapping[str, str]
    key: str | None
    priority: int | None
    trace_id: str | None

    @classmethod
    def of(cls, letter: DeadLetter) -> DeadLetterView:
        """Return the view of a dead letter."""
        return cls(
            id=letter.message_id,
            channel=letter.channel,
            group=letter.group,
            reason=letter.reason,
            error_type=letter.error_type,
            error=letter.error,
            attempts=letter.attempts,
            first_failed_at=letter.first_failed_at,
            last_failed_at=letter.last_failed_at,
            sent_at=sent_at(letter.message_id),
            body=body_view(letter.body, letter.headers),
            headers=dict(letter.headers),
            key=letter.key,
            priority=letter.priority,
            trace_id=trace_id(letter.headers),
        )


def body_view(body: bytes, headers: Mapping[str, str]) -> BodyView:
    """Return the view of a body, truncated to ``MAX_PREVIEW_BYTES``.

    >>> body_view(b'{"id": 1}', {}).format
    'json'
    """
    data = _decompressed(body, headers)
    shown, truncated = data[:MAX_PREVIEW_BYTES], len(data) > MAX_PREVIEW_BYTES
    try:
        text = shown.decode()
    except UnicodeDecodeError as error:
        # A text body may be cut in the middle of a character.
        if not (truncated and error.start > MAX_PREVIEW_BYTES - 4):
            encoded = base64.b64encode(shown).decode()
            return BodyView(format="base64", content=encoded, size=len(body), truncated=truncated)
        text = shown[: error.start].decode()
    return BodyView(
        format="text" if truncated or not _is_json(text) else "json",
        content=text,
        size=len(body),
        truncated=truncated,
    )


def _decompressed(body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the decompressed beginning of a gzip body; any other body unchanged."""
    if headers.get(CONTENT_ENCODING, "").lower() not in {"gzip", "x-gzip"}:
        return body
    try:
        return zlib.decompressobj(wbits=31).decompress(body, MAX_PREVIEW_BYTES + 1)
    except zlib.error:
        return body


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
