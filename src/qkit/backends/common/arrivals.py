"""Buffer that holds delivered items until ``receive`` takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Arrivals"]

T = TypeVar("T")


class Arrivals(Generic[T]):
    """FIFO buffer between a driver and the callers of ``receive``.

    ``take`` does not await between removing items and returning them, so cancelling it loses no
    items.

    Args:
        unclaimed: Called with all items, oldest first, when no ``take`` has been running for
            ``after`` seconds. The items are removed. By default items stay until they are taken.
        after: Seconds before ``unclaimed`` is called; 0 (default) calls it immediately. The delay
            can be up to twice as long if a ``take`` left items in the buffer.
        busy: Predicate that is checked before ``unclaimed`` is called; if it returns true, the
            items stay for another ``after`` seconds.
        left: Called when the last running ``take`` ends.
        order: Sort key for delivery order, used by ``put_back``. By default ``put_back`` inserts
            an item at the front.

    Attributes:
        receivers: Number of running ``take`` calls.
    """

    def __init__(
        self,
        *,
        unclaimed: Callable[[list[T]], None] | None = None,
        after: float = 0.0,
        busy: Callable[[], bool] | None = None,
        left: Callable[[], None] | None = None,
        order: Callable[[T], float] | None = None,
    ) -> None:
        self.receivers: int = 0
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._stopped = False
        self._error: Exception | None = None
        self._unclaimed = unclaimed
        self._after = after
        self._busy = busy
        self._left = left
        self._order = order
        self._takes = 0  # ``take`` calls so far
        # ``take`` does not cancel this timer, because comparing ``_takes`` on expiry is cheaper.
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Iterable[T]) -> None:
        """Add items at the end."""
        self._items.extend(items)
        self._added()

    def put_back(self, item: T) -> None:
        """Return a taken item to its place in delivery order."""
        index = 0
        if self._order is not None:
            key = self._order(item)
            while index < len(self._items) and self._order(self._items[index]) < key:
                index += 1
        self._items.insert(index, item)
        self._added()

    def wake(self) -> None:
        """Wake every waiting ``take``; it calls its ``fetch`` again if the buffer is empty."""
        self._changed.set()

    def stop(self) -> None:
        """Make ``take`` return an empty list from now on; only ``drain`` returns buffered items."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()

    def fail(self, error: Exception, *, drop: bool) -> None:
        """Make ``take`` raise ``error``.

        Args:
            error: Exception to raise.
            drop: Discard the buffered items and raise immediately; otherwise raise after they are
                taken.
        """
        if drop:
            self._items.clear()
        self._error = error
        self._changed.set()

    def drain(self) -> list[T]:
        """Remove and return all items, oldest first."""
        items = list(self._items)
        self._items.clear()
        return items

    async def take(self, limit: int, fetch: Callable[[int], None] | None = None) -> list[T]:
        """Wait for items and return up to ``limit`` of them, or an empty list after ``stop``.

        Args:
            limit: Maximum number of items.
            fetch: Called with ``limit`` whenever the buffer is empty, for example to start a
                fetch. It must not block.

        Raises:
            Exception: The error passed to ``fail``.
        """
        self.receivers += 1
        self._takes += 1
        try:
            while not self._stopped:
                if self._items:
                    return self._pop(limit)
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                if fetch is not None:
                    fetch(limit)
                await self._changed.wait()
            return []
        finally:
            self.receivers -= 1
            if not self.receivers:
                if self._left is not None:
                    self._left()
                self._watch_unclaimed()

    def _pop(self, limit: int) -> list[T]:
        items = self._items
        return [items.popleft() for _ in range(min(limit, len(items)))]

    def _added(self) -> None:
        if self.receivers:
            self._changed.set()
        else:
            self._watch_unclaimed()

    def _watch_unclaimed(self) -> None:
        """Pass buffered items to ``unclaimed``, now or after ``after`` seconds."""
        if self._unclaimed is None or not self._items or self._stopped:
            return
        if self._after <= 0:
            self._unclaimed(self.drain())
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._after, self._check_unclaimed, self._takes)

    def _check_unclaimed(self, takes: int) -> None:
        self._timer = None
        if self.receivers or self._stopped or not self._items or self._unclaimed is None:
            return
        if takes != self._takes or (self._busy is not None and self._busy()):
            self._watch_unclaimed()
        else:
            self._unclaimed(self.drain())
