"""``VirtualClock``: virtual time in the running event loop, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from selectors import BaseSelector, SelectorKey
from types import TracebackType
from typing import Final, Self, TypeVar

__all__ = ["VirtualClock"]

_T = TypeVar("_T")
EPOCH: Final = 1_750_000_000.0  # wall time at the start of a virtual clock
# Loop iterations after ``advance``: one for due timers, two for callbacks that they schedule, one
# for the effects of these callbacks.
_SETTLE_ITERATIONS: Final = 4


class VirtualClock:
    """Clock that skips every wait in the running asyncio event loop.

    When all tasks wait for timers, time jumps to the next timer. A backoff of seven days takes
    microseconds, and tasks always run in the same order. While work runs in threads
    (``run_in_executor``, ``to_thread``), the clock waits for it in real time. Do not use it in
    tests with sockets, because the peer needs real time.

    Use it as a context manager inside the event loop.

    Args:
        epoch: Wall time at the start, in seconds since the epoch. Default:
            1,750,000,000 (June 2025).

    Example:
        >>> import asyncio
        >>> from qkit.testing import VirtualClock
        >>> async def main() -> None:
        ...     with VirtualClock() as clock:
        ...         before = clock.monotonic()
        ...         await asyncio.sleep(7 * 24 * 3600)
        ...         print(clock.monotonic() - before)
        >>> asyncio.run(main())
        604800.0
    """

    def __init__(self, *, epoch: float = EPOCH) -> None:
        self._epoch = epoch
        self._started = 0.0
        self._now = 0.0
        self._thread_work = 0
        self._restore: list[Callable[[], None]] = []
        self._idle: list[asyncio.Future[None]] = []
        self._steps: list[asyncio.Future[None]] = []

    # Clock

    def monotonic(self) -> float:
        """Return the virtual time of the event loop; equal to ``loop.time()``.

        Returns:
            Seconds since an arbitrary start.

        Example:
            >>> import asyncio
            >>> from qkit.testing import VirtualClock
            >>> async def main() -> None:
            ...     with VirtualClock() as clock:
            ...         print(clock.monotonic() == asyncio.get_running_loop().time())
            >>> asyncio.run(main())
            True
        """
        return self._now

    def time(self) -> float:
        """Return the virtual wall time.

        Returns:
            Seconds since the epoch: the epoch of the clock plus the virtual time since its start.

        Example:
            >>> from qkit.testing import VirtualClock
            >>> VirtualClock(epoch=1000.0).time()
            1000.0
        """
        return self._epoch + (self._now - self._started)

    def jump(self, seconds: float) -> None:
        """Move time forward without running anything, as if the event loop were blocked.

        Args:
            seconds: How far time moves, in seconds.

        Example:
            >>> from qkit.testing import VirtualClock
            >>> clock = VirtualClock(epoch=1000.0)
            >>> clock.jump(60)
            >>> clock.time()
            1060.0
        """
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Let time pass and run everything that becomes due.

        Args:
            seconds: How much time passes, in seconds.

        Example:
            >>> import asyncio
            >>> from qkit.testing import VirtualClock
            >>> async def main() -> None:
            ...     with VirtualClock() as clock:
            ...         asyncio.get_running_loop().call_later(60, print, "a minute later")
            ...         await clock.advance(60)
            >>> asyncio.run(main())
            a minute later
        """
        await asyncio.sleep(seconds)
        for _ in range(_SETTLE_ITERATIONS):
            await asyncio.sleep(0)

    async def idle(self) -> None:
        """Wait until nothing more can run without time passing.

        Raises:
            RuntimeError: The clock was not entered.

        Example:
            >>> import asyncio
            >>> from qkit.testing import VirtualClock
            >>> async def main() -> None:
            ...     with VirtualClock() as clock:
            ...         asyncio.get_running_loop().call_soon(print, "now")
            ...         await clock.idle()
            >>> asyncio.run(main())
            now
        """
        await self._wait(self._idle)

    async def step(self) -> None:
        """Advance time once, to the next timer.

        Raises:
            RuntimeError: No timer is set, so time cannot advance, or the clock was not entered.

        Example:
            >>> import asyncio
            >>> from qkit.testing import VirtualClock
            >>> async def main() -> None:
            ...     with VirtualClock(epoch=1000.0) as clock:
            ...         asyncio.get_running_loop().call_later(60, lambda: None)
            ...         await clock.step()
            ...         print(clock.time())
            >>> asyncio.run(main())
            1060.0
        """
        await self._wait(self._steps)

    async def _wait(self, waiters: list[asyncio.Future[None]]) -> None:
        if not self._restore:
            raise RuntimeError("this clock is not active: enter it in the running loop first")
        waiter = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        await waiter

    # Context

    def __enter__(self) -> Self:
        if self._restore:
            raise RuntimeError("this clock is already active: create another one")
        loop = asyncio.get_running_loop()
        selector = getattr(loop, "_selector", None)
        if not isinstance(selector, BaseSelector):
            raise RuntimeError(f"expected asyncio's selector event loop, got {type(loop).__name__}")
        # Continue from the loop's time: otherwise existing timers might be due immediately.
        # Start at a whole second, so that differences between times are exact floats.
        self._started = self._now = float(int(loop.time()) + 1)
        self._patch(loop, "time", self.monotonic)
        self._patch(selector, "select", self._selecting(selector.select))
        self._patch(loop, "run_in_executor", self._counting(loop.run_in_executor))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._restore:
            self._restore.pop()()

    def _patch(self, target: object, name: str, replacement: object) -> None:
        """Override a method of one instance until the clock exits."""
        attributes = vars(target)
        if name in attributes:
            raise RuntimeError(f"{name!r} of this loop is already patched: use one clock at a time")
        attributes[name] = replacement
        self._restore.append(lambda: attributes.pop(name))

    def _selecting(
        self, select: Callable[[float | None], list[tuple[SelectorKey, int]]]
    ) -> Callable[[float | None], list[tuple[SelectorKey, int]]]:
        def jump(timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
            events = select(0)
            if events or timeout == 0:
                return events
            if self._thread_work:  # wait in real time: the threads may schedule callbacks
                events = select(timeout)
                if not events and timeout is not None:
                    self._now += timeout
                return events
            if _resolve(self._idle):
                return []
            if timeout is None:  # no timer is set: only an event in real time can wake the loop
                stuck = RuntimeError("no timer is set: time cannot advance")
                return [] if _resolve(self._steps, stuck) else select(None)
            self._now += timeout
            _resolve(self._steps)
            return []

        return jump

    def _counting(
        self, run: Callable[..., asyncio.Future[_T]]
    ) -> Callable[..., asyncio.Future[_T]]:
        def counted(executor: object, func: Callable[..., _T], *args: object) -> asyncio.Future[_T]:
            self._thread_work += 1
            try:
                future = run(executor, func, *args)
            except BaseException:
                self._thread_work -= 1
                raise
            future.add_done_callback(self._thread_done)
            return future

        return counted

    def _thread_done(self, _: asyncio.Future[_T]) -> None:
        self._thread_work -= 1


def _resolve(waiters: list[asyncio.Future[None]], error: Exception | None = None) -> bool:
    """Complete all waiters that are not done; return whether there were any."""
    waiting = [waiter for waiter in waiters if not waiter.done()]
    waiters.clear()
    for waiter in waiting:
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
    return bool(waiting)
