"""The end of background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["end_tasks"]

AGAIN: Final = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are done.

    A cancellation can be swallowed on the way: Python 3.11's ``asyncio.wait_for`` does so when its
    answer comes in the same turn of the loop, and drivers call it everywhere. A task that goes on
    is therefore cancelled again.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN)
