"""``Durations``: histograms of the durations of sends and handler calls, for ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

__all__ = ["BOUNDS_SECONDS", "DurationHistogram", "Durations", "Operation"]

#: Upper bounds of the buckets, in seconds: those of OpenTelemetry's messaging conventions.
BOUNDS_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
MAX_CHANNELS = 1_000
OVERFLOW_CHANNEL = "(other)"  # not a valid channel name

Operation = Literal["send", "process"]


@dataclass(frozen=True, slots=True)
class DurationHistogram:
    """Durations of one operation on one channel, since the service was started.

    Attributes:
        operation: ``"send"`` for sends, ``"process"`` for handler calls.
        channel: The name of the channel.
        counts: Number of durations in each bucket: one bucket for each bound of
            ``BOUNDS_SECONDS``, and one for longer durations.
        total: Sum of all durations, in seconds.

    Example:
        >>> durations = Durations()
        >>> durations.record("send", "orders", 0.004)
        >>> (histogram,) = durations.snapshot()
        >>> histogram.counts[0], histogram.total
        (1, 0.004)
    """

    operation: Operation
    channel: str
    counts: tuple[int, ...]
    total: float


class _Series:
    """Durations of one operation on one channel."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.total = 0.0


class Durations:
    """Mutable histograms by operation and channel, for at most 1,000 channels."""

    def __init__(self) -> None:
        self._series: dict[Operation, dict[str, _Series]] = {"send": {}, "process": {}}

    def record(self, operation: Operation, channel: str, seconds: float) -> None:
        """Add a duration."""
        found = self._series[operation]
        series = found.get(channel)
        if series is None:
            name = channel if len(found) < MAX_CHANNELS else OVERFLOW_CHANNEL
            series = found.setdefault(name, _Series())
        series.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        series.total += seconds

    def snapshot(self) -> list[DurationHistogram]:
        """Return all histograms."""
        return [
            DurationHistogram(operation, channel, tuple(series.counts), series.total)
            for operation, found in self._series.items()
            for channel, series in list(found.items())
        ]
