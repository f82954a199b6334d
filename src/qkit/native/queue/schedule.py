"""``Schedule``: a heap of messages by due time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from qkit.native.queue.stored_message import COMPACT_ABOVE, REMOVED, StoredMessage

__all__ = ["Schedule"]


class Schedule:
    """Heap of messages ordered by due time, for delays and expiries.

    An entry is stale once its message is ``REMOVED``. It is skipped when it is due, or removed by
    a rebuild when there are many stale entries. Removing each entry immediately would be O(n), and
    keeping all of them would hold the bodies of settled messages in memory until they are due.
    """

    __slots__ = ("_count", "_stale", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, StoredMessage]] = []
        self._count = 0  # tie-breaker: entries with the same time keep their order
        self._stale = 0

    def add(self, at: float, message: StoredMessage) -> None:
        """Add a message that is due at the monotonic time ``at``."""
        self._count += 1
        heappush(self.heap, (at, self._count, message))

    def pop_due(self, now: float) -> StoredMessage | None:
        """Remove and return the next message that is due, or ``None`` if there is none."""
        heap = self.heap
        while heap and heap[0][0] <= now:
            message = heappop(heap)[2]
            if message.state != REMOVED:
                return message
            self._stale -= 1
        return None

    def next_due(self) -> float | None:
        """Return the earliest due time, or ``None`` if there is no message."""
        heap = self.heap
        while heap and heap[0][2].state == REMOVED:
            heappop(heap)
            self._stale -= 1
        return heap[0][0] if heap else None

    def mark_stale(self) -> None:
        """Count the entry of a message that has just become ``REMOVED``.

        Counting a message without an entry is harmless: the next rebuild comes early and resets
        the count.
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
        """Iterate over due times and messages, earliest first."""
        for at, _, message in sorted(self.heap):
            if message.state != REMOVED:
                yield at, message
