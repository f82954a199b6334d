"""``Arrivals``: items that a broker delivered, until a ``receive`` takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Arrivals"]

T = TypeVar("T")


class Arrivals(Generic[T]):
    """The queue between a driver that delivers and the callers of ``receive``.

    ``take`` removes items and returns in one step of the loop: a cancelled ``take`` has taken
    nothing.

    Args:
        unclaimed: Called with all items, oldest first, that waited ``after`` seconds while no
            caller was in ``take``. They are removed. By default items wait without limit.
        after: Seconds; with 0 ``unclaimed`` is called at once. After a ``take`` that left items it
            may be up to twice as many.
        busy: While it returns true, unclaimed items wait for another ``after`` seconds.
        left: Called when the last caller has left ``take``.
        order: Key of an item in the order of delivery, for ``put_back``. By default an item that
            is put back goes to the front.
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
        self.receivers = 0  # callers in ``take``
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._stopped = False
        self._error: Exception | None = None
        self._unclaimed = unclaimed
        self._after = after
        self._busy = busy
        self._left = left
        self._order = order
        self._takes = 0  # calls of ``take``
        self._timer: asyncio.TimerHandle | None = None  # a ``take`` leaves it: cheaper

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Iterable[T]) -> None:
        """Add items behind those that wait."""
        self._items.extend(items)
        self._added()

    def put_back(self, item: T) -> None:
        """Return an item that was taken to its place in the order of delivery."""
        place = 0
        if self._order is not None:
            key = self._order(item)
            while place < len(self._items) and self._order(self._items[place]) < key:
                place += 1
        self._items.insert(place, item)
        self._added()

    def wake(self) -> None:
        """Let every caller of ``take`` ask again."""
        self._changed.set()

    def stop(self) -> None:
        """From now on ``take`` returns nothing; items that wait are for ``drain``."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()

    def fail(self, error: Exception, *, drop: bool) -> None:
        """Let ``take`` raise ``error``: at once with ``drop``, else once no items wait."""
        if drop:
            self._items.clear()
        self._error = error
        self._changed.set()

    def drain(self) -> list[T]:
        """Remove and return all items that wait, oldest first."""
        items = list(self._items)
        self._items.clear()
        return items

    async def take(self, limit: int, ask: Callable[[int], None] | None = None) -> list[T]:
        """Wait for items and return up to ``limit`` of them; none once stopped.

        Args:
            limit: How many to take at most.
            ask: Called with ``limit`` whenever nothing waits. It may start a fetch and must not
                wait.

        Raises:
            Exception: The error given to ``fail``.
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
                if ask is not None:
                    ask(limit)
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
        """Items wait and no caller is in ``take``: give them back later, or now."""
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
