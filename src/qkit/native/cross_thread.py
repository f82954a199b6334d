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
ENDED = "the engine's event loop has ended: close the engine before the loop that opened it"


class LoopPortal:
    """Portal into the event loop of an engine, for calls from other threads.

    A call compares ``thread`` with its own, which costs 0.03 µs; asking for the running loop costs
    several times as much on Python 3.11. A call from another thread runs as a task of the
    engine's loop, in the caller's context, while the caller awaits the answer in its own loop.
    """

    __slots__ = ("_closed", "_lock", "_loop", "_pending_calls", "thread")

    def __init__(self) -> None:
        self.thread = 0  # no thread has this number: not open yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._lock = threading.Lock()  # between the look whether it is open and the call
        self._pending_calls: set[asyncio.Task[Any]] = set()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """This thread's loop is the engine's."""
        self._loop = loop
        self.thread = get_ident()

    @property
    def accepts_calls(self) -> bool:
        """Whether a call from another thread would be run."""
        return self._loop is not None and self._loop.is_running() and not self._closed

    async def run(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        unwanted: Callable[[T], None] | None = None,
    ) -> T:
        """Await ``call()`` in the engine's loop, from another one.

        Cancelling this cancels that. An answer that was on its way by then is given to
        ``unwanted``, in the engine's loop, so that it is not lost. Raises ``LifecycleError`` when
        the engine or its loop is closed, also while the call is under way.
        """
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
                with contextlib.suppress(RuntimeError):  # its loop has ended: so did all leases
                    self._loop.call_soon_threadsafe(unwanted, answer.result())
            raise

    def _begin(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        answer: Future[T],
        unwanted: Callable[[T], None] | None,
    ) -> None:
        """In the engine's loop: start the call, unless it is too late for that."""
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

        def give_up(answer: Future[T]) -> None:
            if answer.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
                    loop.call_soon_threadsafe(task.cancel)

        def finish(task: asyncio.Task[T]) -> None:
            self._pending_calls.discard(task)
            error = _error(ENDED) if task.cancelled() else task.exception()
            # From here on the caller cannot cancel it: it finds the answer instead.
            if answer.set_running_or_notify_cancel():
                if error is None:
                    answer.set_result(task.result())
                else:
                    answer.set_exception(error)
            elif error is None and unwanted is not None:
                unwanted(task.result())

        task.add_done_callback(finish)
        answer.add_done_callback(give_up)

    def close(self) -> bool:
        """Accept no more calls; return whether it was open."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        return was_open

    async def wait_drained(self) -> None:
        """Wait until every call that was accepted before the close has an answer."""
        calls = self._pending_calls - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls)


class _Home(Protocol):
    @property
    def portal(self) -> LoopPortal: ...


H = TypeVar("H", bound=_Home)


def callable_from_any_thread(
    method: Callable[Concatenate[H, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, T]]:
    """Make a method safe to await in any thread. Its cost is a coroutine more.

    The look is taken when the coroutine runs, not when it is made: ``asyncio.run(engine.stats())``
    makes it before there is a loop, and it may be made in one thread and run in another.
    """

    @functools.wraps(method)
    async def wherever(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        portal = self.portal
        if get_ident() == portal.thread:
            return await method(self, *args, **kwargs)
        return await portal.run(functools.partial(method, self, *args, **kwargs))

    return wherever


def _error(message: str) -> LifecycleError:
    return LifecycleError(message, backend="native")
