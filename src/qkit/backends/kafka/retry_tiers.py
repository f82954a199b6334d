"""Delays in a log: a partition for each power of two seconds, and who waits there for what.

A record waits in the tier of the largest power of two that is not longer than its delay, for that
long or until it is due, and then hops to a lower tier with what is left. So inside a tier nobody
stands behind one who waits longer, and a delay of any length ends in time.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Final, Generic, TypeVar

__all__ = ["TIERS", "DueHeap", "leaves_tier_at", "tier_of"]

TIERS: Final = 13  # 1 s, 2 s, 4 s, … 4,096 s

T = TypeVar("T")


def tier_of(delay: float) -> int:
    """The tier in which a message with so many seconds to go waits next.

    >>> [tier_of(delay) for delay in (-3, 0.2, 1, 1.9, 2, 59, 4096, 1e6)]
    [0, 0, 0, 0, 1, 5, 12, 12]
    """
    return min(max(int(delay), 1).bit_length() - 1, TIERS - 1)


def leaves_tier_at(tier: int, written_at: float, due: float) -> float:
    """When a record that was written at this time leaves its tier.

    >>> leaves_tier_at(3, written_at=100.0, due=112.5)
    108.0
    """
    return min(due, written_at + (1 << tier))


class DueHeap(Generic[T]):
    """Heap of items by due time.

    >>> heap = DueHeap[str]()
    >>> heap.add(3.0, "late"); heap.add(1.0, "soon")
    >>> heap.next_at, heap.pop_due(2.0)
    (1.0, ['soon'])
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float | None:
        """When the first of them is due."""
        return self._heap[0][0] if self._heap else None

    def add(self, at: float, item: T) -> None:
        """Let ``item`` wait until ``at``; of equals the first that came is the first to go."""
        heapq.heappush(self._heap, (at, next(self._numbers), item))

    def pop_due(self, now: float) -> list[T]:
        """Everything whose time has come."""
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
