"""Helpers that cancel tasks and wait for them, or run a coroutine to completion."""

from __future__ import annotations

import asyncio

import pytest

from qkit._internal.tasks import cancel_and_wait, run_to_completion


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

    async with asyncio.timeout(60):
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await cancel_and_wait([task])
    assert task.cancelled()
    assert swallowed == 2


async def test_finished_tasks_are_ignored() -> None:
    async def fails() -> None:
        raise ValueError

    done = [asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(fails())]
    await asyncio.wait(done)
    await cancel_and_wait(done)
    await cancel_and_wait([])
    assert isinstance(done[1].exception(), ValueError)


async def test_cancel_and_wait_can_be_cancelled() -> None:
    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    ending = asyncio.create_task(cancel_and_wait([task]))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait({ending, task})
    assert ending.cancelled()
    assert task.cancelled()


async def test_run_to_completion_finishes_after_its_caller_was_cancelled() -> None:
    steps: list[str] = []

    async def work() -> None:
        steps.append("begun")
        await asyncio.sleep(0.01)
        steps.append("done")

    caller = asyncio.create_task(run_to_completion(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["begun", "done"]


async def test_run_to_completion_returns_the_result_or_raises_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    assert await run_to_completion(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ValueError, match="no"):
        await run_to_completion(fails())
    caller = asyncio.create_task(run_to_completion(fails()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert "ValueError('no')" in caplog.text
