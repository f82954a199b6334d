"""Cancel scopes and deadlines, with one timer for all deadlines of the same length.

``asyncio.timeout`` sets and cancels a timer for each use, which costs as much as the rest of an
in-process send. Deadlines of the same length expire in the order in which they began, so one timer
for the oldest is enough.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from types import TracebackType
from typing import Self

__all__ = ["CancelScope", "Deadline", "DeadlineTimer"]


class DeadlineTimer:
    """Timer shared by all deadlines of one length in an event loop.

    Args:
        seconds: Length of the deadlines in seconds.

    Attributes:
        seconds: Length of the deadlines in seconds.
        open: Deadlines that were entered and not left yet, oldest first.
        timer: Timer handle for the oldest open deadline; ``None`` if no timer is set.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.open: dict[Deadline, None] = {}
        self.timer: asyncio.TimerHandle | None = None

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Running event loop; cached because ``get_running_loop`` is slow before Python 3.12."""
        return asyncio.get_running_loop()

    def deadline_from_now(self) -> float:
        """Return the loop time at which a deadline that begins now expires."""
        return self.loop.time() + self.seconds

    def arm(self) -> None:
        """Set the timer for the oldest open deadline that has not expired, if there is one."""
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
    """Context manager whose body ``expire`` aborts with ``TimeoutError``.

    Works like ``asyncio.timeout(None)``, but does not look up the task and its loop each time.

    Args:
        task: Task that enters the scope.

    Attributes:
        expired: Whether ``expire`` was called.
    """

    __slots__ = ("_cancelling", "_task", "expired")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.expired: bool = False
        self._task = task

    def __enter__(self) -> Self:
        """Enter the scope."""
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the scope; raise ``TimeoutError`` if only ``expire`` cancelled the task."""
        if self.expired:
            left = self._task.uncancel()
            if left <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the task inside the scope."""
        if not self.expired:
            self.expired = True
            self._task.cancel()


class Deadline(CancelScope):
    """Cancel scope for the current task that expires after a fixed time.

    The time runs from construction, not from entry into the ``with`` block.

    Args:
        timer: Shared timer, whose ``seconds`` is the length of the deadline.

    Attributes:
        end: Loop time at which the deadline expires.

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
        self.end: float = timer.loop.time() + timer.seconds
        self._timer = timer

    def __enter__(self) -> Self:
        """Enter the scope; set the timer if needed."""
        timer = self._timer
        task = asyncio.current_task(timer.loop)
        assert task is not None, "a deadline must be entered in a task"
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
        """Leave the scope; raise ``TimeoutError`` if the deadline cancelled the task."""
        del self._timer.open[self]
        if self.expired:
            super().__exit__(kind, error, traceback)
