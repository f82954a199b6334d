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

__all__ = ["HandlerThreads"]

_Job = tuple[contextvars.Context, Callable[[], object], asyncio.Future[object]]


class HandlerThreads:
    """Runs callables in daemon threads: an idle one is reused, otherwise a new one starts.

    There is no limit here; the consumers' ``concurrency`` bounds how many run at once.
    """

    def __init__(self, name: str = "qkit-handler") -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def submit(self, call: Callable[[], object]) -> asyncio.Future[object]:
        """Run ``call`` in a thread, in a copy of this context; return a future of its result."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._jobs.put((contextvars.copy_context(), call, future))
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
                return future
            self._threads += 1
        threading.Thread(
            target=self._work, name=f"{self._name}-{next(self._numbers)}", daemon=True
        ).start()
        return future

    def close(self) -> None:
        """Let idle threads end; busy ones end when their call returns."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            context, call, future = job
            result: object = None
            error: BaseException | None = None
            try:
                result = context.run(call)
            except BaseException as exc:  # it belongs to whoever awaits the future
                error = exc
            with self._lock:
                self._idle += 1
            try:
                future.get_loop().call_soon_threadsafe(_resolve, future, result, error)
            except RuntimeError:  # the loop is closed: nobody is left to hear it
                return
            del job, context, call, future, result, error  # hold nothing while idle


def _resolve(future: asyncio.Future[object], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future refuses it
        future.set_exception(RuntimeError("the handler raised StopIteration"))
    else:
        future.set_exception(error)
