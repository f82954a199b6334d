"""One timer for many waits of equal length.

``asyncio.timeout`` arms and cancels a timer for each use, which costs as much as all the rest of a
send inside the process. Waits of one length end in the order in which they began, so one timer,
for the oldest, is enough.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

__all__ = ["Deadline", "Deadlines"]


class Deadlines:
    """Time-outs that all last ``seconds``, in one event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.open: dict[Deadline, None] = {}  # in the order of their ends
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop they run in; asking asyncio each time would cost as much as the rest."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def arm(self) -> None:
        """See to it that the timer runs, unless nothing is open."""
        if self._timer is None and self.open:
            oldest = next(iter(self.open))
            self._timer = self.loop.call_at(oldest.end, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self.loop.time()
        for deadline in list(self.open):
            if deadline.end > now:
                break
            deadline.expire()
        self.arm()


class Deadline:
    """One such time-out, for ``with``: raises ``TimeoutError`` as ``asyncio.timeout`` does.

    >>> async def main() -> None:
    ...     try:
    ...         with Deadline(Deadlines(0.01)) as deadline:
    ...             await asyncio.sleep(60)
    ...     except TimeoutError:
    ...         print("expired:", deadline.expired)
    >>> asyncio.run(main())
    expired: True
    """

    __slots__ = ("_cancelling", "_deadlines", "_task", "end", "expired")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.expired = False

    def __enter__(self) -> Self:
        """Begin; inside a task only."""
        deadlines = self._deadlines
        loop = deadlines.loop
        task = asyncio.current_task(loop)
        assert task is not None, "a deadline cancels its task"
        self._task = task
        self._cancelling = task.cancelling()
        self.end = loop.time() + deadlines.seconds
        deadlines.open[self] = None
        if len(deadlines.open) == 1:
            deadlines.arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The wait is over. If time is up, and nobody else cancelled the task: ``TimeoutError``."""
        if not self.expired:
            del self._deadlines.open[self]
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Time is up."""
        self.expired = True
        del self._deadlines.open[self]
        self._task.cancel()
