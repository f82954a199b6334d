"""What of one partition is settled: out of order, committed as a low-water mark with its gaps.

Kafka knows one number for a group and a partition: everything below it is done. The mark is the
oldest message that is still held, so a slow one pins it while others finish behind it. What they
finished travels in the commit's metadata: whoever takes the partition over skips it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["CommittedOffset", "OffsetTracker", "count_unsettled"]

METADATA_LIMIT: Final = 4_096  # bytes, Kafka's own default
_METADATA: Final = re.compile(r"qk1 (\d{1,18}) (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


class CommittedOffset(NamedTuple):
    """A commit as the group's coordinator keeps it."""

    offset: int
    metadata: str = ""


class OffsetTracker:
    """One partition while this consumer has it.

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

    __slots__ = ("_gone_until", "_left", "end", "held", "lost", "pending", "saved", "start")

    def __init__(
        self, start: int, metadata: str = "", saved: CommittedOffset | None = None
    ) -> None:
        self.start = CommittedOffset(start)
        self.end = start  # the offset after the last that was read
        self.pending: dict[int, object] = {}  # read, not settled: what by whom is theirs to say
        self.held = 0  # how many of them somebody works on
        self.saved = saved  # what the coordinator has, as far as we know
        self.lost = False  # another consumer has the partition
        self._gone_until, self._left = _parse(start, metadata)

    def is_settled(self, offset: int) -> bool:
        """Whether whoever had the partition before has settled this one."""
        return offset < self._gone_until and offset not in self._left

    def read(self, offset: int, message: object = None) -> None:
        """Here is a message: until it is settled the mark stays before it."""
        self.pending[offset] = message
        self.end = offset + 1

    def skip_to(self, offset: int) -> None:
        """Nothing that was not read before this offset is to be done."""
        self.end = max(self.end, offset)

    def settle(self, offset: int) -> None:
        """It is done."""
        self.pending.pop(offset, None)

    def snapshot(self) -> CommittedOffset:
        """What to commit now."""
        ahead = [offset for offset in self._left if offset >= self.end]
        held = sorted([*self.pending, *ahead])
        end = max(self.end, self._gone_until)
        if not held:
            return CommittedOffset(end)
        mark = held[0]
        if end - mark == len(held):
            return CommittedOffset(mark)  # nothing behind the mark is settled
        return CommittedOffset(mark, _describe(mark, end, held))

    def unsaved(self) -> CommittedOffset | None:
        """What to commit now, unless the coordinator has it, or nothing is settled yet."""
        now = self.snapshot()
        if now == self.saved or (self.saved is None and now == self.start):
            return None
        return now


def count_unsettled(saved: CommittedOffset, begin: int, end: int) -> int:
    """Count the messages from ``begin`` up to ``end`` that a commit does not settle.

    >>> count_unsettled(CommittedOffset(7, "qk1 3 0,2"), begin=0, end=12)
    4
    """
    until, unsettled = _parse(saved.offset, saved.metadata)
    first = max(saved.offset, begin)
    known = max(first, min(until, end))
    return max(0, end - known) + sum(1 for offset in unsettled if first <= offset < end)


def _describe(mark: int, end: int, held: list[int]) -> str:
    """How far the window goes and what in it is held, relative to the mark.

    Where that is too long the window ends sooner: what lies behind it will be delivered again.
    """
    words: list[str] = []
    length = len("qk1 ") + len(str(end - mark)) + 1
    for first, last in _runs(held):
        word = str(first - mark) if first == last else f"{first - mark}-{last - mark}"
        length += len(word) + 1
        if length > METADATA_LIMIT:
            end = first
            break
        words.append(word)
    return f"qk1 {end - mark} {','.join(words)}"


def _runs(offsets: list[int]) -> Iterable[tuple[int, int]]:
    first = last = offsets[0]
    for offset in offsets[1:]:
        if offset != last + 1:
            yield first, last
            first = offset
        last = offset
    yield first, last


def _parse(mark: int, metadata: str) -> tuple[int, frozenset[int]]:
    """Where the window ends, and what in it is not settled; other programs' metadata is nothing."""
    found = _METADATA.fullmatch(metadata)
    if found is None:
        return mark, frozenset()
    until = mark + int(found[1])
    left: set[int] = set()
    for word in found[2].split(","):
        first, _, last = word.partition("-")
        low, high = mark + int(first), mark + int(last or first)
        if high >= until or high - low > 1_000_000:
            return mark, frozenset()
        left.update(range(low, high + 1))
    return until, frozenset(left)
