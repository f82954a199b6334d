"""``Health`` and ``ConsumerHealth``: the answer to a probe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qkit.observability.connection_state import ConnectionState

__all__ = ["ConsumerHealth", "Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHealth:
    """One consumer: whether it is subscribed, and when it last polled and settled (wall time).

    ``failing`` says what is wrong if its acks or dead-letter writes have been failing for ten
    seconds, or if it cannot read its queue at all.
    """

    channel: str
    group: str
    state: Literal["starting", "consuming", "paused", "reconnecting", "stopped"]
    in_flight: int
    last_poll_at: float | None
    last_settle_at: float | None
    failing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer to "how is this service?".

    ``healthy`` means connected, every consumer consuming (or paused on purpose), and none of them
    ``failing``.
    """

    status: Literal["healthy", "unhealthy"]
    connection_state: ConnectionState
    durable: bool
    breaker: str
    last_success_at: float | None = None
    last_error: str | None = None
    disconnected_at: float | None = None
    consumers: list[ConsumerHealth] = field(default_factory=list[ConsumerHealth])
