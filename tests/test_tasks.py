"""Ending background tasks."""

from __future__ import annotations

import asyncio

from qkit.tasks import end_tasks


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        while True:
            try:
                await answer
            except asyncio.CancelledError:
                if swallowed == 2:
                    raise
                swallowed += 1

    async with asyncio.timeout(10):
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await end_tasks([task])
    assert task.cancelled()
    assert swallowed == 2


async def test_tasks_that_ended_in_any_way_are_no_matter() -> None:
    async def fails() -> None:
        raise ValueError

    done = [asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(fails())]
    await asyncio.wait(done)
    await end_tasks(done)
    await end_tasks([])
    assert isinstance(done[1].exception(), ValueError)


async def test_whoever_waits_for_the_end_can_be_cancelled() -> None:
    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks([task]))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait({ending, task})
    assert ending.cancelled()
    assert task.cancelled()
