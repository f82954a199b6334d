"""Offset tracking for one partition whose messages are settled in any order.

For each group and partition, Kafka stores one committed offset, before which all messages are
settled. It is the offset of the oldest unsettled message, so one slow message holds it back while
later messages are settled. The metadata of the commit lists the later messages that are still
unsettled. The next consumer of the partition skips the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["CommittedOffset", "OffsetTracker", "count_unsettled"]

METADATA_LIMIT: Final = 4_096  # bytes; Kafka's default for offset.metadata.max.bytes
_METADATA: Final = re.compile(r"qk1 (\d{1,18}) (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


class CommittedOffset(NamedTuple):
    """Committed offset of one partition, with its metadata, as the coordinator stores it."""

    offset: int
    metadata: str = ""


class OffsetTracker:
    """State of one partition while it is assigned to this consumer.

    Args:
        start: First offset to read.
        metadata: Metadata of the commit at ``start``.
        saved: Last commit that the coordinator has stored, if any.

    >>> tracker = OffsetTracker(7)
    >>> for offset in (7, 8, 9):
    ...     tracker.read(offset)
    >>> tracker.settle(8)
    >>> tracker.snapshot()
    CommittedOffset(offset=7, metadata='qk1 3 0,2')
    >>> tracker.settle(7), tracker.settle(9)
    (None, None)
    >>> tracker.snapshot()
    CommittedOffset(offset=10, metadata='')
    """

    __slots__ = ("_unsettled", "_window_end", "end", "held", "lost", "pending", "saved", "start")

    def __init__(
        self, start: int, metadata: str = "", saved: CommittedOffset | None = None
    ) -> None:
        self.start: CommittedOffset = CommittedOffset(start)
        #: Offset after the last message that was read or skipped.
        self.end: int = start
        #: Messages that were read and not settled, by offset. The caller of ``read`` chooses the
        #: values.
        self.pending: dict[int, object] = {}
        #: Number of pending messages that are in flight.
        self.held: int = 0
        #: Last commit that the coordinator is known to have stored.
        self.saved: CommittedOffset | None = saved
        #: Whether this consumer has lost the partition; another consumer may have it.
        self.lost: bool = False
        self._window_end, self._unsettled = _parse(start, metadata)

    def is_settled(self, offset: int) -> bool:
        """Return whether a previous consumer of the partition has settled this offset."""
        return offset < self._window_end and offset not in self._unsettled

    def read(self, offset: int, message: object = None) -> None:
        """Record that a message was read and must be settled before its offset is committed."""
        self.pending[offset] = message
        self.end = offset + 1

    def skip_to(self, offset: int) -> None:
        """Treat all unread messages before ``offset`` as settled."""
        self.end = max(self.end, offset)

    def settle(self, offset: int) -> None:
        """Record that the message at ``offset`` is settled."""
        self.pending.pop(offset, None)

    def snapshot(self) -> CommittedOffset:
        """Return the commit that describes the current state."""
        unread = [offset for offset in self._unsettled if offset >= self.end]
        unsettled = sorted([*self.pending, *unread])
        end = max(self.end, self._window_end)
        if not unsettled:
            return CommittedOffset(end)
        mark = unsettled[0]
        if end - mark == len(unsettled):
            return CommittedOffset(mark)  # all messages from the mark on are unsettled
        return CommittedOffset(mark, _describe(mark, end, unsettled))

    def unsaved(self) -> CommittedOffset | None:
        """Return the commit to make, or ``None`` if the coordinator is up to date."""
        now = self.snapshot()
        if now == self.saved or (self.saved is None and now == self.start):
            return None
        return now


def count_unsettled(saved: CommittedOffset, begin: int, end: int) -> int:
    """Return how many messages from ``begin`` up to ``end``, exclusive, are unsettled by a commit.

    >>> count_unsettled(CommittedOffset(7, "qk1 3 0,2"), begin=0, end=12)
    4
    """
    until, unsettled = _parse(saved.offset, saved.metadata)
    first = max(saved.offset, begin)
    known = max(first, min(until, end))
    return max(0, end - known) + sum(1 for offset in unsettled if first <= offset < end)


def _describe(mark: int, end: int, unsettled: list[int]) -> str:
    """Return commit metadata: the length of a window and the unsettled offsets in it.

    The window starts at the mark, and the offsets are relative to it. If the text would exceed
    ``METADATA_LIMIT``, the window is shortened. Settled messages after the window are then
    delivered again if another consumer continues from this commit.
    """
    ranges: list[str] = []
    length = len("qk1 ") + len(str(end - mark)) + 1
    for first, last in _runs(unsettled):
        text = str(first - mark) if first == last else f"{first - mark}-{last - mark}"
        length += len(text) + 1
        if length > METADATA_LIMIT:
            end = first
            break
        ranges.append(text)
    return f"qk1 {end - mark} {','.join(ranges)}"


def _runs(offsets: list[int]) -> Iterable[tuple[int, int]]:
    first = last = offsets[0]
    for offset in offsets[1:]:
        if offset != last + 1:
            yield first, last
            first = offset
        last = offset
    yield first, last


def _parse(mark: int, metadata: str) -> tuple[int, frozenset[int]]:
    """Parse the metadata of a commit; return the end of the window and its unsettled offsets.

    The window is empty if the metadata is missing or was not written by qkit.
    """
    found = _METADATA.fullmatch(metadata)
    if found is None:
        return mark, frozenset()
    window_end = mark + int(found[1])
    unsettled: set[int] = set()
    for text in found[2].split(","):
        first, _, last = text.partition("-")
        low, high = mark + int(first), mark + int(last or first)
        if high >= window_end or high - low > 1_000_000:
            return mark, frozenset()
        unsettled.update(range(low, high + 1))
    return window_end, frozenset(unsettled)
