"""Buffer between a driver and ``receive``: order, cancellation, unclaimed items and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qkit.backends.common.arrivals import Arrivals
from qkit.testing.clock import VirtualClock


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    with VirtualClock() as clock:
        yield clock


async def test_take_returns_buffered_items_up_to_the_limit() -> None:
    arrivals = Arrivals[int]()
    arrivals.put([1, 2, 3])
    assert await arrivals.take(2) == [1, 2]
    assert await arrivals.take(2) == [3]
    assert len(arrivals) == 0


async def test_take_fetches_when_the_buffer_is_empty_and_again_when_woken() -> None:
    arrivals = Arrivals[int]()
    fetches: list[int] = []
    taking = asyncio.create_task(arrivals.take(5, fetches.append))
    await asyncio.sleep(0)
    assert fetches == [5]
    arrivals.wake()
    await asyncio.sleep(0)
    assert fetches == [5, 5]
    arrivals.put([1])
    assert await taking == [1]
    assert fetches == [5, 5]


async def test_items_that_fetch_adds_immediately_are_taken() -> None:
    arrivals = Arrivals[int]()
    assert await arrivals.take(1, lambda limit: arrivals.put([limit])) == [1]


async def test_a_cancelled_take_removes_no_items() -> None:
    arrivals = Arrivals[int]()
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.put([1])
    taking.cancel()  # in the same iteration of the event loop
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert arrivals.drain() == [1]


async def test_two_callers_get_different_items() -> None:
    arrivals = Arrivals[int]()
    first, second = (asyncio.create_task(arrivals.take(1)) for _ in range(2))
    await asyncio.sleep(0)
    arrivals.put([1, 2])
    assert [await first, await second] == [[1], [2]]


async def test_put_back_restores_the_delivery_order() -> None:
    arrivals = Arrivals[int](order=float)
    arrivals.put(range(6))
    taken = await arrivals.take(4)
    for item in (2, 0, 3):
        arrivals.put_back(item)
    assert taken == [0, 1, 2, 3]
    assert await arrivals.take(9) == [0, 2, 3, 4, 5]


async def test_put_back_without_an_order_adds_at_the_front() -> None:
    arrivals = Arrivals[int]()
    arrivals.put([1, 2])
    arrivals.put_back(9)
    assert await arrivals.take(9) == [9, 1, 2]


async def test_unclaimed_items_are_reported_together_immediately() -> None:
    returned: list[list[int]] = []
    arrivals = Arrivals[int](unclaimed=returned.append)
    arrivals.put([1, 2])
    assert returned == [[1, 2]]
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.put([3, 4])
    assert await taking == [3]
    assert returned == [[1, 2], [4]]


async def test_unclaimed_items_are_reported_after_the_delay(clock: VirtualClock) -> None:
    returned: list[list[int]] = []
    arrivals = Arrivals[int](unclaimed=returned.append, after=1.0)
    arrivals.put([1])
    await clock.advance(0.6)
    arrivals.put([2])
    assert await arrivals.take(1) == [1]  # restarts the delay
    await clock.advance(0.9)
    assert returned == []
    await clock.advance(1.1)
    assert returned == [[2]]


async def test_unclaimed_items_are_kept_while_busy(clock: VirtualClock) -> None:
    returned: list[list[int]] = []
    held = {1}
    arrivals = Arrivals[int](unclaimed=returned.append, after=1.0, busy=lambda: bool(held))
    arrivals.put([2])
    await clock.advance(3.5)
    assert returned == []
    held.clear()
    await clock.advance(1.0)
    assert returned == [[2]]


async def test_left_is_called_when_the_last_caller_leaves() -> None:
    calls: list[int] = []
    arrivals = Arrivals[int](left=lambda: calls.append(arrivals.receivers))
    first, second = (asyncio.create_task(arrivals.take(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert calls == []
    arrivals.put([1])
    await second
    assert calls == [0]


async def test_stop_ends_take_and_keeps_the_items_for_drain(clock: VirtualClock) -> None:
    arrivals = Arrivals[int](unclaimed=lambda items: pytest.fail("called after stop"), after=1.0)
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.stop()
    assert await taking == []
    arrivals.put([1])
    assert await arrivals.take(1) == []
    await clock.advance(2.0)
    assert arrivals.drain() == [1]


async def test_an_error_is_raised_after_the_buffered_items() -> None:
    arrivals = Arrivals[int]()
    arrivals.put([1])
    arrivals.fail(ConnectionError("gone"), drop=False)
    assert await arrivals.take(1) == [1]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            await arrivals.take(1)


async def test_an_error_with_drop_discards_items_and_wakes_take() -> None:
    arrivals = Arrivals[int]()
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.put([1])
    arrivals.fail(ConnectionError("gone"), drop=True)
    with pytest.raises(ConnectionError, match="gone"):
        await taking
    assert len(arrivals) == 0
