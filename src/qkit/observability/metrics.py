"""Message counters by channel, and snapshots of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

__all__ = ["ChannelCounters", "ChannelMetrics", "Counters", "Metrics"]

MAX_CHANNELS = 1_000
OVERFLOW_CHANNEL = "(other)"  # not a valid channel name


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMetrics:
    """Counters of one channel since the service was created.

    Attributes:
        messages_sent: Sends that were confirmed.
        messages_received: Deliveries.
        messages_failed: Final failures.
        messages_retried: Failed attempts that will be retried.
        messages_dead_lettered: Messages that became dead letters.
        in_flight: Messages that handlers are processing now.

    Example:
        >>> ChannelMetrics(messages_sent=3).messages_sent
        3
    """

    messages_sent: int = 0
    messages_received: int = 0
    messages_failed: int = 0
    messages_retried: int = 0
    messages_dead_lettered: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(ChannelMetrics):
    """Counters of all channels together, and of each channel.

    After 1,000 channels, further channels are counted together as ``(other)``.

    Attributes:
        messages_sent: Sends that were confirmed.
        messages_received: Deliveries.
        messages_failed: Final failures.
        messages_retried: Failed attempts that will be retried.
        messages_dead_lettered: Messages that became dead letters.
        in_flight: Messages that handlers are processing now.
        channels_refused: Sends that were rejected because the service uses too many channels.
        channels: Counters by channel name.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native")) as service:
        ...         await service.send("orders", {"id": 1})
        ...         print(service.metrics().channels["orders"].messages_sent)
        >>> asyncio.run(main())
        1
    """

    channels_refused: int = 0
    channels: dict[str, ChannelMetrics] = field(default_factory=dict[str, ChannelMetrics])


class ChannelCounters:
    """Mutable counters of one channel."""

    __slots__ = ("dead_lettered", "failed", "in_flight", "received", "retried", "sent")

    def __init__(self) -> None:
        self.sent: int = 0
        self.received: int = 0
        self.failed: int = 0
        self.retried: int = 0
        self.dead_lettered: int = 0
        self.in_flight: int = 0

    def snapshot(self) -> ChannelMetrics:
        """Return a snapshot of the counters."""
        return ChannelMetrics(
            messages_sent=self.sent,
            messages_received=self.received,
            messages_failed=self.failed,
            messages_retried=self.retried,
            messages_dead_lettered=self.dead_lettered,
            in_flight=self.in_flight,
        )


class Counters:
    """Counters by channel, for at most ``MAX_CHANNELS`` channels."""

    def __init__(self) -> None:
        self._channels: dict[str, ChannelCounters] = {}
        self.refused = 0

    def for_channel(self, channel: str) -> ChannelCounters:
        """Return the counters of a channel, or shared ones if there are too many channels."""
        found = self._channels.get(channel)
        if found is None:
            name = channel if len(self._channels) < MAX_CHANNELS else OVERFLOW_CHANNEL
            found = self._channels.setdefault(name, ChannelCounters())
        return found

    def snapshot(self) -> Metrics:
        """Return a snapshot of all counters. May be called from any thread."""
        # Copy to a list first: the event loop may add a channel while another thread iterates.
        channels = {name: counters.snapshot() for name, counters in list(self._channels.items())}
        totals: dict[str, int] = {}
        for metrics in channels.values():
            for name, value in asdict(metrics).items():
                totals[name] = totals.get(name, 0) + value
        return Metrics(**totals, channels_refused=self.refused, channels=channels)
