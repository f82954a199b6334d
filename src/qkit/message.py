"""What travels: envelopes, the message a handler sees, and the record of a dead letter.

An ``Envelope`` is what crosses the backend boundary. Times in it are wall times, because it
leaves the process; whoever waits for one of them turns it into monotonic time at the boundary.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, cast

from qkit.errors import InvalidHeader, InvalidName

__all__ = [
    "CONTENT_ENCODING",
    "CONTENT_TYPE",
    "FIRST_FAILED_AT",
    "GROUP",
    "RESERVED_PREFIX",
    "TRACEPARENT",
    "DeadLetter",
    "Envelope",
    "LeaseExpired",
    "Message",
    "Reason",
    "Sent",
    "TimeToLiveExpired",
    "check_headers",
    "check_name",
    "encodable",
    "error_text",
    "is_plain",
    "new_id",
    "sent_at",
    "trace_id",
]

CONTENT_TYPE = "content-type"  # absent means application/json
CONTENT_ENCODING = "content-encoding"
TRACEPARENT = "traceparent"
RESERVED_PREFIX = "qkit-"
FIRST_FAILED_AT = "qkit-first-failed-at"
GROUP = "qkit-group"  # on a topic: this copy is for that group alone (a replayed dead letter)

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32_768
MAX_ERROR_TEXT = 2_000

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")  # an HTTP token: legal everywhere
# Control characters and line ends, and lone surrogates, which no encoding can carry.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Sent(NamedTuple):
    """What a send returns once the broker has confirmed it.

    ``position`` counts the messages ahead at equal or higher priority; it is ``None`` where the
    broker does not know, or the message is delayed.
    """

    message_id: str
    position: int | None = None


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


def check_name(name: str, what: str = "channel") -> str:
    """Return ``name`` if every broker can carry it, else raise ``InvalidName``.

    >>> check_name("orders.eu-1")
    'orders.eu-1'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:77]}…"
        raise InvalidName(
            f"{shown} is no {what} name: use 1–200 characters of A-Z a-z 0-9 . _ - "
            "(other than '.' and '..'), so that every broker can carry it"
        )
    return name


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of a caller's ``headers`` if they can travel, else raise ``InvalidHeader``."""
    if not isinstance(headers, Mapping):
        raise InvalidHeader(f"headers are a mapping of str to str, not {type(headers).__name__}")
    if len(headers) > MAX_HEADERS:
        raise InvalidHeader(f"{len(headers)} headers: {MAX_HEADERS} at most; put data in the body")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidHeader(f"header name {name!r:.80}: use letters, digits and - _ . only")
        if name.lower().startswith(RESERVED_PREFIX):
            raise InvalidHeader(f"header {name!r}: names beginning with 'qkit-' are qkit's own")
        if not isinstance(value, str):
            raise InvalidHeader(
                f"header {name!r} has a value of type {type(value).__name__}: pass a str, "
                "and let Annotated[…, Header()] convert it in the handler"
            )
        if not is_plain(value):
            raise InvalidHeader(f"header {name!r} holds a control character: encode its value")
        size += len(name) + len(value.encode())
    if size > MAX_HEADER_BYTES:
        raise InvalidHeader(f"{size} bytes of headers: {MAX_HEADER_BYTES} at most; use the body")
    return dict(headers)


class _Ids:
    """UUIDv7s without dashes: they sort by time, and within one process by order of creation.

    Each millisecond has a random beginning, made once; its ids are that and one of 4096 endings,
    put together in C. That is what makes an id cheap: a send costs a few microseconds in all.
    """

    def __init__(self) -> None:
        self._endings: list[str] = []
        self.reseed()

    def reseed(self) -> None:
        """Forget the past; a forked child must not go on with its parent's numbers."""
        self._lock = threading.Lock()
        self._end = 0  # of the millisecond, in nanoseconds
        self._block = 0
        self._ids: Iterator[str] = iter(())
        self._chances: Iterator[int] = iter(())  # many at once: the system is slow to be asked

    def next(self, time_ns: Callable[[], int] = time.time_ns) -> str:
        now = time_ns()
        if now < self._end:
            id = next(self._ids, None)
            if id is not None:
                return id
        return self._begin(now)

    def _begin(self, now: int) -> str:
        """The first id of another millisecond, or of another block of 4096 in this one.

        The block is the 12 bits behind the version, counted up from a random start with room for
        eight million ids above it; 48 random bits follow. While the clock is behind, because it
        was set back, ids go on where they were.
        """
        with self._lock:
            chance = next(self._chances, None)
            if chance is None:
                self._endings = self._endings or [f"{number:03x}" for number in range(4096)]
                self._chances = iter(array("Q", os.urandom(1024)))
                chance = next(self._chances)
            if now >= self._end:
                millisecond = now // 1_000_000
                self._end = (millisecond + 1) * 1_000_000
                self._block = chance >> 48 & 0x7FF
            else:
                self._block += 1
                if self._block > 0xFFF:
                    self._end, self._block = self._end + 1_000_000, 0
                millisecond = self._end // 1_000_000 - 1
            beginning = f"{millisecond:012x}7{self._block:03x}8{chance & 0xFFFF_FFFF_FFFF:012x}"
            self._ids = map(beginning.__add__, self._endings)
            return next(self._ids)


_ids = _Ids()
new_id = _ids.next
os.register_at_fork(after_in_child=_ids.reseed)


def sent_at(message_id: str) -> float | None:
    """The wall time inside one of qkit's ids; ``None`` for an id of another making."""
    if len(message_id) != 32 or message_id[12] != "7":
        return None
    try:
        return int(message_id[:12], 16) / 1000
    except ValueError:
        return None


def trace_id(headers: Mapping[str, str]) -> str | None:
    """The trace id inside a ``traceparent`` header."""
    parts = headers.get(TRACEPARENT, "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None


def is_plain(text: str) -> bool:
    """Whether ``text`` has neither control characters nor anything that cannot be encoded."""
    return _CONTROL.search(text) is None


def encodable(text: str) -> str:
    r"""Return ``text`` with every lone surrogate as ``\udNNN``, so that UTF-8 can encode it.

    >>> encodable("caf\udce9")
    'caf\\udce9'
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


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


def error_text(error: BaseException) -> str:
    """An error's text as a header or a log can hold it: bounded, control characters visible."""
    try:
        text = str(error)
    except Exception:  # a handler's exception may be broken itself; its message must still be kept
        text = "(this error cannot be shown: its __str__ failed)"
    escaped = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return escaped if len(escaped) <= MAX_ERROR_TEXT else f"{escaped[: MAX_ERROR_TEXT - 1]}…"
