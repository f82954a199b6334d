"""Calls from other threads, run in the event loop that owns the engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from _thread import get_ident
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from qkit.errors import LifecycleError

__all__ = ["LoopPortal", "callable_from_any_thread", "get_ident"]

P = ParamSpec("P")
T = TypeVar("T")

NOT_OPEN = "the engine is not open: use 'async with Engine() as engine'"
CLOSED = "the engine is closed"
FORKED = (
    "the engine was opened before this process was forked: open an engine, or start a service, in "
    "each process"
)
ENDED = "the engine's event loop has ended: close the engine before the loop that opened it"


class LoopPortal:
    """Portal into the event loop of an engine, for calls from other threads.

    A call compares ``thread`` with the current thread, which takes 0.03 µs; looking up the running
    loop takes several times as long on Python 3.11. A call from another thread runs as a task of
    the engine's loop, in the caller's context. The caller awaits the result in its own loop.
    """

    __slots__ = ("_closed", "_lock", "_loop", "_pending_calls", "in_fork", "thread")

    def __init__(self) -> None:
        self.thread: int = 0  # not open yet; no thread has this number
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.in_fork: bool = False  # this is a fork of the process that opened the engine
        self._lock = threading.Lock()  # keeps the engine open between the check and the call
        self._pending_calls: set[asyncio.Task[Any]] = set()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the current thread's ``loop`` the engine's loop."""
        self._loop = loop
        self.thread = get_ident()

    def after_fork(self) -> None:
        """Reject all calls, because this is a fork of the process that opened the engine."""
        self.in_fork = True
        self.thread = 0
        self._lock = threading.Lock()  # another thread may have held it during the fork

    def check_process(self) -> None:
        """Raise ``LifecycleError`` in a fork of the process that opened the engine."""
        if self.in_fork:
            raise _error(FORKED)

    @property
    def accepts_calls(self) -> bool:
        """Whether the engine is open and its loop is running."""
        return self._loop is not None and self._loop.is_running() and not self._closed

    async def run(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        unwanted: Callable[[T], None] | None = None,
    ) -> T:
        """Await ``call()`` in the engine's loop, from another loop.

        Cancelling this coroutine cancels the call.

        Args:
            call: Returns the coroutine to run in the engine's loop.
            unwanted: Called in the engine's loop with a result that arrived after the
                cancellation, so that it is not lost.

        Returns:
            The result of the call.

        Raises:
            LifecycleError: The engine is not open, its loop has ended, or either was closed during
                the call.
        """
        self.check_process()
        answer: Future[T] = Future()
        with self._lock:
            if self._closed or self._loop is None:
                raise _error(CLOSED if self._closed else NOT_OPEN)
            if not self._loop.is_running():
                raise _error(ENDED)
            self._loop.call_soon_threadsafe(self._begin, call, answer, unwanted)
        try:
            return await asyncio.wrap_future(answer)
        except BaseException:
            if not answer.cancel() and unwanted is not None and answer.exception() is None:
                with contextlib.suppress(RuntimeError):  # loop and leases have ended
                    self._loop.call_soon_threadsafe(unwanted, answer.result())
            raise

    def _begin(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        answer: Future[T],
        unwanted: Callable[[T], None] | None,
    ) -> None:
        """Start the call, unless the engine is closed or the call was cancelled.

        Runs in the engine's loop.
        """
        if self._closed:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(_error(CLOSED))
            return
        if answer.cancelled():
            return
        loop = self._loop
        assert loop is not None
        task = loop.create_task(call(), name="qkit-call-from-another-thread")
        self._pending_calls.add(task)

        def cancel_task(answer: Future[T]) -> None:
            if answer.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
                    loop.call_soon_threadsafe(task.cancel)

        def finish(task: asyncio.Task[T]) -> None:
            self._pending_calls.discard(task)
            error = _error(ENDED) if task.cancelled() else task.exception()
            # From here on the caller can no longer cancel the call, and receives its result.
            if answer.set_running_or_notify_cancel():
                if error is None:
                    answer.set_result(task.result())
                else:
                    answer.set_exception(error)
            elif error is None and unwanted is not None:
                unwanted(task.result())

        task.add_done_callback(finish)
        answer.add_done_callback(cancel_task)

    def close(self) -> bool:
        """Reject further calls; return whether the portal was open."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        return was_open

    async def wait_drained(self) -> None:
        """Wait until every call that was accepted before ``close`` has finished."""
        calls = self._pending_calls - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls)


class _HasPortal(Protocol):
    @property
    def portal(self) -> LoopPortal: ...


H = TypeVar("H", bound=_HasPortal)


def callable_from_any_thread(
    method: Callable[Concatenate[H, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, T]]:
    """Make a coroutine method safe to await in any thread, at the cost of one more coroutine.

    The thread is checked when the coroutine runs, not when it is created.
    ``asyncio.run(engine.stats())`` creates the coroutine before there is a loop, and a coroutine
    may be created in one thread and run in another.
    """

    @functools.wraps(method)
    async def wrapper(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        portal = self.portal
        if get_ident() == portal.thread:
            return await method(self, *args, **kwargs)
        return await portal.run(functools.partial(method, self, *args, **kwargs))

    return wrapper


def _error(message: str) -> LifecycleError:
    return LifecycleError(message, backend="native")
