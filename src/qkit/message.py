"""What travels: envelopes, the message a handler sees, and the record of a dead letter.

An ``Envelope`` is what crosses the backend boundary. Times in it are wall times, because it
leaves the process; whoever waits for one of them turns it into monotonic time at the boundary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from qkit._internal.ids import sent_at
from qkit._internal.sent import Sent
from qkit._internal.text import encodable, error_text

__all__ = [
    "CONTENT_ENCODING",
    "CONTENT_TYPE",
    "FIRST_FAILED_AT",
    "GROUP",
    "TRACEPARENT",
    "DeadLetter",
    "Envelope",
    "LeaseExpired",
    "Message",
    "Reason",
    "Sent",
    "TimeToLiveExpired",
    "trace_id",
]

CONTENT_TYPE = "content-type"  # absent means application/json
CONTENT_ENCODING = "content-encoding"
TRACEPARENT = "traceparent"
FIRST_FAILED_AT = "qkit-first-failed-at"
GROUP = "qkit-group"  # on a topic: this copy is for that group alone (a replayed dead letter)


@dataclass(slots=True)
class Envelope:
    """A message as backends carry it.

    ``not_before`` and ``expires_at`` are seconds since the epoch; ``attempt`` is 1 on the first
    delivery and counts deliveries, so it is the backend's to fill in on receipt.

    >>> Envelope(id="0190", body=b"{}").attempt
    1
    """

    id: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict[str, str])
    key: str | None = None
    priority: int | None = None
    not_before: float | None = None
    expires_at: float | None = None
    attempt: int = 1


@dataclass(slots=True, frozen=True)
class Message:
    """A message as handlers and middleware see it, beside its decoded body.

    ``body`` is the bytes as sent, after decompression; ``max_attempts`` is the channel's limit.

    >>> message = Message(id="0190", channel="orders", body=b"{}", attempt=2)
    >>> message.retry_count
    1
    """

    id: str
    channel: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    key: str | None = None
    priority: int | None = None
    attempt: int = 1
    max_attempts: int = 1
    expires_at: float | None = None

    @property
    def retry_count(self) -> int:
        """How often the message was delivered before."""
        return self.attempt - 1

    @property
    def sent_at(self) -> float | None:
        """When it was sent, in seconds since the epoch; ``None`` if another program sent it."""
        return sent_at(self.id)

    @property
    def trace_id(self) -> str | None:
        """The W3C trace it belongs to, if its sender was traced."""
        return trace_id(self.headers)

    def replace(self, *, body: bytes) -> Message:
        """A copy with another body, for middleware that decrypts or rewrites."""
        return replace(self, body=body)


class Reason(StrEnum):
    """Why a message became a dead letter."""

    MAX_RETRIES_EXCEEDED = "MaxRetriesExceeded"
    EXPLICIT_NACK = "ExplicitNack"
    TTL_EXPIRED = "TTLExpired"
    UNDECODABLE = "Undecodable"


class LeaseExpired(Exception):
    """The last delivery that was allowed ended without an answer. Recorded, never raised."""


class TimeToLiveExpired(Exception):
    """The message was not handled within its time to live. Recorded, never raised."""


_DEAD_CHANNEL = "qkit-dead-channel"
_DEAD_REASON = "qkit-dead-reason"
_DEAD_ERROR_TYPE = "qkit-dead-error-type"
_DEAD_ERROR = "qkit-dead-error"
_DEAD_ATTEMPTS = "qkit-dead-attempts"
_DEAD_AT = "qkit-dead-at"
_DEAD_PRIORITY = "qkit-dead-priority"
_DEAD_HEADERS = "qkit-dead-headers"  # the message's headers as JSON, where they were refused


@dataclass(slots=True, frozen=True)
class DeadLetter:
    """The same record on every backend: what failed, why, how often, and the untouched body.

    On the wire it is an envelope: the message as it was, with the facts in ``qkit-dead-*``
    headers, so that any tool of the broker can show them.

    >>> letter = DeadLetter.of(
    ...     Envelope(id="0190", body=b"{}"), channel="orders", reason=Reason.EXPLICIT_NACK,
    ...     error=ValueError("negative total"), at=1_700_000_000.0)
    >>> DeadLetter.from_envelope(letter.to_envelope()) == letter
    True
    """

    message_id: str
    channel: str
    group: str | None
    reason: str
    error_type: str | None
    error: str | None
    attempts: int
    first_failed_at: float
    last_failed_at: float
    trace_id: str | None
    body: bytes
    headers: Mapping[str, str]
    key: str | None = None
    priority: int | None = None

    @classmethod
    def of(
        cls,
        envelope: Envelope,
        *,
        channel: str,
        reason: Reason,
        at: float,
        error: BaseException | None = None,
        group: str | None = None,
        called: bool = True,
    ) -> DeadLetter:
        """The record of ``envelope``'s final failure at the wall time ``at``.

        Without ``called`` its last delivery reached no handler, and is no attempt.
        """
        # What no encoder takes would keep the letter from being written, on any backend.
        headers = {encodable(name): encodable(text) for name, text in envelope.headers.items()}
        first = _number(headers.pop(FIRST_FAILED_AT, None), at)
        headers.pop(GROUP, None)
        return cls(
            message_id=encodable(envelope.id),
            channel=channel,
            group=group,
            reason=reason,
            error_type=type(error).__qualname__ if error is not None else None,
            error=error_text(error) if error is not None else None,
            attempts=envelope.attempt - (not called),
            first_failed_at=first,
            last_failed_at=at,
            trace_id=trace_id(headers),
            body=envelope.body,
            headers=headers,
            key=None if envelope.key is None else encodable(envelope.key),
            priority=envelope.priority,
        )

    def with_plain_headers(self) -> DeadLetter:
        """The record with all headers in one, as JSON: for a broker that refuses one of them."""
        if set(self.headers) == {_DEAD_HEADERS}:
            return self
        return replace(self, headers={_DEAD_HEADERS: json.dumps(dict(self.headers))})

    def to_envelope(self) -> Envelope:
        """The record as it lies in the dead-letter queue; it never expires or waits there.

        Its priority is among the facts, not the envelope's own: dead letters lie by their age.
        """
        headers = dict(self.headers)
        headers[_DEAD_CHANNEL] = self.channel
        headers[_DEAD_REASON] = self.reason
        headers[_DEAD_ATTEMPTS] = str(self.attempts)
        headers[_DEAD_AT] = repr(self.last_failed_at)
        headers[FIRST_FAILED_AT] = repr(self.first_failed_at)
        if self.group is not None:
            headers[GROUP] = self.group
        if self.error_type is not None:
            headers[_DEAD_ERROR_TYPE] = self.error_type
        if self.error is not None:
            headers[_DEAD_ERROR] = self.error
        if self.priority is not None:
            headers[_DEAD_PRIORITY] = str(self.priority)
        return Envelope(self.message_id, self.body, headers, key=self.key)

    @classmethod
    def from_envelope(cls, envelope: Envelope, *, channel: str = "") -> DeadLetter:
        """Read a record back, also one that another program put there (then most is unknown)."""
        headers = dict(envelope.headers)
        if _DEAD_HEADERS in headers:
            headers.update(_headers(headers.pop(_DEAD_HEADERS)))
        at = _number(headers.pop(_DEAD_AT, None), sent_at(envelope.id) or 0.0)
        priority = _number(headers.pop(_DEAD_PRIORITY, None), -1)
        return cls(
            message_id=envelope.id,
            channel=headers.pop(_DEAD_CHANNEL, channel),
            group=headers.pop(GROUP, None),
            reason=headers.pop(_DEAD_REASON, "Unknown"),
            error_type=headers.pop(_DEAD_ERROR_TYPE, None),
            error=headers.pop(_DEAD_ERROR, None),
            attempts=int(_number(headers.pop(_DEAD_ATTEMPTS, None), 1)),
            first_failed_at=_number(headers.pop(FIRST_FAILED_AT, None), at),
            last_failed_at=at,
            trace_id=trace_id(headers),
            body=envelope.body,
            headers=headers,
            key=envelope.key,
            priority=int(priority) if priority >= 0 else None,
        )

    def to_replay(self) -> Envelope:
        """The message as it will be sent again: same id, first attempt, no trace of the failure.

        Its expiry is gone: a person who replays an expired message wants it handled.
        """
        headers = dict(self.headers)
        if self.group is not None:
            headers[GROUP] = self.group
        return Envelope(self.message_id, self.body, headers, key=self.key, priority=self.priority)


def trace_id(headers: Mapping[str, str]) -> str | None:
    """The trace id inside a ``traceparent`` header."""
    parts = headers.get(TRACEPARENT, "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None


def _headers(text: str) -> dict[str, str]:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    pairs = cast("dict[str, object]", found).items() if isinstance(found, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _number(text: str | None, default: float) -> float:
    try:
        number = float(text) if text is not None else default
    except ValueError:
        return default
    return number if math.isfinite(number) else default
