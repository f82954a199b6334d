"""``LoopThread``: an event loop in a daemon thread, for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Self, TypeVar

from qkit._internal.loop_calls import LoopCall, LoopCaller
from qkit.errors import LifecycleError

__all__ = ["LoopThread"]

LOOP_DRAIN_SECONDS = 1.0
"""How long ``close`` waits for cancelled tasks; limited because a task may ignore cancellation."""

R = TypeVar("R")


class LoopThread(LoopCaller):
    """Event loop that runs in a daemon thread from construction until ``close``.

    Any other thread of this process may submit calls, and connections stay open between calls. In
    a forked process the thread does not exist: ``submit`` and ``call`` raise ``LifecycleError``,
    and ``close`` does nothing.

    Args:
        name: Name of the thread.
        on_exit: Called in the loop's thread after ``SystemExit`` or ``KeyboardInterrupt`` has ended
            the loop. Default: none.

    Attributes:
        exit: The ``SystemExit`` or ``KeyboardInterrupt`` that has ended the loop, or ``None``.
    """

    def __init__(self, name: str, on_exit: Callable[[], object] | None = None) -> None:
        super().__init__(asyncio.new_event_loop())
        self.exit: BaseException | None = None
        self._on_exit = on_exit
        self._entry = threading.Lock()  # keeps calls out of a loop that is about to stop
        self._closed = False
        self._stopped = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads
            self.loop.close()
            raise

    def submit(self, work: Callable[[], Coroutine[object, object, R]]) -> LoopCall[R]:
        """Create a coroutine in the loop's thread and run it there as a task.

        Every accepted call ends with a result or an error.

        Raises:
            LifecycleError: The process was forked, or ``close`` was called.
        """
        self.check_process()  # before the lock, which another thread may have held during the fork
        with self._entry:
            if self._closed or self._ended.is_set():
                raise LifecycleError("the service was shut down before this call started")
            return super().submit(work)

    def call(self, work: Callable[[], Coroutine[object, object, R]]) -> R:
        """Create a coroutine in the loop's thread, run it there and return its result.

        If the waiting thread is interrupted, the coroutine is cancelled.

        Raises:
            LifecycleError: ``submit`` raised it, or ``close`` cancelled the coroutine.
            BaseException: The coroutine failed with this error, or this thread was interrupted.
        """
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel all running tasks, stop the loop and wait for the thread; idempotent.

        An interrupt ends the wait, but the loop still stops.
        """
        if not self.in_own_process():
            return
        with self._entry, suppress(RuntimeError):  # raised if the loop is already closed
            self.loop.call_soon_threadsafe(self._stop)
            self._closed = True
        # ``join`` alone is not enough: before Python 3.13 an interrupted join marks a running
        # thread as ended.
        self._ended.wait()
        self._thread.join()

    def _stop(self) -> None:
        if not self._stopped:  # a second stop would end the wait for the cancelled tasks
            self._stopped = True
            self.loop.stop()

    def _run(self) -> None:
        try:
            _run_until_stopped(self.loop)
        except (KeyboardInterrupt, SystemExit) as error:  # of a handler
            self.exit = error
        finally:
            self._ended.set()
        if self.exit is not None and self._on_exit is not None:
            self._on_exit()

    def __enter__(self) -> Self:
        """Return this ``LoopThread``."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call ``close``."""
        self.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, cancel the remaining tasks, then close the loop."""
    try:
        loop.run_forever()
    finally:
        remaining = asyncio.all_tasks(loop)
        for task in remaining:
            task.cancel()
        if remaining:
            loop.run_until_complete(asyncio.wait(remaining, timeout=LOOP_DRAIN_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
