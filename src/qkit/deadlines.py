"""One timer for many waits of equal length.

``asyncio.timeout`` arms and cancels a timer for each use, a fifth of what a send inside the process
costs. Waits of one length end in the order in which they began, so one timer, for the oldest, is
enough.
"""

from __future__ import annotations

import asyncio

__all__ = ["Deadlines"]


class Deadlines:
    """Time-outs that all last ``seconds``.

    >>> async def main() -> None:
    ...     deadlines = Deadlines(0.01)
    ...     scope = deadlines.begin()
    ...     try:
    ...         async with scope:
    ...             await asyncio.sleep(60)
    ...     except TimeoutError:
    ...         print("expired:", scope.expired())
    ...     finally:
    ...         deadlines.end(scope)
    >>> asyncio.run(main())
    expired: True
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: dict[asyncio.Timeout, float] = {}  # in the order of their ends
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> asyncio.Timeout:
        """A scope for ``async with``, at once; it must be given to ``end`` afterwards."""
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        self._open[scope] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._fire, loop)
        return scope

    def end(self, scope: asyncio.Timeout) -> None:
        """The wait is over, one way or the other."""
        self._open.pop(scope, None)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for scope, end in list(self._open.items()):
            if end > now:
                self._timer = loop.call_at(end, self._fire, loop)
                return
            del self._open[scope]
            scope.reschedule(now)
