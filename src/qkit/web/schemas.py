"""Response records of the API, from which pydantic derives the JSON and the schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qkit.admin.views import DeadLetterView, MessageView
from qkit.observability.health import ConsumerHealth, Health

__all__ = [
    "ConsumerList",
    "DeadLetterList",
    "ErrorDetail",
    "ErrorResponse",
    "MessageList",
    "Overview",
    "PurgeResult",
    "QueueState",
    "QueueView",
    "ReplayResult",
    "SendResult",
    "TokenCheck",
    "Totals",
]

QueueState = Literal[
    "none", "starting", "consuming", "standby", "paused", "reconnecting", "stopped"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """Statistics and state of one queue; a value is ``None`` if it is unknown.

    ``state`` is the worst state of this service's consumers, or ``none`` if it has no consumer.
    ``published_per_second`` and ``acked_per_second`` are rates since the previous sample. If
    ``counted_by_service`` is true, the broker does not count messages: the rates,
    ``published_total`` and ``acked_total`` then cover this service only. ``messages_retried`` and
    ``messages_failed`` always do. ``error`` is the reason why statistics are missing.
    """

    name: str
    state: QueueState = "none"
    broadcast: bool = False
    depth: int | None = None
    in_flight: int | None = None
    scheduled: int | None = None
    consumers: int | None = None
    oldest_message_age_secs: float | None = None
    avg_wait_time_ms: float | None = None
    published_per_second: float | None = None
    acked_per_second: float | None = None
    counted_by_service: bool = False
    published_total: int = 0
    acked_total: int = 0
    messages_retried: int = 0
    messages_failed: int = 0
    dead_letters: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the listed queues; ``None`` if the value is unknown for all of them."""

    depth: int | None
    in_flight: int | None
    dead_letters: int | None
    messages_retried: int
    published_per_second: float | None
    acked_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """State of the service and its queues at one time.

    At most 200 queues are listed; ``queues_omitted`` counts the others. ``writable`` is true if the
    service has a token for changes. ``error`` is the reason why the queues could not be listed.
    """

    sampled_at: float
    backend: str
    ready: bool
    stopping: bool
    writable: bool
    capabilities: dict[str, str]
    health: Health
    totals: Totals
    queues: list[QueueView] = field(default_factory=list[QueueView])
    queues_omitted: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageList:
    """Next messages of a queue, in delivery order.

    ``truncated`` is true if fewer messages than requested are listed because they are large.
    """

    messages: list[MessageView]
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterList:
    """Dead letters of a channel, in the given order.

    ``order`` is ``oldest`` although the newest were requested, if there are too many to sort.
    """

    dead_letters: list[DeadLetterView]
    order: Literal["oldest", "newest"] = "oldest"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """Id and position of a confirmed message."""

    message_id: str
    position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Number of dead letters that were replayed."""

    replayed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeResult:
    """Number of dead letters that were deleted."""

    purged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerList:
    """Consumers of a channel in this service, after a pause or resume."""

    consumers: list[ConsumerHealth]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCheck:
    """Confirmation that the token of the request is valid, and what it permits."""

    valid: bool
    access: Literal["read", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetail:
    """Name and text of an error."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """Response to a request that was rejected or failed."""

    error: ErrorDetail
