"""Waits that can be cut short, by hand or by one timer for many of equal length.

``asyncio.timeout`` arms and cancels a timer for each use, which costs as much as all the rest of a
send inside the process. Waits of one length end in the order in which they began, so one timer,
for the oldest, is enough.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from types import TracebackType
from typing import Self

__all__ = ["CancelScope", "Deadline", "DeadlineTimer"]


class DeadlineTimer:
    """Time-outs that all last ``seconds``, in one event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.open: dict[Deadline, None] = {}  # in the order of their ends
        self.timer: asyncio.TimerHandle | None = None

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Their loop; kept, since before Python 3.12 each look for it is a call of the system."""
        return asyncio.get_running_loop()

    def deadline_from_now(self) -> float:
        """Return the loop's time at which a deadline that begins now will end."""
        return self.loop.time() + self.seconds

    def arm(self) -> None:
        """Set the timer to the end of the oldest, if any is open."""
        oldest = next((item for item in self.open if not item.expired), None)
        if oldest is not None:
            self.timer = self.loop.call_at(oldest.end, self._fire)

    def _fire(self) -> None:
        self.timer = None
        now = self.loop.time()
        for deadline in list(self.open):
            if deadline.end > now:
                break
            deadline.expire()
        self.arm()


class CancelScope:
    """What a task does within ``with``, which ``expire`` cuts short: it raises ``TimeoutError``.

    As ``asyncio.timeout(None)`` does, without asking asyncio for the task and its loop each time.
    """

    __slots__ = ("_cancelling", "_task", "expired")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.expired = False
        self._task = task

    def __enter__(self) -> Self:
        """Begin."""
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; raises ``TimeoutError`` if it was cut short and nobody else cancelled the task."""
        if self.expired:
            left = self._task.uncancel()
            if left <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def expire(self) -> None:
        """Cut it short."""
        if not self.expired:
            self.expired = True
            self._task.cancel()


class Deadline(CancelScope):
    """A scope of the running task that expires when its time is up, counted from its making.

    >>> async def main() -> None:
    ...     try:
    ...         with Deadline(DeadlineTimer(0.01)) as deadline:
    ...             await asyncio.sleep(60)
    ...     except TimeoutError:
    ...         print("expired:", deadline.expired)
    >>> asyncio.run(main())
    expired: True
    """

    __slots__ = ("_timer", "end")

    def __init__(self, timer: DeadlineTimer) -> None:
        self.expired = False
        self.end = timer.loop.time() + timer.seconds
        self._timer = timer

    def __enter__(self) -> Self:
        """Begin."""
        timer = self._timer
        task = asyncio.current_task(timer.loop)
        assert task is not None, "a deadline cancels its task, so there must be one"
        self._task = task
        self._cancelling = task.cancelling()
        timer.open[self] = None
        if timer.timer is None:
            timer.arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, perhaps with ``TimeoutError``."""
        del self._timer.open[self]
        if self.expired:
            super().__exit__(kind, error, traceback)
