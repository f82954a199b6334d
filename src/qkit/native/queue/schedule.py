"""Heap of due times and messages; stale entries are removed lazily."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from qkit.native.queue.stored_message import COMPACT_ABOVE, REMOVED, StoredMessage

__all__ = ["Schedule"]


class Schedule:
    """Messages by the time at which something happens to them.

    An entry is stale once its message is ``REMOVED``. It is skipped when its time comes, or
    removed in a rebuild when stale ones are many: taking each out at once would be O(n), and
    leaving them would keep the bodies of settled messages until their time.
    """

    __slots__ = ("_count", "_stale", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, StoredMessage]] = []
        self._count = 0  # entries for the same time keep their order, and messages never compare
        self._stale = 0

    def add(self, at: float, message: StoredMessage) -> None:
        """Enter a message."""
        self._count += 1
        heappush(self.heap, (at, self._count, message))

    def pop_due(self, now: float) -> StoredMessage | None:
        """Take out the next message whose time has come."""
        heap = self.heap
        while heap and heap[0][0] <= now:
            message = heappop(heap)[2]
            if message.state != REMOVED:
                return message
            self._stale -= 1
        return None

    def next_due(self) -> float | None:
        """The next time at which something is due."""
        heap = self.heap
        while heap and heap[0][2].state == REMOVED:
            heappop(heap)
            self._stale -= 1
        return heap[0][0] if heap else None

    def mark_stale(self) -> None:
        """Note that a message has just become ``REMOVED``.

        Also when its entry was taken out before: too high a count only means that the rebuild,
        which sets it right, comes early.
        """
        self._stale += 1
        if self._stale > COMPACT_ABOVE + len(self.heap) // 2:
            self.rebuild()

    def rebuild(self) -> None:
        """Remove every stale entry."""
        self.heap = [entry for entry in self.heap if entry[2].state != REMOVED]
        heapify(self.heap)
        self._stale = 0

    def __bool__(self) -> bool:
        return bool(self.heap)

    def __iter__(self) -> Iterator[tuple[float, StoredMessage]]:
        """Every message with its time, the next first."""
        for at, _, message in sorted(self.heap):
            if message.state != REMOVED:
                yield at, message
