"""Items between a driver and ``receive``: order, cancellation, returns, errors."""

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


async def test_take_returns_what_waits_up_to_the_limit() -> None:
    arrivals = Arrivals[int]()
    arrivals.put([1, 2, 3])
    assert await arrivals.take(2) == [1, 2]
    assert await arrivals.take(2) == [3]
    assert len(arrivals) == 0


async def test_take_asks_when_nothing_waits_and_again_when_woken() -> None:
    arrivals = Arrivals[int]()
    asked: list[int] = []
    taking = asyncio.create_task(arrivals.take(5, asked.append))
    await asyncio.sleep(0)
    assert asked == [5]
    arrivals.wake()
    await asyncio.sleep(0)
    assert asked == [5, 5]
    arrivals.put([1])
    assert await taking == [1]
    assert asked == [5, 5]


async def test_what_ask_puts_at_once_is_taken() -> None:
    arrivals = Arrivals[int]()
    assert await arrivals.take(1, lambda limit: arrivals.put([limit])) == [1]


async def test_a_cancelled_take_has_taken_nothing() -> None:
    arrivals = Arrivals[int]()
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.put([1])
    taking.cancel()  # in the same turn of the loop
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert arrivals.drain() == [1]


async def test_each_of_two_callers_gets_its_own() -> None:
    arrivals = Arrivals[int]()
    first, second = (asyncio.create_task(arrivals.take(1)) for _ in range(2))
    await asyncio.sleep(0)
    arrivals.put([1, 2])
    assert [await first, await second] == [[1], [2]]


async def test_put_back_restores_the_order_of_delivery() -> None:
    arrivals = Arrivals[int](order=float)
    arrivals.put(range(6))
    taken = await arrivals.take(4)
    for item in (2, 0, 3):
        arrivals.put_back(item)
    assert taken == [0, 1, 2, 3]
    assert await arrivals.take(9) == [0, 2, 3, 4, 5]


async def test_put_back_without_an_order_goes_to_the_front() -> None:
    arrivals = Arrivals[int]()
    arrivals.put([1, 2])
    arrivals.put_back(9)
    assert await arrivals.take(9) == [9, 1, 2]


async def test_unclaimed_items_are_returned_together_at_once() -> None:
    returned: list[list[int]] = []
    arrivals = Arrivals[int](unclaimed=returned.append)
    arrivals.put([1, 2])
    assert returned == [[1, 2]]
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.put([3, 4])
    assert await taking == [3]
    assert returned == [[1, 2], [4]]


async def test_unclaimed_items_are_returned_after_a_while(clock: VirtualClock) -> None:
    returned: list[list[int]] = []
    arrivals = Arrivals[int](unclaimed=returned.append, after=1.0)
    arrivals.put([1])
    await clock.advance(0.6)
    arrivals.put([2])
    assert await arrivals.take(1) == [1]  # the time begins again
    await clock.advance(0.9)
    assert returned == []
    await clock.advance(1.1)
    assert returned == [[2]]


async def test_unclaimed_items_wait_while_the_owner_is_busy(clock: VirtualClock) -> None:
    returned: list[list[int]] = []
    held = {1}
    arrivals = Arrivals[int](unclaimed=returned.append, after=1.0, busy=lambda: bool(held))
    arrivals.put([2])
    await clock.advance(3.5)
    assert returned == []
    held.clear()
    await clock.advance(1.0)
    assert returned == [[2]]


async def test_left_is_called_when_the_last_caller_has_gone() -> None:
    gone: list[int] = []
    arrivals = Arrivals[int](left=lambda: gone.append(arrivals.receivers))
    first, second = (asyncio.create_task(arrivals.take(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert gone == []
    arrivals.put([1])
    await second
    assert gone == [0]


async def test_stop_ends_a_take_and_keeps_what_waits_for_drain(clock: VirtualClock) -> None:
    arrivals = Arrivals[int](unclaimed=lambda items: pytest.fail("stopped"), after=1.0)
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.stop()
    assert await taking == []
    arrivals.put([1])
    assert await arrivals.take(1) == []
    await clock.advance(2.0)
    assert arrivals.drain() == [1]


async def test_an_error_comes_after_the_items() -> None:
    arrivals = Arrivals[int]()
    arrivals.put([1])
    arrivals.fail(ConnectionError("gone"), drop=False)
    assert await arrivals.take(1) == [1]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            await arrivals.take(1)


async def test_an_error_can_drop_the_items_and_wakes_a_take() -> None:
    arrivals = Arrivals[int]()
    taking = asyncio.create_task(arrivals.take(1))
    await asyncio.sleep(0)
    arrivals.put([1])
    arrivals.fail(ConnectionError("gone"), drop=True)
    with pytest.raises(ConnectionError, match="gone"):
        await taking
    assert len(arrivals) == 0
