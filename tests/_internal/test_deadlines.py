"""DeadlineTimer: many waits, one timer, each ended at its own time."""

from __future__ import annotations

import asyncio

import pytest

from qkit._internal.deadlines import Deadline, DeadlineTimer
from qkit.testing.clock import VirtualClock


async def wait(deadlines: DeadlineTimer, clock: VirtualClock, seconds: float) -> float | None:
    """When the wait expired, or ``None`` if it did not."""
    deadline = Deadline(deadlines)
    try:
        with deadline:
            await asyncio.sleep(seconds)
    except TimeoutError:
        assert deadline.expired
        return clock.monotonic()
    assert not deadline.expired
    return None


async def test_each_wait_expires_at_its_own_time(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    began = clock.monotonic()
    waits = []
    for delay in (0.0, 1.5, 4.0):
        await clock.advance(began + delay - clock.monotonic())
        waits.append(asyncio.ensure_future(wait(deadlines, clock, 60)))
        await asyncio.sleep(0)
    assert [await item for item in waits] == [began + 10, began + 11.5, began + 14]


async def test_a_wait_that_ends_in_time_is_left_alone(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    late = asyncio.ensure_future(wait(deadlines, clock, 12))
    assert await wait(deadlines, clock, 3) is None
    assert await wait(deadlines, clock, 9) is None  # begun later than the one that expires
    assert await late is not None


async def test_one_timer_serves_them_all_and_none_is_left(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    for _ in range(100):
        assert await wait(deadlines, clock, 0) is None
    assert deadlines.timer is not None
    await clock.advance(11)
    assert deadlines.timer is None
    assert not deadlines.open


async def test_a_cancelled_wait_is_cancelled_and_not_expired(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    waiting = asyncio.ensure_future(wait(deadlines, clock, 60))
    await clock.advance(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not deadlines.open


async def test_who_is_cancelled_and_late_at_once_is_cancelled(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    waiting = asyncio.ensure_future(wait(deadlines, clock, 60))
    await asyncio.sleep(0)
    (deadline,) = deadlines.open
    deadline.expire()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_task_that_a_deadline_cancelled_is_not_left_cancelled(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    with Deadline(deadlines) as deadline, pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(60)  # swallowed: then there is nothing to raise
    assert deadline.expired
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert await wait(deadlines, clock, 60) is not None
