"""How a service is doing: counters, the state of its connection, and the answer to a probe."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit.message import error_text
from qkit.observability.events import Events, Reconnected, StateChanged

__all__ = [
    "ChannelMetrics",
    "Connection",
    "ConnectionState",
    "ConsumerHealth",
    "Counters",
    "Failures",
    "Health",
    "Metrics",
]

MAX_CHANNELS = 1_000
#: A consumer is unhealthy if a settlement has been failing for so long.
UNHEALTHY_AFTER_SECONDS = 10.0
#: A failed settlement that is not repeated counts for so long: another consumer has the message.
FORGET_AFTER_SECONDS = 60.0
OTHER = "(other)"  # no channel can be named so


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMetrics:
    """One channel's counters since the service was made.

    ``messages_retried`` counts failed attempts that will be tried again, ``messages_failed``
    final failures, ``in_flight`` handler calls running now.
    """

    messages_sent: int = 0
    messages_received: int = 0
    messages_failed: int = 0
    messages_retried: int = 0
    messages_dead_lettered: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(ChannelMetrics):
    """All channels together, and each by itself.

    Beyond a thousand channels the rest is counted together under ``(other)``.
    ``channels_refused`` counts sends to yet another channel when a service has used all it may.
    """

    channels_refused: int = 0
    channels: dict[str, ChannelMetrics] = field(default_factory=dict[str, ChannelMetrics])


class ChannelCounters:
    """The live counters of one channel."""

    __slots__ = ("dead_lettered", "failed", "in_flight", "received", "retried", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self.failed = 0
        self.retried = 0
        self.dead_lettered = 0
        self.in_flight = 0

    def snapshot(self) -> ChannelMetrics:
        """The counters as they stand."""
        return ChannelMetrics(
            messages_sent=self.sent,
            messages_received=self.received,
            messages_failed=self.failed,
            messages_retried=self.retried,
            messages_dead_lettered=self.dead_lettered,
            in_flight=self.in_flight,
        )


class Counters:
    """The counters of every channel, bounded in number."""

    def __init__(self) -> None:
        self._channels: dict[str, ChannelCounters] = {}
        self.refused = 0

    def of(self, channel: str) -> ChannelCounters:
        """The counters of a channel; those of the crowd once there are too many."""
        found = self._channels.get(channel)
        if found is None:
            name = channel if len(self._channels) < MAX_CHANNELS else OTHER
            found = self._channels.setdefault(name, ChannelCounters())
        return found

    def snapshot(self) -> Metrics:
        """All counters as they stand."""
        # A list first: another thread may ask while the loop's adds a channel.
        channels = {name: counters.snapshot() for name, counters in list(self._channels.items())}
        totals: dict[str, int] = {}
        for metrics in channels.values():
            for name, value in asdict(metrics).items():
                totals[name] = totals.get(name, 0) + value
        return Metrics(**totals, channels_refused=self.refused, channels=channels)


class ConnectionState(StrEnum):
    """Where the connection to the broker stands."""

    DISCONNECTED = "disconnected"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    CLOSING = "closing"
    CLOSED = "closed"


class Connection:
    """Follows the connection from what calls to the backend meet, and tells of each change."""

    def __init__(self, events: Events, clock: Clock, backend: str) -> None:
        self.state = ConnectionState.DISCONNECTED
        self.last_success_at: float | None = None
        self.last_error: str | None = None
        self.disconnected_at: float | None = None
        self._lost_at: float | None = None
        self._events = events
        self._clock = clock
        self._backend = backend

    def worked(self) -> None:
        """A call got its answer."""
        if self.state is ConnectionState.DISCONNECTED:
            self.move(ConnectionState.CONNECTED)

    def failed(self, error: BaseException) -> None:
        """A call met a broken connection."""
        self.last_error = f"{type(error).__name__}: {error_text(error)}"
        if self.state is ConnectionState.CONNECTED or self.state is ConnectionState.CONNECTING:
            self.move(ConnectionState.DISCONNECTED)

    def carried(self) -> None:
        """A message was sent or settled."""
        self.last_success_at = self._clock.time()

    def move(self, new: ConnectionState) -> None:
        """Enter a state: remember since when, log it, tell the listeners."""
        old = self.state
        if new is old:
            return
        self.state = new
        error = self.last_error if new is ConnectionState.DISCONNECTED else None
        if new is ConnectionState.DISCONNECTED:
            self.disconnected_at = self._clock.time()
            if old is ConnectionState.CONNECTED:  # else there was nothing to lose
                self._lost_at = self._clock.monotonic()
        logger.log(
            logging.WARNING if error else logging.INFO,
            "connection to %s: %s -> %s",
            self._backend,
            old,
            new,
            extra={"backend": self._backend, "old": str(old), "new": str(new), "error": error},
        )
        self._events.emit(StateChanged(str(old), str(new), error))
        if new is ConnectionState.CONNECTED:
            self.disconnected_at = None
            if self._lost_at is not None:
                self._events.emit(Reconnected(self._clock.monotonic() - self._lost_at))
                self._lost_at = None


@dataclass(slots=True)
class _Failure:
    since: float
    last: float
    text: str
    repeated: bool


class Failures:
    """Settlements of one consumer that are failing now, by what is being settled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[object, _Failure] = {}

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, what: object, text: str, error: BaseException, *, repeated: bool = True) -> None:
        """Record that ``what`` failed, again or for the first time.

        Args:
            what: Identifies the settlement until ``remove``.
            text: What failed, for people.
            error: Why.
            repeated: Whether it is tried again until it succeeds. If not, it is forgotten a minute
                after its last failure.
        """
        now = self._clock.monotonic()
        known = self._failures.get(what)
        since = now if known is None else known.since
        text = f"{text}: {type(error).__name__}: {error_text(error)}"
        self._failures[what] = _Failure(since, now, text, repeated)

    def remove(self, what: object) -> None:
        """Record that ``what`` succeeded, or is not tried any more."""
        self._failures.pop(what, None)

    def lasting(self) -> str | None:
        """Return what has been failing for ten seconds or longer. May be called from any thread."""
        now = self._clock.monotonic()
        for failure in list(self._failures.values()):
            recent = failure.repeated or now - failure.last < FORGET_AFTER_SECONDS
            if recent and now - failure.since >= UNHEALTHY_AFTER_SECONDS:
                return f"{failure.text} (failing for {now - failure.since:.0f} s)"
        return None


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
