"""Counters for each channel, and their snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

__all__ = ["ChannelCounters", "ChannelMetrics", "Counters", "Metrics"]

MAX_CHANNELS = 1_000
OVERFLOW_CHANNEL = "(other)"  # no channel can be named so


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

    def for_channel(self, channel: str) -> ChannelCounters:
        """The counters of a channel; those of the crowd once there are too many."""
        found = self._channels.get(channel)
        if found is None:
            name = channel if len(self._channels) < MAX_CHANNELS else OVERFLOW_CHANNEL
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
