"""``SyncQueueService``: the same service for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

from qkit._internal.logging import logger
from qkit._internal.loop_calls import LoopCaller, running_loop
from qkit._internal.loop_thread import LoopThread
from qkit._internal.signals import handle_signals
from qkit.admin.dead_letters import DeadLetters
from qkit.backend import Backend, Capabilities, QueueStats
from qkit.errors import LifecycleError
from qkit.handlers.channel import Channel, Middleware, name_of
from qkit.handlers.registry import Handler
from qkit.message import DeadLetter, Message
from qkit.observability.connection_state import ConnectionState
from qkit.observability.events import EventName
from qkit.observability.health import Health
from qkit.observability.metrics import Metrics
from qkit.sending.sync_sender import BlockingSends
from qkit.service import QueueService
from qkit.settings.model import Settings

__all__ = ["SyncDeadLetters", "SyncQueueService"]

T = TypeVar("T")
R = TypeVar("R")


class SyncQueueService(BlockingSends):
    """``QueueService`` with plain calls. It owns a loop in a thread, where handlers run.

    >>> from qkit import Settings, SyncQueueService
    >>> with SyncQueueService(Settings(type="native")) as service:
    ...     sent = service.send("orders", {"id": 1})
    ...     service.stats("orders").depth
    1

    It may be called from any thread, and raises ``LifecycleError`` inside a running event loop,
    which its calls would block: use ``QueueService`` there.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        backend: Backend | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._sends = self._service = QueueService(settings, backend=backend, middleware=middleware)
        self._caller: LoopCaller | None = None  # from start to shutdown
        self._closed = False
        self._life = threading.Lock()  # start and shutdown, one after the other
        self._stopped = threading.Event()
        self._hosted = False

    @contextmanager
    def hosted(self) -> Generator[QueueService, None, None]:
        """For ``qkit run``: use the running event loop instead of a thread with a loop.

        Calls from other threads, such as those of synchronous handlers, go to that loop.

        Yields:
            The service to start and run there.

        Raises:
            LifecycleError: This service was started before.
        """
        loop = asyncio.get_running_loop()
        if self._closed or self._caller is not None:
            raise LifecycleError(
                "this service was started before: give qkit run one that is not started",
                operation="run",
            )
        self._hosted = True
        self._caller = LoopCaller(loop)
        try:
            yield self._service
        finally:
            self._closed = True
            self._caller = None

    @property
    def settings(self) -> Settings:
        """The settings it was made with."""
        return self._service.settings

    def register(self, target: object) -> None:
        """As ``QueueService.register``."""
        self._service.register(target)

    def declare(self, channel: Channel[T]) -> None:
        """As ``QueueService.declare``."""
        self._service.declare(channel)

    @property
    def handlers(self) -> list[Handler]:
        """Every registered handler with its metadata."""
        return self._service.handlers

    @property
    def channels(self) -> list[Channel[object]]:
        """Every channel that was declared, by itself or by its handlers."""
        return self._service.channels

    def body_type(self, channel: Channel[T] | str) -> object | None:
        """As ``QueueService.body_type``."""
        return self._service.body_type(channel)

    def on(self, event: EventName, listener: Callable[..., object]) -> None:
        """As ``QueueService.on``; the listener is called in the loop's thread."""
        self._service.on(event, listener)

    def start(self) -> None:
        """As ``QueueService.start``."""
        _outside_a_loop("start")
        with self._life:
            if self._closed:
                raise LifecycleError(
                    "this service was shut down, and a service starts once: make a new "
                    "SyncQueueService",
                    operation="start",
                )
            if self._caller is None:
                self._caller = LoopThread("qkit-loop")
            try:
                self._call(self._service.start)
            except BaseException:  # it may be tried again, in a new loop
                self._close_loop()
                raise

    def run(self) -> None:
        """Consume until SIGTERM, SIGINT or ``stop()``, then shut down; starts if needed."""
        self.start()
        caller = self._caller
        if caller is None:
            return  # another thread has shut it down already

        def first(name: str) -> None:
            logger.info("%s: shutting down, a second signal forces", name)
            self.stop()

        def second(name: str) -> None:
            logger.warning("%s again: not waiting for handlers", name)
            self._service.force()

        with handle_signals(caller.loop, first, second):
            try:
                self._stopped.wait()
            finally:
                self.shutdown()

    def stop(self) -> None:
        """Ask ``run`` to end; returns at once."""
        self._stopped.set()
        if self._hosted and (caller := self._caller) is not None:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                caller.loop.call_soon_threadsafe(self._service.stop)

    def shutdown(self, timeout: float | None = None) -> None:
        """As ``QueueService.shutdown``; ends the loop's thread as well."""
        _outside_a_loop("shutdown")
        self._stopped.set()
        with self._life:
            self._closed = True
            if self._caller is not None:
                try:
                    self._call(lambda: self._service.shutdown(timeout))
                finally:
                    self._close_loop()

    def _close_loop(self) -> None:
        if isinstance(caller := self._caller, LoopThread):  # else the loop is the host's
            self._caller = None
            caller.close()

    def __enter__(self) -> Self:
        """``start``."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """``shutdown``."""
        self.shutdown()

    def pause(self, channel: Channel[T] | str) -> None:
        """As ``QueueService.pause``."""
        self._call(lambda: _later(self._service.pause, name_of(channel)))

    def resume(self, channel: Channel[T] | str) -> None:
        """As ``QueueService.resume``."""
        self._call(lambda: _later(self._service.resume, name_of(channel)))

    @property
    def connection_state(self) -> ConnectionState:
        """Where the connection to the broker stands."""
        return self._service.connection_state

    @property
    def capabilities(self) -> Capabilities:
        """What the chosen backend can do."""
        return self._service.capabilities

    @property
    def ready(self) -> bool:
        """Whether the service does its work."""
        return self._service.ready

    def health_check(self) -> Health:
        """As ``QueueService.health_check``."""
        return self._service.health_check()

    def metrics(self) -> Metrics:
        """As ``QueueService.metrics``."""
        return self._service.metrics()

    def queues(self) -> list[str]:
        """As ``QueueService.queues``."""
        return self._call(self._service.queues)

    def stats(self, name: Channel[T] | str) -> QueueStats:
        """As ``QueueService.stats``."""
        return self._call(lambda: self._service.stats(name))

    def peek(self, name: Channel[T] | str, limit: int = 10) -> list[Message]:
        """As ``QueueService.peek``."""
        return self._call(lambda: self._service.peek(name, limit))

    def purge(self, name: Channel[T] | str) -> int:
        """As ``QueueService.purge``."""
        return self._call(lambda: self._service.purge(name))

    def delete(self, name: Channel[T] | str) -> None:
        """As ``QueueService.delete``."""
        self._call(lambda: self._service.delete(name))

    def dead_letters(self, name: Channel[T] | str) -> SyncDeadLetters:
        """As ``QueueService.dead_letters``."""
        return SyncDeadLetters(self._service.dead_letters(name), self._call)

    def _in_loop(self, operation: str, work: Callable[[], Coroutine[object, object, R]]) -> R:
        return self._call(work)

    def _call(self, work: Callable[[], Coroutine[object, object, R]]) -> R:
        """Create a coroutine in the loop, run it there and wait for its result."""
        _outside_a_loop("a call")
        caller = self._caller
        if caller is None:
            raise LifecycleError(
                "this service is not running: use `with service:` or service.start(), "
                "and a new SyncQueueService after shutdown"
            )
        return caller.submit(work).result()


class _Call(Protocol):
    def __call__(self, work: Callable[[], Coroutine[object, object, R]], /) -> R: ...


class SyncDeadLetters:
    """``DeadLetters`` with plain calls."""

    def __init__(self, letters: DeadLetters, call: _Call) -> None:
        self._letters = letters
        self._call = call

    def list(
        self,
        limit: int = 100,
        *,
        reason: str | None = None,
        error: str | None = None,
        ids: Collection[str] | str | None = None,
    ) -> list[DeadLetter]:
        """As ``DeadLetters.list``."""
        return self._call(lambda: self._letters.list(limit, reason=reason, error=error, ids=ids))

    def replay(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        limit: int | None = None,
    ) -> int:
        """As ``DeadLetters.replay``."""
        return self._call(
            lambda: self._letters.replay(ids, reason=reason, error=error, limit=limit)
        )

    def purge(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
    ) -> int:
        """As ``DeadLetters.purge``."""
        return self._call(lambda: self._letters.purge(ids, reason=reason, error=error))


def _outside_a_loop(operation: str) -> None:
    if running_loop() is None:
        return
    raise LifecycleError(
        f"{operation} on a SyncQueueService inside a running event loop would block it: use "
        "QueueService there",
        operation=operation,
    )


async def _later(function: Callable[[str], None], argument: str) -> None:
    function(argument)
