"""Messages and dead letters as people see them: on a page, or in a terminal.

A body is shown as text where it is text, opened if it was compressed, and never further than a
screenful of it.
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

MAX_PREVIEW_BYTES = 16_384  # bytes of a body; the rest is only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyView:
    """A body that can be shown: as text, or as base64 where it is none.

    ``size`` is that of the message; ``cut`` says that ``content`` is not all of it.
    """

    format: Literal["json", "text", "base64"]
    content: str
    size: int
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """A message that waits."""

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
        """A message as it was peeked."""
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
    """A message that failed for good."""

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
        """A letter as it lies in its queue."""
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
    """A body for people, never more than a page's worth of it.

    >>> body_view(b'{"id": 1}', {}).format
    'json'
    """
    opened = _opened(body, headers)
    shown, cut = opened[:MAX_PREVIEW_BYTES], len(opened) > MAX_PREVIEW_BYTES
    try:
        text = shown.decode()
    except UnicodeDecodeError as error:
        if not (
            cut and error.start > MAX_PREVIEW_BYTES - 4
        ):  # a character cut in two is no binary body
            encoded = base64.b64encode(shown).decode()
            return BodyView(format="base64", content=encoded, size=len(body), cut=cut)
        text = shown[: error.start].decode()
    return BodyView(
        format="text" if cut or not _is_json(text) else "json",
        content=text,
        size=len(body),
        cut=cut,
    )


def _opened(body: bytes, headers: Mapping[str, str]) -> bytes:
    """The beginning of the body as it was before gzip; as it is if it cannot be opened."""
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
