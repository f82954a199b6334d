"""Those who wait for their turn at a queue, in the order in which they came."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable

__all__ = ["Line"]


class Line:
    """Waiters in order of arrival; one that was called in vain comes back to its old place.

    ``places`` are the number, the waiter and the name of each; ``called`` those that were told to
    look and have not come to it yet, which is why a place is no promise: between the call and the
    turn of its task anybody may be quicker. A call is never lost: when its waiter is cancelled,
    ``pass_on`` is called to see whether another one should have it.
    """

    __slots__ = ("_last", "_pass_on", "called", "places")

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self.places: list[tuple[int, asyncio.Future[None], str | None]] = []
        self.called: dict[int, str | None] = {}
        self._last = 0
        self._pass_on = pass_on

    async def wait(
        self, waiter: asyncio.Future[None], name: str | None = None, place: int = 0
    ) -> int:
        """Wait to be called; return the place, to come back to it. Safe to cancel."""
        if place:
            insort(self.places, (place, waiter, name))  # numbers differ: nothing else compares
        else:
            self._last = place = self._last + 1
            self.places.append((place, waiter, name))
        try:
            await waiter
        except BaseException:
            if place in self.called:
                del self.called[place]
                self._pass_on()
            else:
                self._leave(place)
            raise
        del self.called[place]
        return place

    def call(self, at: int = 0) -> bool:
        """Tell the one at an index of ``places`` to look; false if it was just cancelled."""
        place, waiter, name = self.places.pop(at)
        if waiter.done():
            return False
        self.called[place] = name
        waiter.set_result(None)
        return True

    def call_all(self) -> None:
        """Tell everyone."""
        while self.places:
            self.call()

    def _leave(self, place: int) -> None:
        at = bisect_left(self.places, (place,))
        if at < len(self.places) and self.places[at][0] == place:  # else a call passed it by
            del self.places[at]
