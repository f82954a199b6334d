"""``HandlerThreads``: daemon threads for synchronous handlers.

The interpreter waits for the threads of a ``ThreadPoolExecutor`` at exit, so a handler that hangs
would keep the process alive after a second SIGTERM. It does not wait for daemon threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

__all__ = ["HandlerThreads"]

P = ParamSpec("P")
R = TypeVar("R")


class HandlerThreads:
    """Pool of daemon threads; a call reuses an idle thread or starts a new one.

    Only the ``concurrency`` of the handlers limits the number of threads.

    Args:
        name: Prefix of the thread names.
    """

    def __init__(self, name: str = "qkit-handler") -> None:
        self._pool = _DaemonPool(name)

    def submit(self, call: Callable[[], object]) -> asyncio.Future[object]:
        """Run a function in a thread, in a copy of the current context; return its future."""
        context = contextvars.copy_context()

        def run() -> object:
            return context.run(_without_stop_iteration, call)

        # Use ``run_in_executor``, because the virtual clock tracks its calls.
        return asyncio.get_running_loop().run_in_executor(self._pool, run)

    def close(self) -> None:
        """End idle threads now and busy threads after their call."""
        self._pool.close()


class _DaemonPool(Executor):
    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # raised where the future is awaited
                self._mark_idle()
                future.set_exception(error)
            else:
                self._mark_idle()
                future.set_result(result)

        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                name = f"{self._name}-{next(self._numbers)}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._threads += 1
            self._calls.put(run)  # last, so that nothing is queued if the thread cannot start
        return future

    def close(self) -> None:
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)

    def _mark_idle(self) -> None:
        """Count this thread as idle before its result is set, so that the next call reuses it."""
        with self._lock:
            self._idle += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # keep no reference while idle


def _without_stop_iteration(call: Callable[[], object]) -> object:
    try:
        return call()
    except StopIteration as error:  # a future cannot hold a StopIteration
        raise RuntimeError("the handler raised StopIteration") from error
