"""Helpers for cancelling asyncio tasks and waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from qkit._internal.logging import logger

__all__ = ["cancel_and_wait", "detach", "retrieve_exception", "run_to_completion"]

T = TypeVar("T")

RECANCEL_INTERVAL_SECONDS: Final = 0.5

_detached: set[asyncio.Task[Any]] = set()  # keeps these tasks from being destroyed while pending


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are done.

    A cancellation can be lost: in Python 3.11, ``asyncio.wait_for`` swallows it if the awaited
    result arrives in the same loop iteration, and the broker drivers use ``wait_for`` widely. So a
    task that keeps running is cancelled again every ``RECANCEL_INTERVAL_SECONDS``. Do not use this
    function for tasks with a long cleanup.
    """
    remaining = {task for task in tasks if not task.done()}
    while remaining:
        for task in remaining:
            task.cancel()
        _, remaining = await asyncio.wait(remaining, timeout=RECANCEL_INTERVAL_SECONDS)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that must complete even if the caller is cancelled.

    If the caller is cancelled, ``CancelledError`` is raised after the coroutine has finished.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("an operation failed after its caller was cancelled: %r", error)
        raise


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as retrieved; for use as a done callback.

    This keeps asyncio from logging the exception if no task awaits the future any more.
    """
    if not future.cancelled():
        future.exception()


def detach(task: asyncio.Task[Any]) -> None:
    """Exclude a task that ignores its cancellation from ``asyncio.all_tasks``.

    At the end, ``asyncio.run`` cancels all tasks and waits for them, so such a task would keep the
    process alive for ever. A detached task continues as long as the event loop runs.
    """
    if not task.done():
        asyncio.tasks._unregister_task(task)  # the hook for task implementations, see its docs
        _detached.add(task)
        task.add_done_callback(_detached.discard)
