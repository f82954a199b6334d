"""Deadlines: one timer for many waits, each of which ends at its own time."""

from __future__ import annotations

import asyncio

import pytest

from qkit._internal.deadlines import Deadline, DeadlineTimer
from qkit.testing.clock import VirtualClock


async def wait(deadlines: DeadlineTimer, clock: VirtualClock, seconds: float) -> float | None:
    """Wait for ``seconds``; return the time at which the deadline expired, or ``None``."""
    deadline = Deadline(deadlines)
    try:
        with deadline:
            await asyncio.sleep(seconds)
    except TimeoutError:
        assert deadline.expired
        return clock.monotonic()
    assert not deadline.expired
    return None


async def test_each_deadline_expires_at_its_own_time(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    began = clock.monotonic()
    waits = []
    for delay in (0.0, 1.5, 4.0):
        await clock.advance(began + delay - clock.monotonic())
        waits.append(asyncio.ensure_future(wait(deadlines, clock, 60)))
        await asyncio.sleep(0)
    assert [await item for item in waits] == [began + 10, began + 11.5, began + 14]


async def test_a_wait_that_ends_in_time_does_not_expire(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    late = asyncio.ensure_future(wait(deadlines, clock, 12))
    assert await wait(deadlines, clock, 3) is None
    assert (
        await wait(deadlines, clock, 9) is None
    )  # started later, so it may end after the first deadline
    assert await late is not None


async def test_one_timer_serves_all_deadlines_and_none_remains(clock: VirtualClock) -> None:
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


async def test_a_wait_that_expires_and_is_cancelled_at_the_same_time_is_cancelled(
    clock: VirtualClock,
) -> None:
    deadlines = DeadlineTimer(10)
    waiting = asyncio.ensure_future(wait(deadlines, clock, 60))
    await asyncio.sleep(0)
    (deadline,) = deadlines.open
    deadline.expire()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_task_is_not_cancelled_after_its_deadline_expired(clock: VirtualClock) -> None:
    deadlines = DeadlineTimer(10)
    with Deadline(deadlines) as deadline, pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(60)  # pytest.raises suppresses the cancellation
    assert deadline.expired
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert await wait(deadlines, clock, 60) is not None
