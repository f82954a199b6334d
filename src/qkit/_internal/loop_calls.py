"""Calls into an event loop from other threads."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from qkit.errors import LifecycleError

__all__ = ["LoopCall", "LoopCaller", "require_asyncio", "running_loop"]

R = TypeVar("R")

LOOP_CHECK_INTERVAL_SECONDS = 0.5
STOPPED_LOOP_CHECKS = 10
"""Number of consecutive checks that find the loop stopped, but not closed, until a call fails."""


# ``asyncio.events.__all__`` contains this name despite its underscore.
running_loop = asyncio._get_running_loop  # pyright: ignore[reportPrivateUsage]
"""Return the event loop that runs in this thread, or ``None``; never raise an exception."""


def require_asyncio(operation: str) -> asyncio.AbstractEventLoop:
    """Return the running event loop; raise ``LifecycleError`` if asyncio is not running."""
    loop = running_loop()
    if loop is None:
        raise LifecycleError(
            f"{operation}() needs a running asyncio event loop, and there is none in this thread: "
            "use asyncio.run(…). trio is not supported; in a program without asyncio use "
            "SyncQueueService, from a thread",
            operation=operation,
        )
    return loop


class LoopCaller:
    """Access to an event loop for other threads of the same process.

    Args:
        loop: Event loop that was created in this process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._process = os.getpid()

    def in_own_process(self) -> bool:
        """Return whether the current process created the loop, and is not a fork."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raise ``LifecycleError`` in a fork of the loop's process."""
        if not self.in_own_process():
            raise LifecycleError(
                f"the service runs in process {self._process}, and its event loop does not run in "
                f"the forked process {os.getpid()}: create and start a service in each process"
            )

    def submit(self, work: Callable[[], Coroutine[object, object, R]]) -> LoopCall[R]:
        """Create a coroutine in the loop's thread and run it there as a task.

        The task runs in a copy of this thread's context, so that it continues the trace.

        Args:
            work: Called in the loop's thread; returns the coroutine.

        Returns:
            The call. Its ``result`` method waits for the coroutine.

        Raises:
            LifecycleError: This is a fork of the loop's process, or the loop is closed.
        """
        self.check_process()
        call = LoopCall(self.loop, work)
        try:
            self.loop.call_soon_threadsafe(call.begin, context=contextvars.copy_context())
        except RuntimeError:  # the loop is closed
            raise _ended() from None
        return call


class LoopCall(Generic[R]):
    """Coroutine that runs in an event loop while another thread waits for its result."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[object, object, R]]
    ) -> None:
        self._loop = loop
        self._work = work
        self._answer: Future[R] = Future()
        self._task: asyncio.Task[R] | None = None

    def begin(self) -> None:
        """Start the task unless the waiting thread was interrupted; called in the loop's thread."""
        if self._answer.cancelled():
            return
        try:
            task = self._task = self._loop.create_task(self._work(), name="qkit call")
        except Exception as error:
            if self._answer.set_running_or_notify_cancel():
                self._answer.set_exception(error)
        else:
            task.add_done_callback(self._finish)

    def result(self) -> R:
        """Wait for the coroutine; cancel it if this thread is interrupted.

        Returns:
            The result of the coroutine.

        Raises:
            LifecycleError: The task was cancelled, or its loop was closed or stopped.
            BaseException: The coroutine failed with this error, or this thread was interrupted.
        """
        stopped = 0
        try:
            while True:
                try:
                    return self._answer.result(LOOP_CHECK_INTERVAL_SECONDS)
                except TimeoutError:
                    if self._answer.done():  # the coroutine raised TimeoutError, or has just ended
                        return self._answer.result()
                stopped = 0 if self._loop.is_running() else stopped + 1
                if self._loop.is_closed() or stopped >= STOPPED_LOOP_CHECKS:
                    raise _ended()
        except BaseException:
            self._abandon()
            raise
        finally:
            del self  # avoid a cycle: the error, which self holds, refers to this frame

    def _abandon(self) -> None:
        if self._answer.cancel():  # false if the call already has a result
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            error: BaseException | None = LifecycleError(
                "the service was shut down before this call ended"
            )
        else:
            error = task.exception()
        if not self._answer.set_running_or_notify_cancel():
            return  # the waiting thread was interrupted
        if error is None:
            self._answer.set_result(task.result())
        else:
            self._answer.set_exception(error)


def _ended() -> LifecycleError:
    return LifecycleError(
        "the service's event loop stopped before this call ended: if it was a send, the message "
        "may or may not have arrived"
    )
