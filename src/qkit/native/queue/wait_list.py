"""FIFO wait list of parked consumers or senders."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable

__all__ = ["WaitList"]


class WaitList:
    """FIFO wait list in which a waiter that was woken in vain keeps its place.

    ``waiters`` contains the place, future and name of each waiter. ``woken`` contains the place and
    name of each woken waiter whose task has not run yet. A wake-up guarantees nothing: before the
    woken task runs, another task may take the message. A wake-up is never lost: if its waiter is
    cancelled, ``pass_on`` is called, which may wake another waiter.
    """

    __slots__ = ("_last", "_pass_on", "waiters", "woken")

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self.waiters: list[tuple[int, asyncio.Future[None], str | None]] = []
        self.woken: dict[int, str | None] = {}
        self._last = 0
        self._pass_on = pass_on

    async def wait(
        self, waiter: asyncio.Future[None], name: str | None = None, place: int = 0
    ) -> int:
        """Wait to be woken. Safe to cancel.

        Args:
            waiter: New future that the wake-up completes.
            name: Name of the consumer. Default: none.
            place: Place that an earlier call returned. Default: the end of the list.

        Returns:
            The waiter's place in the list.
        """
        if place:
            # Places are unique, so the futures are never compared.
            insort(self.waiters, (place, waiter, name))
        else:
            self._last = place = self._last + 1
            self.waiters.append((place, waiter, name))
        try:
            await waiter
        except BaseException:
            if place in self.woken:
                del self.woken[place]
                self._pass_on()
            else:
                self._leave(place)
            raise
        del self.woken[place]
        return place

    def wake(self, at: int = 0) -> bool:
        """Wake the waiter at an index of ``waiters``; return false if it was just cancelled."""
        place, waiter, name = self.waiters.pop(at)
        if waiter.done():
            return False
        self.woken[place] = name
        waiter.set_result(None)
        return True

    def wake_all(self) -> None:
        """Wake every waiter."""
        while self.waiters:
            self.wake()

    def _leave(self, place: int) -> None:
        at = bisect_left(self.waiters, (place,))
        if at < len(self.waiters) and self.waiters[at][0] == place:  # else a wake-up removed it
            del self.waiters[at]
