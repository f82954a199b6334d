"""Tiers of delay: any delay ends in time, by few hops."""

from __future__ import annotations

import pytest

from qkit.backends.kafka.retry_tiers import TIERS, DueHeap, leaves_tier_at, tier_of


@pytest.mark.parametrize(
    "delay", [0.0, 0.05, 0.999, 1.0, 1.5, 3.7, 59.9, 600.0, 4095.0, 86_400.0, 1e6]
)
def test_a_delay_is_never_early_and_its_hops_are_few(delay: float) -> None:
    now, hops = 1000.0, 0
    due = now + delay
    while now < due:
        leaves = leaves_tier_at(tier_of(due - now), now, due)
        assert leaves > now, "every hop brings it nearer"
        now = leaves
        hops += 1
    assert now == due
    assert hops <= TIERS + delay / 2 ** (TIERS - 1) + 1


def test_inside_a_tier_nobody_stands_behind_one_who_waits_longer() -> None:
    leaving = [
        leaves_tier_at(tier_of(delay), at, at + delay) for at, delay in ((0, 7.9), (1, 4), (2, 5.5))
    ]
    assert leaving == sorted(leaving)


def test_what_waits_comes_by_its_time() -> None:
    waiting = DueHeap[str]()
    assert len(waiting) == 0
    for at, item in ((5.0, "c"), (1.0, "a"), (5.0, "d"), (2.0, "b")):
        waiting.add(at, item)
    assert (waiting.next_at, len(waiting)) == (1.0, 4)
    assert waiting.pop_due(0.5) == []
    assert waiting.pop_due(5.0) == ["a", "b", "c", "d"]
