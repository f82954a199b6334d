"""``Coalescer``: runs one call at a time; items that arrive meanwhile share the next call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["Coalescer"]

T = TypeVar("T")
R = TypeVar("R")


class Coalescer(Generic[T]):
    """Buffer that collects items while a call is running and then flushes them together.

    Adds no delay: if no call is running, an item is flushed immediately.

    Args:
        flush: Handles a group of items, in the order in which they were posted. It must not
            raise. If it is cancelled, its items return to the head of the queue.
        max_size: Maximum size of a group. A larger item is flushed alone.
        size: Returns the size of an item. Default: every item has size 1.
        name: Name of the flush task.

    Attributes:
        busy: Whether a call is running or items are waiting.
    """

    def __init__(
        self,
        flush: Callable[[list[T]], Awaitable[None]],
        *,
        max_size: int,
        size: Callable[[T], int] | None = None,
        name: str,
    ) -> None:
        self.busy: bool = False
        self._flush = flush
        self._max_size = max_size
        self._size = size
        self._name = name
        self._waiting: deque[T] = deque()
        self._in_flight: list[T] = []
        self._task: asyncio.Task[None] | None = None

    async def run_now(self, call: Awaitable[R]) -> R:
        """Await ``call`` in the caller's task. The coalescer must not be ``busy``."""
        self.busy = True
        try:
            return await call
        finally:
            self.busy = False
            if self._waiting:
                self._start()

    def post(self, item: T) -> None:
        """Add an item to the next group."""
        self._waiting.append(item)
        if not self.busy:
            self._start()

    def pending(self) -> list[T]:
        """Return all items that are being flushed or waiting, oldest first."""
        return [*self._in_flight, *self._waiting]

    async def drain(self) -> None:
        """Wait until no item is being flushed or waiting."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> list[T]:
        """Cancel the running flush and return the items that were not handled."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        unhandled = self.pending()
        self._waiting.clear()
        return unhandled

    def _start(self) -> None:
        self.busy = True
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        try:
            while self._waiting:
                self._in_flight = self._next_group()
                await self._flush(self._in_flight)
                several = len(self._in_flight) > 1
                self._in_flight = []
                if several:  # let the callers post their next items, so that they form one group
                    await asyncio.sleep(0)
        finally:
            self._waiting.extendleft(reversed(self._in_flight))
            self._in_flight = []
            self.busy = False
            self._task = None

    def _next_group(self) -> list[T]:
        if self._size is None:
            count = min(len(self._waiting), self._max_size)
            return [self._waiting.popleft() for _ in range(count)]
        group = [self._waiting.popleft()]
        size = self._size(group[0])
        while self._waiting:
            size += self._size(self._waiting[0])
            if size > self._max_size:
                break
            group.append(self._waiting.popleft())
        return group
