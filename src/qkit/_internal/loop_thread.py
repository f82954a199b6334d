"""Event loop in a daemon thread, for callers that have no event loop of their own."""

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
"""How long ``close`` waits for tasks that it cancelled: a task may ignore its cancellation."""

R = TypeVar("R")


class LoopThread(LoopCaller):
    """Run an event loop in a daemon thread from construction until ``close``.

    Connections stay open between calls. Any other thread of this process may call it. A forked
    process has no such thread: there ``submit`` and ``call`` raise and ``close`` does nothing.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(asyncio.new_event_loop())
        self._entry = threading.Lock()  # no call may enter a loop that is about to end
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
        """As ``LoopCaller.submit``; a call that is accepted always gets a result.

        Raises:
            LifecycleError: The process was forked, or ``close`` was called before.
        """
        self.check_process()  # before the lock: another thread may have held it during the fork
        with self._entry:
            if self._closed:
                raise LifecycleError("the service was shut down before this call began")
            return super().submit(work)

    def call(self, work: Callable[[], Coroutine[object, object, R]]) -> R:
        """Create a coroutine in the loop, run it there and return its result.

        An interrupt of the waiting thread cancels the coroutine.

        Raises:
            LifecycleError: As ``submit``; or ``close`` cancelled the coroutine.
            BaseException: What the coroutine raised, or what interrupted this thread.
        """
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel what still runs, end the loop and wait for the thread; idempotent.

        An interrupt ends the wait; the loop ends anyway.
        """
        if not self.in_own_process():
            return
        with self._entry, suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self._stop)
            self._closed = True
        # Not join alone: before Python 3.13 an interrupted join marks a running thread as ended.
        self._ended.wait()
        self._thread.join()

    def _stop(self) -> None:
        if not self._stopped:  # a second stop would end the wait for the cancelled tasks
            self._stopped = True
            self.loop.stop()

    def _run(self) -> None:
        try:
            _run_until_stopped(self.loop)
        finally:
            self._ended.set()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call ``close``."""
        self.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, cancel the tasks that are left, then close it."""
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=LOOP_DRAIN_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
