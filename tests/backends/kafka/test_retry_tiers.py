"""Delay tiers: a delay of any length is exact and needs few moves between tiers."""

from __future__ import annotations

import pytest

from qkit.backends.kafka.retry_tiers import TIERS, DueHeap, leaves_tier_at, tier_of


@pytest.mark.parametrize(
    "delay", [0.0, 0.05, 0.999, 1.0, 1.5, 3.7, 59.9, 600.0, 4095.0, 86_400.0, 1e6]
)
def test_a_delay_is_exact_and_needs_few_moves(delay: float) -> None:
    now, moves = 1000.0, 0
    due = now + delay
    while now < due:
        leaves = leaves_tier_at(tier_of(due - now), now, due)
        assert leaves > now, "a move made no progress"
        now = leaves
        moves += 1
    assert now == due
    assert moves <= TIERS + delay / 2 ** (TIERS - 1) + 1


def test_records_leave_a_tier_in_the_order_they_were_written() -> None:
    leaving = [
        leaves_tier_at(tier_of(delay), at, at + delay) for at, delay in ((0, 7.9), (1, 4), (2, 5.5))
    ]
    assert leaving == sorted(leaving)


def test_due_items_are_returned_in_order_of_due_time() -> None:
    heap = DueHeap[str]()
    assert len(heap) == 0
    for at, item in ((5.0, "c"), (1.0, "a"), (5.0, "d"), (2.0, "b")):
        heap.add(at, item)
    assert (heap.next_at, len(heap)) == (1.0, 4)
    assert heap.pop_due(0.5) == []
    assert heap.pop_due(5.0) == ["a", "b", "c", "d"]
