"""Messages: the envelope that backends carry, the message that handlers see, and dead letters.

Times are wall-clock times in seconds since the epoch, because envelopes leave the process. Backends
convert them to monotonic time for waiting.
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

CONTENT_TYPE = "content-type"  # default: application/json
CONTENT_ENCODING = "content-encoding"
TRACEPARENT = "traceparent"
FIRST_FAILED_AT = "qkit-first-failed-at"
GROUP = "qkit-group"  # on a topic, only this group receives the message (a replayed dead letter)


@dataclass(slots=True)
class Envelope:
    """A message as backends carry it.

    Attributes:
        id: Message id.
        body: Encoded body.
        headers: Headers; empty by default.
        key: Messages with the same key keep their order in an ordered channel.
        priority: Messages with a higher priority are delivered first; ``None`` for the default.
        not_before: Earliest time of delivery, in seconds since the epoch; ``None`` for no delay.
        expires_at: Time at which the message expires, in seconds since the epoch; ``None`` for
            never.
        attempt: Number of this delivery, counted from 1. The backend sets it on receipt.

    Example:
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
    """A message as handlers and middleware see it, in addition to its decoded body.

    Attributes:
        id: Message id.
        channel: Name of the channel.
        body: Encoded body, decompressed.
        headers: Headers; empty by default.
        key: Key that the message was sent with.
        priority: Priority that the message was sent with.
        attempt: Number of this attempt, counted from 1.
        max_attempts: Attempts that the channel allows.
        expires_at: Time at which the message expires, in seconds since the epoch; ``None`` for
            never.

    Example:
        >>> message = Message(id="0190", channel="orders", body=b"{}", attempt=2, max_attempts=3)
        >>> message.attempt < message.max_attempts
        True
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
        """Number of earlier attempts.

        Example:
            >>> Message(id="0190", channel="orders", body=b"{}", attempt=2).retry_count
            1
        """
        return self.attempt - 1

    @property
    def sent_at(self) -> float | None:
        """Time of the send, in seconds since the epoch; ``None`` for a foreign message.

        Example:
            >>> Message(id="their-id", channel="orders", body=b"{}").sent_at is None
            True
        """
        return sent_at(self.id)

    @property
    def trace_id(self) -> str | None:
        """Id of the W3C trace that the message belongs to, ``None`` if its sender was not traced.

        Example:
            >>> headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
            >>> Message(id="0190", channel="orders", body=b"{}", headers=headers).trace_id
            '0af7651916cd43dd8448eb211c80319c'
        """
        return trace_id(self.headers)

    def replace(self, *, body: bytes) -> Message:
        """Return a copy with another body, for middleware that decrypts or rewrites bodies.

        Args:
            body: Encoded body of the copy.

        Returns:
            The copy.

        Example:
            >>> Message(id="0190", channel="orders", body=b"{}").replace(body=b"[]").body
            b'[]'
        """
        return replace(self, body=body)


class Reason(StrEnum):
    """Why a message became a dead letter.

    Attributes:
        MAX_RETRIES_EXCEEDED: The last attempt failed.
        EXPLICIT_NACK: The handler raised ``Reject``.
        TTL_EXPIRED: The message expired before it was handled.
        UNDECODABLE: The body does not decode to the type that the handler takes.
        REJECTED: The handler raised an error that the channel lists in ``dead_on``.

    Example:
        >>> Reason("TTLExpired")
        <Reason.TTL_EXPIRED: 'TTLExpired'>
    """

    MAX_RETRIES_EXCEEDED = "MaxRetriesExceeded"
    EXPLICIT_NACK = "ExplicitNack"
    TTL_EXPIRED = "TTLExpired"
    UNDECODABLE = "Undecodable"
    REJECTED = "Rejected"


class LeaseExpired(Exception):
    """The lease of the last allowed delivery expired. Recorded in dead letters, never raised."""


class TimeToLiveExpired(Exception):
    """The TTL passed before the message was handled. Recorded in dead letters, never raised."""


_DEAD_CHANNEL = "qkit-dead-channel"
_DEAD_REASON = "qkit-dead-reason"
_DEAD_ERROR_TYPE = "qkit-dead-error-type"
_DEAD_ERROR = "qkit-dead-error"
_DEAD_ATTEMPTS = "qkit-dead-attempts"
_DEAD_AT = "qkit-dead-at"
_DEAD_PRIORITY = "qkit-dead-priority"
_DEAD_HEADERS = "qkit-dead-headers"  # all headers as JSON, if the broker rejected one of them


@dataclass(slots=True, frozen=True)
class DeadLetter:
    """A message that failed for good, with its error. The record is the same on every backend.

    In the dead-letter queue it is the original message with the details of the failure in
    ``qkit-dead-*`` headers, so that the broker's own tools can show them.

    Attributes:
        message_id: Id of the message.
        channel: Channel that the message was sent to.
        group: Group whose handler failed, for a topic; otherwise ``None``.
        reason: A value of ``Reason``, or ``Unknown`` if another program wrote the record.
        error_type: Class name of the last error, ``None`` if unknown.
        error: Text of the last error, ``None`` if unknown.
        attempts: Number of attempts.
        first_failed_at: Time of the first failure, in seconds since the epoch.
        last_failed_at: Time of the last failure, in seconds since the epoch.
        trace_id: Id of the W3C trace that the message belongs to, if any.
        body: Encoded body, unchanged.
        headers: Headers of the message.
        key: Key of the message.
        priority: Priority of the message.

    Example:
        >>> letter = DeadLetter.of(
        ...     Envelope(id="0190", body=b"{}"), channel="orders", reason=Reason.EXPLICIT_NACK,
        ...     error=ValueError("negative total"), at=1_700_000_000.0)
        >>> letter.error_type, letter.error
        ('ValueError', 'negative total')
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
        """Build the record of a final failure.

        Args:
            envelope: The message.
            channel: Channel that the message was sent to.
            reason: Why the message failed.
            at: Time of the failure, in seconds since the epoch.
            error: The last error.
            group: Group whose handler failed, for a topic.
            called: Whether the last delivery reached a handler. If not, it does not count as an
                attempt.

        Returns:
            The record.

        Example:
            >>> letter = DeadLetter.of(
            ...     Envelope("0190", b"{}"), channel="orders", reason=Reason.TTL_EXPIRED,
            ...     at=1_700_000_000.0, called=False)
            >>> letter.attempts
            0
        """
        # Text that cannot be encoded would prevent every backend from storing the letter.
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
        """Return the record with all headers combined into a single header, as JSON.

        Used when the broker rejects one of the headers.

        Returns:
            A copy, or the record itself if its headers are already combined.

        Example:
            >>> letter = DeadLetter.from_envelope(Envelope("0190", b"{}", {"tenant": "acme"}))
            >>> dict(letter.with_plain_headers().headers)
            {'qkit-dead-headers': '{"tenant": "acme"}'}
        """
        if set(self.headers) == {_DEAD_HEADERS}:
            return self
        return replace(self, headers={_DEAD_HEADERS: json.dumps(dict(self.headers))})

    def to_envelope(self) -> Envelope:
        """Return the record as the dead-letter queue stores it, without delay or expiry.

        The priority becomes a header, so that dead letters are ordered by age.

        Example:
            >>> letter = DeadLetter.from_envelope(Envelope("0190", b"{}"), channel="orders")
            >>> DeadLetter.from_envelope(letter.to_envelope()) == letter
            True
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
        """Read a record from the dead-letter queue.

        Args:
            envelope: A message of the dead-letter queue. Its details are unknown if another program
                put it there.
            channel: Channel of the record, if the envelope does not name one.

        Returns:
            The record.

        Example:
            >>> DeadLetter.from_envelope(Envelope("their-id", b"{}"), channel="orders").reason
            'Unknown'
        """
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
        """Return the message to replay: same id, first attempt, no record of the failure.

        It does not expire, because a user who replays an expired message wants it handled.

        Example:
            >>> DeadLetter.from_envelope(Envelope("0190", b"{}")).to_replay()
            Envelope(id='0190', body=b'{}', headers={}, key=None, priority=None, ...)
        """
        headers = dict(self.headers)
        if self.group is not None:
            headers[GROUP] = self.group
        return Envelope(self.message_id, self.body, headers, key=self.key, priority=self.priority)


def trace_id(headers: Mapping[str, str]) -> str | None:
    """Return the trace id of the ``traceparent`` header, ``None`` if it is missing or invalid."""
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
