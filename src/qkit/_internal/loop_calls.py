"""Run a coroutine in an event loop from another thread, and wait for its result."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from qkit.errors import LifecycleError

__all__ = ["LoopCall", "LoopCaller", "running_loop"]

R = TypeVar("R")

LOOP_CHECK_INTERVAL_SECONDS = 0.5
STOPPED_LOOP_CHECKS = 10
"""After so many checks of a loop that is stopped and not closed, the call fails."""


running_loop = asyncio._get_running_loop  # pyright: ignore[reportPrivateUsage]  # in its __all__
"""Return the event loop that runs in this thread, ``None`` if none does: one call, no exception."""


class LoopCaller:
    """Entry to an event loop for the other threads of its process.

    Args:
        loop: The event loop, which belongs to this process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._process = os.getpid()

    def in_own_process(self) -> bool:
        """Return whether this is the loop's process and not a fork of it."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raise ``LifecycleError`` in a process that was forked from the loop's."""
        if not self.in_own_process():
            raise LifecycleError(
                f"the service runs in process {self._process} and this is its fork {os.getpid()}, "
                "where its event loop does not run: make and start a service in each process"
            )

    def submit(self, work: Callable[[], Coroutine[object, object, R]]) -> LoopCall[R]:
        """Create a coroutine in the loop and run it there as a task.

        The task runs in a copy of this thread's context, so a trace goes on in it.

        Args:
            work: Called in the loop's thread; returns the coroutine.

        Returns:
            The call; ``result`` waits for it.

        Raises:
            LifecycleError: The process was forked from the loop's, or the loop is closed.
        """
        self.check_process()
        call = LoopCall(self.loop, work)
        try:
            self.loop.call_soon_threadsafe(call.begin, context=contextvars.copy_context())
        except RuntimeError:  # the loop is closed
            raise _ended() from None
        return call


class LoopCall(Generic[R]):
    """One coroutine that runs in an event loop while another thread waits for it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[object, object, R]]
    ) -> None:
        self._loop = loop
        self._work = work
        self._answer: Future[R] = Future()
        self._task: asyncio.Task[R] | None = None

    def begin(self) -> None:
        """Start the task, in the loop, unless the waiting thread has given up."""
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
            What the coroutine returned.

        Raises:
            LifecycleError: The task was cancelled, or its loop was closed or stopped.
            BaseException: What the coroutine raised, or what interrupted this thread.
        """
        stopped = 0
        try:
            while True:
                try:
                    return self._answer.result(LOOP_CHECK_INTERVAL_SECONDS)
                except TimeoutError:
                    if self._answer.done():  # a TimeoutError of the coroutine, or just in time
                        return self._answer.result()
                stopped = 0 if self._loop.is_running() else stopped + 1
                if self._loop.is_closed() or stopped >= STOPPED_LOOP_CHECKS:
                    raise _ended()
        except BaseException:
            self._give_up()
            raise
        finally:
            del self  # the error, which it holds, refers to this frame: leave no cycle

    def _give_up(self) -> None:
        if self._answer.cancel():  # false once there is an answer
            with suppress(RuntimeError):  # the loop is closed: nothing runs there
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            error: BaseException | None = LifecycleError(
                "the service was shut down before this call was done"
            )
        else:
            error = task.exception()
        if not self._answer.set_running_or_notify_cancel():
            return  # nothing waits for it any more
        if error is None:
            self._answer.set_result(task.result())
        else:
            self._answer.set_exception(error)


def _ended() -> LifecycleError:
    return LifecycleError(
        "the service's event loop ended before this call was done: if it was a send, the message "
        "may or may not have arrived"
    )
