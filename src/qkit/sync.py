"""``SyncQueueService``: the same service for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack, cast, overload

from qkit.backend import Backend, Capabilities, QueueStats
from qkit.channel import Channel, Middleware
from qkit.config import Settings
from qkit.dead_letters import DeadLetters
from qkit.errors import LifecycleError
from qkit.events import EventName
from qkit.health import ConnectionState, Health, Metrics
from qkit.message import DeadLetter, Message, Sent
from qkit.outgoing import SendOptions
from qkit.registry import Handler
from qkit.service import QueueService
from qkit.signals import catch

__all__ = ["SyncDeadLetters", "SyncQueueService"]

T = TypeVar("T")
R = TypeVar("R")


class SyncQueueService:
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="qkit-loop", daemon=True
        )
        self._service = QueueService(settings, backend=backend, middleware=middleware)
        self._stopped = threading.Event()

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

    def on(self, event: EventName, listener: Callable[..., object]) -> None:
        """As ``QueueService.on``; the listener is called in the loop's thread."""
        self._service.on(event, listener)

    def start(self) -> None:
        """As ``QueueService.start``."""
        _outside_a_loop("start")
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._thread.start()
        self._call(self._service.start())

    def run(self) -> None:
        """Consume until SIGTERM, SIGINT or ``stop()``, then shut down; starts if needed."""
        self.start()

        def first(name: str) -> None:
            self.stop()

        def second(name: str) -> None:
            self._loop.call_soon_threadsafe(self._service.force)

        with catch(first, second):
            try:
                self._stopped.wait()
            finally:
                self.shutdown()

    def stop(self) -> None:
        """Ask ``run`` to end; returns at once."""
        self._stopped.set()

    def shutdown(self, timeout: float | None = None) -> None:
        """As ``QueueService.shutdown``; ends the loop's thread as well."""
        self._stopped.set()
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._call(self._service.shutdown(timeout))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

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

    @overload
    def send(self, channel: Channel[T], body: T, **options: Unpack[SendOptions]) -> Sent: ...
    @overload
    def send(self, channel: str, body: object, **options: Unpack[SendOptions]) -> Sent: ...
    def send(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Sent:
        """As ``QueueService.send``."""
        return self._call(self._service.send(cast("str", channel), body, **options))

    @overload
    def publish(self, channel: Channel[T], body: T, **options: Unpack[SendOptions]) -> Sent: ...
    @overload
    def publish(self, channel: str, body: object, **options: Unpack[SendOptions]) -> Sent: ...
    def publish(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Sent:
        """As ``QueueService.publish``."""
        return self._call(self._service.publish(cast("str", channel), body, **options))

    @overload
    def send_many(
        self, channel: Channel[T], bodies: Iterable[T], **options: Unpack[SendOptions]
    ) -> list[Sent]: ...
    @overload
    def send_many(
        self, channel: str, bodies: Iterable[object], **options: Unpack[SendOptions]
    ) -> list[Sent]: ...
    def send_many(
        self,
        channel: Channel[T] | str,
        bodies: Iterable[T] | Iterable[object],
        **options: Unpack[SendOptions],
    ) -> list[Sent]:
        """As ``QueueService.send_many``."""
        return self._call(self._service.send_many(cast("str", channel), bodies, **options))

    def pause(self, channel: str) -> None:
        """As ``QueueService.pause``."""
        self._call(_later(self._service.pause, channel))

    def resume(self, channel: str) -> None:
        """As ``QueueService.resume``."""
        self._call(_later(self._service.resume, channel))

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
        return self._call(self._service.queues())

    def stats(self, name: str) -> QueueStats:
        """As ``QueueService.stats``."""
        return self._call(self._service.stats(name))

    def peek(self, name: str, limit: int = 10) -> list[Message]:
        """As ``QueueService.peek``."""
        return self._call(self._service.peek(name, limit))

    def purge(self, name: str) -> int:
        """As ``QueueService.purge``."""
        return self._call(self._service.purge(name))

    def delete(self, name: str) -> None:
        """As ``QueueService.delete``."""
        self._call(self._service.delete(name))

    def dead_letters(self, name: str) -> SyncDeadLetters:
        """As ``QueueService.dead_letters``."""
        return SyncDeadLetters(self._service.dead_letters(name), self._call)

    def _call(self, work: Coroutine[object, object, R]) -> R:
        try:
            _outside_a_loop("a call")
            if not self._thread.is_alive():
                raise LifecycleError(
                    "this service is not running: use `with service:` or service.start(), and a "
                    "new SyncQueueService after shutdown"
                )
        except LifecycleError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a KeyboardInterrupt here must not leave the work running there
            raise


class _Call(Protocol):
    def __call__(self, work: Coroutine[object, object, R], /) -> R: ...


class SyncDeadLetters:
    """``DeadLetters`` with plain calls."""

    def __init__(self, letters: DeadLetters, call: _Call) -> None:
        self._letters = letters
        self._call = call

    def list(
        self, limit: int = 100, *, reason: str | None = None, error: str | None = None
    ) -> list[DeadLetter]:
        """As ``DeadLetters.list``."""
        return self._call(self._letters.list(limit, reason=reason, error=error))

    def replay(
        self,
        ids: Iterable[str] | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        limit: int | None = None,
    ) -> int:
        """As ``DeadLetters.replay``."""
        chosen = None if ids is None else set(ids)
        work = self._letters.replay(chosen, reason=reason, error=error, limit=limit)
        return self._call(work)

    def purge(self) -> int:
        """As ``DeadLetters.purge``."""
        return self._call(self._letters.purge())


def _outside_a_loop(operation: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise LifecycleError(
        f"{operation} on a SyncQueueService inside a running event loop would block it: use "
        "QueueService there",
        operation=operation,
    )


async def _later(function: Callable[[str], None], argument: str) -> None:
    function(argument)
