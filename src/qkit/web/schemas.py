"""What the API answers with: plain records, whose JSON and schema pydantic makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qkit.admin.views import DeadLetterView, MessageView
from qkit.observability.health import ConsumerHealth, Health

__all__ = [
    "DeadLetterList",
    "Failure",
    "FailureDetail",
    "MessageList",
    "Overview",
    "Purged",
    "QueueState",
    "QueueView",
    "Replayed",
    "SentView",
    "Steered",
    "TokenCheck",
    "Totals",
]

QueueState = Literal["none", "starting", "consuming", "paused", "reconnecting", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A queue as the pages show it; ``None`` where the backend does not know.

    Rates are messages a second since the look before; with ``own_rates`` the broker does not count
    them, and they, ``sent`` and ``handled`` are what this process did itself. ``state`` is what
    this service's consumers of it do, ``none`` if it has none; ``retried`` and ``failed`` are
    counted by this service. ``problem`` says why figures are missing.
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
    own_rates: bool = False
    sent: int = 0
    handled: int = 0
    retried: int = 0
    failed: int = 0
    dead_letters: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """All queues that are shown, together; ``None`` where it is known of none of them."""

    depth: int | None
    in_flight: int | None
    dead_letters: int | None
    retried: int
    in_rate: float | None
    out_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything at one moment. ``hidden`` counts queues beyond those that are shown."""

    at: float
    backend: str
    ready: bool
    stopping: bool
    writable: bool
    capabilities: dict[str, str]
    health: Health
    totals: Totals
    queues: list[QueueView] = field(default_factory=list[QueueView])
    hidden: int = 0
    problem: str | None = None


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
class TokenCheck:
    """The token that came with the request is the right one."""

    valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDetail:
    """What went wrong: the error's name, and what to do about it."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The answer to a request that was refused or failed."""

    error: FailureDetail
