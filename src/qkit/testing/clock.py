"""A clock for tests: time in the running event loop is virtual and jumps instead of passing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from selectors import BaseSelector, SelectorKey
from types import TracebackType
from typing import Final, Self, TypeVar

__all__ = ["VirtualClock"]

_T = TypeVar("_T")
EPOCH: Final = 1_750_000_000.0  # the wall time at which every virtual clock starts
_SETTLE: Final = 4  # loop passes after an advance: a timer, the two that defer it, and its effects


class VirtualClock:
    """A ``Clock`` that makes the running asyncio loop skip every wait.

    When all tasks wait for a timer, the time jumps to it, so a seven-day backoff takes
    microseconds and always the same ones run in the same order. While work runs in threads
    (``run_in_executor``, ``to_thread``) it really waits, and an event in real time, such as that
    work being done, comes before any jump. For tests without sockets: a peer takes real time.

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
        """The virtual time of the loop; equal to its ``time()``."""
        return self._now

    def time(self) -> float:
        """The wall time: a fixed epoch, and what has passed since."""
        return self._epoch + (self._now - self._started)

    def jump(self, seconds: float) -> None:
        """Let ``seconds`` pass at once, as when the loop is blocked: nothing runs meanwhile."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and everything that became due meanwhile happen."""
        await asyncio.sleep(seconds)
        for _ in range(_SETTLE):
            await asyncio.sleep(0)

    async def idle(self) -> None:
        """Wait until everything that can happen now has happened; no time passes."""
        await self._wait(self._idle)

    async def step(self) -> None:
        """Let time jump once, to whatever is due next.

        Raises ``RuntimeError`` if nothing is: waiting on would be waiting for ever.
        """
        await self._wait(self._steps)

    async def _wait(self, among: list[asyncio.Future[None]]) -> None:
        if not self._restore:
            raise RuntimeError("this clock is not in use: enter it in the running loop first")
        waiter = asyncio.get_running_loop().create_future()
        among.append(waiter)
        await waiter

    # Context

    def __enter__(self) -> Self:
        if self._restore:
            raise RuntimeError("this clock is in use: make another one")
        loop = asyncio.get_running_loop()
        selector = getattr(loop, "_selector", None)
        if not isinstance(selector, BaseSelector):
            raise RuntimeError(
                f"a virtual clock needs a stdlib selector event loop, not {type(loop).__name__}"
            )
        # Timers set before must not come due all at once, so time goes on from where it is.
        # It starts at a whole second: then differences of the times in a test are exact.
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
        """Put ``replacement`` before the class's own method, on this one instance."""
        attributes = vars(target)
        if name in attributes:
            raise RuntimeError(f"{name!r} of this loop is patched already: one clock at a time")
        attributes[name] = replacement
        self._restore.append(lambda: attributes.pop(name))

    def _selecting(
        self, select: Callable[[float | None], list[tuple[SelectorKey, int]]]
    ) -> Callable[[float | None], list[tuple[SelectorKey, int]]]:
        def jump(timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
            events = select(0)
            if events or timeout == 0:
                return events
            if self._thread_work:  # it takes real time, and may yet bring something about
                events = select(timeout)
                if not events and timeout is not None:
                    self._now += timeout
                return events
            if _resolve(self._idle):
                return []
            if timeout is None:  # nothing is timed: only a real event can go on
                stuck = RuntimeError("nothing is due: whatever is awaited will never come")
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
    """End every wait, if there is one that was not given up; say whether there was."""
    waiting = [waiter for waiter in waiters if not waiter.done()]
    waiters.clear()
    for waiter in waiting:
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
    return bool(waiting)
