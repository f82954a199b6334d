"""Tasks that must come to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from qkit._internal.logging import logger

__all__ = ["cancel_and_wait", "retrieve_exception", "run_to_completion"]

T = TypeVar("T")

RECANCEL_INTERVAL_SECONDS: Final = 0.5


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are done.

    A cancellation can be swallowed on the way: Python 3.11's ``asyncio.wait_for`` does so when its
    answer comes in the same turn of the loop, and drivers call it everywhere. A task that goes on
    is therefore cancelled again, so this is not for one that has long to tidy up.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=RECANCEL_INTERVAL_SECONDS)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not be left half done, whoever is in a hurry."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("it failed after it was cancelled: %r", error)
        raise


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Mark an exception as seen, as a done callback: those that waited for it may be gone."""
    if not future.cancelled():
        future.exception()
