"""What is due when: a heap of times and messages whose outdated entries are dropped lazily."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from qkit.native.queue.stored_message import COMPACT_ABOVE, GONE, Stored

__all__ = ["Agenda"]


class Agenda:
    """Messages by the time at which something happens to them.

    An entry is outdated once its message is ``GONE``. It is skipped when its time comes, or
    dropped in a rebuild when outdated ones are many: taking each out at once would be O(n), and
    leaving them would keep the bodies of settled messages until their time.
    """

    __slots__ = ("_count", "_outdated", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Stored]] = []
        self._count = 0  # entries for the same time keep their order, and messages never compare
        self._outdated = 0

    def add(self, at: float, message: Stored) -> None:
        """Enter a message."""
        self._count += 1
        heappush(self.heap, (at, self._count, message))

    def pop_due(self, now: float) -> Stored | None:
        """Take out the next message whose time has come."""
        heap = self.heap
        while heap and heap[0][0] <= now:
            message = heappop(heap)[2]
            if message.state != GONE:
                return message
            self._outdated -= 1
        return None

    def first(self) -> float | None:
        """The next time at which something is due."""
        heap = self.heap
        while heap and heap[0][2].state == GONE:
            heappop(heap)
            self._outdated -= 1
        return heap[0][0] if heap else None

    def outdate(self) -> None:
        """Note that a message has just become ``GONE``.

        Also when its entry was taken out before: too high a count only means that the rebuild,
        which sets it right, comes early.
        """
        self._outdated += 1
        if self._outdated > COMPACT_ABOVE + len(self.heap) // 2:
            self.rebuild()

    def rebuild(self) -> None:
        """Drop every outdated entry."""
        self.heap = [entry for entry in self.heap if entry[2].state != GONE]
        heapify(self.heap)
        self._outdated = 0

    def __bool__(self) -> bool:
        return bool(self.heap)

    def __iter__(self) -> Iterator[tuple[float, Stored]]:
        """Every message with its time, the next first."""
        for at, _, message in sorted(self.heap):
            if message.state != GONE:
                yield at, message
