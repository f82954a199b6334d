"""What the API answers with: plain records, whose JSON and schema pydantic makes."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qkit.health import ConsumerHealth, Health
from qkit.message import CONTENT_ENCODING, DeadLetter, Message, sent_at, trace_id

__all__ = [
    "BodyView",
    "DeadLetterList",
    "DeadLetterView",
    "Failure",
    "FailureDetail",
    "MessageList",
    "MessageView",
    "Overview",
    "Purged",
    "QueueState",
    "QueueView",
    "Replayed",
    "SentView",
    "Steered",
    "Totals",
]

QueueState = Literal["none", "starting", "consuming", "paused", "reconnecting", "stopped"]
SHOWN = 16_384  # bytes of a body on a page; the rest is only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A queue as the pages show it; ``None`` where the backend does not know.

    Rates are messages a second since the look before. ``state`` is what this service's consumers
    of it do, ``none`` if it has none; ``retried`` and ``failed`` are counted by this service.
    ``problem`` says why figures are missing.
    """

    name: str
    state: QueueState = "none"
    broadcast: bool = False
    depth: int | None = None
    in_flight: int | None = None
    scheduled: int | None = None
    consumers: int | None = None
    oldest_seconds: float | None = None
    wait_ms: float | None = None
    in_rate: float | None = None
    out_rate: float | None = None
    sent: int = 0
    handled: int = 0
    retried: int = 0
    failed: int = 0
    dead_letters: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """All queues that are shown, together."""

    depth: int = 0
    in_flight: int = 0
    dead_letters: int = 0
    retried: int = 0
    in_rate: float = 0.0
    out_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything at one moment. ``hidden`` counts queues beyond those that are shown."""

    at: float
    backend: str
    ready: bool
    stopping: bool
    writable: bool
    health: Health
    totals: Totals
    queues: list[QueueView] = field(default_factory=list[QueueView])
    hidden: int = 0
    problem: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageList:
    """The next messages of a queue in the order of delivery."""

    messages: list[MessageView]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterList:
    """The oldest dead letters that were asked for."""

    dead_letters: list[DeadLetterView]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentView:
    """A message that the broker has confirmed."""

    message_id: str
    position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How many dead letters were sent again."""

    replayed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """How many dead letters were deleted."""

    purged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """The consumers of a channel after it was paused or resumed."""

    consumers: list[ConsumerHealth]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDetail:
    """What went wrong: the error's name, and what to do about it."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The answer to a request that was refused or failed."""

    error: FailureDetail


def body_view(body: bytes, headers: Mapping[str, str]) -> BodyView:
    """A body for people, never more than a page's worth of it.

    >>> body_view(b'{"id": 1}', {}).format
    'json'
    """
    opened = _opened(body, headers)
    shown, cut = opened[:SHOWN], len(opened) > SHOWN
    try:
        text = shown.decode()
    except UnicodeDecodeError as error:
        if not (cut and error.start > SHOWN - 4):  # a character cut in two is no binary body
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
        return zlib.decompressobj(wbits=31).decompress(body, SHOWN + 1)
    except zlib.error:
        return body


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
