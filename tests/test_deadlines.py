"""Deadlines: many waits, one timer, each ended at its own time."""

from __future__ import annotations

import asyncio

import pytest

from qkit.deadlines import Deadlines
from qkit.testing.clock import VirtualClock


async def wait(deadlines: Deadlines, clock: VirtualClock, seconds: float) -> float | None:
    """When the wait expired, or ``None`` if it did not."""
    scope = deadlines.begin()
    try:
        async with scope:
            await asyncio.sleep(seconds)
    except TimeoutError:
        assert scope.expired()
        return clock.monotonic()
    finally:
        deadlines.end(scope)
    return None


async def test_each_wait_expires_at_its_own_time(clock: VirtualClock) -> None:
    deadlines = Deadlines(10)
    began = clock.monotonic()
    waits = []
    for delay in (0.0, 1.5, 4.0):
        await clock.advance(began + delay - clock.monotonic())
        waits.append(asyncio.ensure_future(wait(deadlines, clock, 60)))
        await asyncio.sleep(0)
    assert [await item for item in waits] == [began + 10, began + 11.5, began + 14]


async def test_a_wait_that_ends_in_time_is_left_alone(clock: VirtualClock) -> None:
    deadlines = Deadlines(10)
    late = asyncio.ensure_future(wait(deadlines, clock, 12))
    assert await wait(deadlines, clock, 3) is None
    assert await wait(deadlines, clock, 9) is None  # begun later than the one that expires
    assert await late is not None


async def test_one_timer_serves_them_all_and_none_is_left(clock: VirtualClock) -> None:
    deadlines = Deadlines(10)
    for _ in range(100):
        assert await wait(deadlines, clock, 0) is None
    assert deadlines._timer is not None
    await clock.advance(11)
    assert deadlines._timer is None
    assert not deadlines._open


async def test_a_cancelled_wait_is_cancelled_and_not_expired(clock: VirtualClock) -> None:
    deadlines = Deadlines(10)
    waiting = asyncio.ensure_future(wait(deadlines, clock, 60))
    await clock.advance(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not deadlines._open
