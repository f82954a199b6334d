"""A clock for tests: time in the running event loop is virtual and jumps instead of passing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from selectors import BaseSelector, SelectorKey
from types import TracebackType
from typing import Final, Self, TypeVar

import pytest_asyncio

__all__ = ["VirtualClock", "virtual_clock"]

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

    # Clock

    def monotonic(self) -> float:
        """The virtual time of the loop; equal to its ``time()``."""
        return self._now

    def time(self) -> float:
        """The wall time: a fixed epoch, and what has passed since."""
        return self._epoch + (self._now - self._started)

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and everything that became due meanwhile happen."""
        await asyncio.sleep(seconds)
        for _ in range(_SETTLE):
            await asyncio.sleep(0)

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
            if timeout is None:
                return select(None)  # nothing is timed: only a real event can go on
            events = select(0)
            if not events and timeout > 0:
                if self._thread_work:
                    events = select(timeout)
                if not events:
                    self._now += timeout
            return events

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


@pytest_asyncio.fixture
async def virtual_clock() -> AsyncIterator[VirtualClock]:
    """A virtual clock in the loop of the test."""
    with VirtualClock() as clock:
        yield clock
