"""Daemon threads for synchronous handlers.

``ThreadPoolExecutor`` is joined when the interpreter exits, so one stuck handler would keep a
process alive after its second SIGTERM. These threads are daemons: they never hold up an exit.
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
    """Runs callables in daemon threads: an idle one is reused, otherwise a new one starts.

    There is no limit here; the consumers' ``concurrency`` bounds how many run at once.
    """

    def __init__(self, name: str = "qkit-handler") -> None:
        self._pool = _DaemonPool(name)

    def submit(self, call: Callable[[], object]) -> asyncio.Future[object]:
        """Run ``call`` in a thread, in a copy of this context; return a future of its result."""
        context = contextvars.copy_context()

        def run() -> object:
            return context.run(_without_stop_iteration, call)

        # By the loop's own way, so that a virtual clock knows of it.
        return asyncio.get_running_loop().run_in_executor(self._pool, run)

    def close(self) -> None:
        """Let idle threads end; busy ones end when their call returns."""
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
            except BaseException as error:  # it belongs to whoever awaits the future
                self._resting()
                future.set_exception(error)
            else:
                self._resting()
                future.set_result(result)

        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                name = f"{self._name}-{next(self._numbers)}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._threads += 1
            self._calls.put(run)  # last: if no thread can be started, it must not run later
        return future

    def close(self) -> None:
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)

    def _resting(self) -> None:
        """This thread is as good as idle, also for whoever hears of its result first."""
        with self._lock:
            self._idle += 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # hold nothing while idle


def _without_stop_iteration(call: Callable[[], object]) -> object:
    try:
        return call()
    except StopIteration as error:  # a future refuses to carry it
        raise RuntimeError("the handler raised StopIteration") from error
