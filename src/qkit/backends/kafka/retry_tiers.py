"""Delay tiers of the retry topic: one partition for each power of two, in seconds.

A record waits in the highest tier whose time does not exceed its delay. After that time, it moves
to a lower tier for the remaining delay. All records of a tier wait for about the same time, so none
is held up by an earlier record with a longer delay.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Final, Generic, TypeVar

__all__ = ["TIERS", "DueHeap", "leaves_tier_at", "tier_of"]

TIERS: Final = 13  # 1 s, 2 s, 4 s, …, 4,096 s

T = TypeVar("T")


def tier_of(delay: float) -> int:
    """Return the tier of a message that is due in ``delay`` seconds.

    >>> [tier_of(delay) for delay in (-3, 0.2, 1, 1.9, 2, 59, 4096, 1e6)]
    [0, 0, 0, 0, 1, 5, 12, 12]
    """
    return min(max(int(delay), 1).bit_length() - 1, TIERS - 1)


def leaves_tier_at(tier: int, written_at: float, due: float) -> float:
    """Return the time at which a record leaves its tier, in seconds since the epoch.

    >>> leaves_tier_at(3, written_at=100.0, due=112.5)
    108.0
    """
    return min(due, written_at + (1 << tier))


class DueHeap(Generic[T]):
    """Heap of items by due time; items with the same due time keep their insertion order.

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
        """Due time of the first item, or ``None`` if the heap is empty."""
        return self._heap[0][0] if self._heap else None

    def add(self, at: float, item: T) -> None:
        """Add an item with the due time ``at``."""
        heapq.heappush(self._heap, (at, next(self._numbers), item))

    def pop_due(self, now: float) -> list[T]:
        """Remove and return the items that are due at ``now``, earliest first."""
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
