"""``SyncQueueService``: the blocking entry point of qkit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

from qkit._internal.forks import ForkSafeLock
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
    """Blocking service for programs without an event loop.

    Runs a ``QueueService`` in the event loop of a background thread. Any thread may call the
    service. In a thread with a running event loop, its calls raise ``LifecycleError`` because they
    would block the loop: use ``QueueService`` there. They also raise it in a forked child process:
    start a service in each process.

    Args:
        settings: The settings. Default: ``Settings()``, which reads ``QKIT_*`` variables.
        backend: A backend to use instead of the one that the settings name.
        middleware: Functions wrapped around every handler call, the first outermost.

    Raises:
        ConfigError: An argument has the wrong type, or the backend cannot be opened with these
            settings.

    Example:
        >>> from qkit import Settings, SyncQueueService
        >>> with SyncQueueService(Settings(type="native")) as service:
        ...     sent = service.send("orders", {"id": 1})
        ...     service.stats("orders").depth
        1
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        backend: Backend | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._sends = self._service = QueueService(settings, backend=backend, middleware=middleware)
        self._caller: LoopCaller | None = None  # set from start to shutdown
        self._closed = False
        self._lifecycle_lock = ForkSafeLock()  # serializes start and shutdown
        self._stopped = threading.Event()
        self._hosted = False

    @contextmanager
    def hosted(self) -> Generator[QueueService, None, None]:
        """Use the running event loop instead of a background thread; for ``qkit run``.

        Other threads, such as those of synchronous handlers, still use the blocking calls.

        Yields:
            The asynchronous service, to be started and run in this loop.

        Raises:
            LifecycleError: This service was started before.

        Example:
            >>> import asyncio
            >>> from qkit import Settings, SyncQueueService
            >>> async def main() -> None:
            ...     with SyncQueueService(Settings(type="native")).hosted() as service:
            ...         async with service:
            ...             print(service.ready)
            >>> asyncio.run(main())
            True
        """
        loop = asyncio.get_running_loop()
        if self._closed or self._caller is not None:
            raise LifecycleError(
                "this service was already started: pass qkit run a service that was not started",
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
        """The settings of this service.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> SyncQueueService(Settings(type="native")).settings.type
            'native'
        """
        return self._service.settings

    def register(self, target: object) -> None:
        """Register handlers.

        Args:
            target: A function decorated with ``@consume``, an instance of a ``@channel`` class, or
                a module that contains such functions and instances.

        Raises:
            HandlerError: qkit cannot supply a parameter of the handler.
            ConfigError: ``target`` has no handlers, or a declaration contradicts another.
            LifecycleError: The service was started.

        Example:
            >>> from qkit import Settings, SyncQueueService, consume
            >>> @consume("orders")
            ... def place(order: dict) -> None: ...
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.register(place)
            >>> [handler.channel for handler in service.handlers]
            ['orders']
        """
        self._service.register(target)

    def declare(self, channel: Channel[T]) -> None:
        """Add a channel without a handler; see ``QueueService.declare``.

        Args:
            channel: The channel. Its options are merged with earlier declarations of the same name.

        Raises:
            ConfigError: The declaration contradicts an earlier one.

        Example:
            >>> from qkit import Channel, Settings, SyncQueueService
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.declare(Channel("invoices", dict))
            >>> service.channels
            [Channel('invoices', dict)]
        """
        self._service.declare(channel)

    @property
    def handlers(self) -> list[Handler]:
        """All registered handlers.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> SyncQueueService(Settings(type="native")).handlers
            []
        """
        return self._service.handlers

    @property
    def channels(self) -> list[Channel[object]]:
        """All channels declared by ``declare``, by a handler, or by a send.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> SyncQueueService(Settings(type="native")).channels
            []
        """
        return self._service.channels

    def body_type(self, channel: Channel[T] | str) -> object | None:
        """Return the type that bodies sent to a channel are checked against.

        Args:
            channel: The channel or its name.

        Returns:
            The type of the ``Channel``, else the type that all its handlers take. ``None`` if there
            is neither.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> SyncQueueService(Settings(type="native")).body_type("orders") is None
            True
        """
        return self._service.body_type(channel)

    def on(self, event: EventName, listener: Callable[..., object]) -> None:
        """Call a listener on each event of one kind.

        Exceptions raised by a listener are logged and otherwise ignored.

        Args:
            event: ``"state_change"``, ``"reconnected"``, ``"retry"``, ``"dead_letter"`` or
                ``"shutdown"``.
            listener: A function or coroutine function that takes the event. It runs in the thread
                of the event loop.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.on("shutdown", lambda event: print("abandoned:", event.abandoned))
            >>> with service:
            ...     pass
            abandoned: 0
        """
        self._service.on(event, listener)

    def start(self) -> None:
        """Connect, declare all channels and start the consumers; see ``QueueService.start``.

        Raises:
            ConfigError: The settings or the options of a channel or handler are invalid.
            Unsupported: The backend lacks a feature that a channel or handler needs.
            BackendUnavailable: The broker cannot be reached.
            LifecycleError: The service was shut down, this thread runs an event loop, or the
                service was started before this process was forked.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.start()
            >>> service.ready
            True
            >>> service.shutdown()
        """
        _require_no_running_loop("start")
        self._check_process()
        with self._lifecycle_lock:
            if self._closed:
                raise LifecycleError(
                    "this service was shut down and cannot be restarted; create a new "
                    "SyncQueueService",
                    operation="start",
                )
            if self._caller is None:
                self._caller = LoopThread("qkit-loop", on_exit=self._stopped.set)
            try:
                self._call(self._service.start)
            except BaseException:  # another start may follow, in a new loop
                self._close_loop()
                raise

    def run(self) -> None:
        """Consume until SIGTERM, SIGINT or ``stop``, then shut down.

        Starts the service if needed and blocks this thread. A second signal immediately cancels
        running handlers and releases their messages.

        Raises:
            QueueError: The start failed; see ``start``.
            SystemExit: A handler raised it. The service has shut down.

        Example:
            >>> from qkit import Settings, SyncQueueService, consume
            >>> @consume("greetings")
            ... def greet(name: str) -> None:
            ...     print(f"hello {name}")
            ...     service.stop()
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.register(greet)
            >>> def main() -> None:
            ...     service.start()
            ...     service.send("greetings", "world")
            ...     service.run()
            >>> main()
            hello world
        """
        self.start()
        caller = self._caller
        if caller is None:
            return  # another thread has already shut it down

        def first(name: str) -> None:
            logger.info("%s: shutting down; a second signal cancels running handlers", name)
            self.stop()

        def second(name: str) -> None:
            logger.warning("second signal (%s): cancelling running handlers", name)
            self._service.force()

        with handle_signals(caller.loop, first, second):
            try:
                self._stopped.wait()
            finally:
                exit_error = self._exit()
                self.shutdown()
        if exit_error is not None:
            raise exit_error

    def stop(self) -> None:
        """Tell ``run`` to shut down and return; do not wait for it.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.stop()
            >>> service.run()
            >>> print(service.connection_state)
            closed
        """
        self._stopped.set()
        if self._hosted and (caller := self._caller) is not None:
            with suppress(RuntimeError):  # the loop is closed
                caller.loop.call_soon_threadsafe(self._service.stop)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop fetching, let running handlers finish, flush sends and close the backend.

        Also ends the background thread. Handlers that are still running after ``timeout`` are
        cancelled. Their messages are released without counting the attempt.

        Args:
            timeout: Seconds to wait for running handlers. Default: ``shutdown.timeout`` of the
                settings.

        Raises:
            LifecycleError: This thread runs an event loop, or the service was started before this
                process was forked.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.start()
            >>> service.shutdown(timeout=5)
            >>> print(service.connection_state)
            closed
        """
        _require_no_running_loop("shutdown")
        self._check_process()
        self._stopped.set()
        with self._lifecycle_lock:
            self._closed = True
            if self._caller is not None:
                try:
                    if self._exit() is None:  # otherwise the service has already shut down
                        self._call(lambda: self._service.shutdown(timeout))
                finally:
                    self._close_loop()

    def _check_process(self) -> None:
        if self._caller is not None:
            self._caller.check_process()

    def _exit(self) -> BaseException | None:
        """Return the ``SystemExit`` or ``KeyboardInterrupt`` of a handler that ended the loop."""
        return self._caller.exit if isinstance(self._caller, LoopThread) else None

    def _close_loop(self) -> None:
        if isinstance(caller := self._caller, LoopThread):  # a hosted loop is left open
            self._caller = None
            caller.close()

    def __enter__(self) -> Self:
        """Start the service."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the service down."""
        self.shutdown()

    def pause(self, channel: Channel[T] | str) -> None:
        """Stop starting handlers of a channel until ``resume``; running handlers continue.

        Args:
            channel: The channel or its name.

        Raises:
            QueueNotFound: This service does not consume the channel.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService, consume
            >>> @consume("orders")
            ... def place(order: int) -> None: ...
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.register(place)
            >>> with service:
            ...     service.pause("orders")
            ...     service.health_check().consumers[0].state
            'paused'
        """
        self._call(lambda: _call_in_loop(self._service.pause, name_of(channel)))

    def resume(self, channel: Channel[T] | str) -> None:
        """Resume a channel that was paused by ``pause`` or by an ``Unavailable`` error.

        Args:
            channel: The channel or its name.

        Raises:
            QueueNotFound: This service does not consume the channel.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService, consume
            >>> @consume("orders")
            ... def place(order: int) -> None: ...
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.register(place)
            >>> with service:
            ...     service.pause("orders")
            ...     service.resume("orders")
            ...     service.health_check().consumers[0].state
            'consuming'
        """
        self._call(lambda: _call_in_loop(self._service.resume, name_of(channel)))

    @property
    def connection_state(self) -> ConnectionState:
        """State of the connection to the broker.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> print(SyncQueueService(Settings(type="native")).connection_state)
            disconnected
        """
        return self._service.connection_state

    @property
    def capabilities(self) -> Capabilities:
        """Features that the backend supports.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> bool(SyncQueueService(Settings(type="native")).capabilities.delay)
            True
        """
        return self._service.capabilities

    @property
    def ready(self) -> bool:
        """Whether the service is running and connected, and every consumer is consuming or paused.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> SyncQueueService(Settings(type="native")).ready
            False
        """
        return self._service.ready

    def health_check(self) -> Health:
        """Return the health of the connection and of each consumer.

        Returns:
            The status, the state of the connection, the last error and each consumer's health.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     service.health_check().status
            'healthy'
        """
        return self._service.health_check()

    def metrics(self) -> Metrics:
        """Return the counters of this process, in total and for each channel.

        Returns:
            A snapshot of the counters.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send("orders", {"id": 1})
            ...     service.metrics().messages_sent
            1
        """
        return self._service.metrics()

    def queues(self) -> list[str]:
        """List the names of all queues.

        Returns:
            The names without the prefix, sorted. If the broker cannot list queues, the queues that
            this service uses.

        Raises:
            Unsupported: The backend cannot administer queues.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send("orders", {"id": 1})
            ...     "orders" in service.queues()
            True
        """
        return self._call(self._service.queues)

    def stats(self, name: Channel[T] | str) -> QueueStats:
        """Return the statistics of a queue, such as its depth.

        Args:
            name: The queue, as a ``Channel`` or by name.

        Returns:
            The statistics that the broker reports, for all producers and consumers.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend does not report statistics.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send("orders", {"id": 1})
            ...     service.stats("orders").depth
            1
        """
        return self._call(lambda: self._service.stats(name))

    def peek(self, name: Channel[T] | str, limit: int = 10) -> list[Message]:
        """Return the next messages of a queue without consuming them.

        Args:
            name: The queue, as a ``Channel`` or by name.
            limit: The maximum number of messages. Default: 10.

        Returns:
            The messages in the order of delivery. Their bodies are encoded.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend cannot peek.
            ValueError: ``limit`` is less than 1.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send("orders", {"id": 1})
            ...     [message.body for message in service.peek("orders")]
            [b'{"id":1}']
        """
        return self._call(lambda: self._service.peek(name, limit))

    def purge(self, name: Channel[T] | str) -> int:
        """Delete all messages of a queue that are not in flight.

        Args:
            name: The queue, as a ``Channel`` or by name.

        Returns:
            The number of deleted messages.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend cannot purge.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send_many("orders", [1, 2, 3])
            ...     service.purge("orders")
            3
        """
        return self._call(lambda: self._service.purge(name))

    def delete(self, name: Channel[T] | str) -> None:
        """Delete a queue with all its messages. The next send declares it again.

        Args:
            name: The queue, as a ``Channel`` or by name.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend cannot delete queues.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send("orders", {"id": 1})
            ...     service.delete("orders")
            ...     "orders" in service.queues()
            False
        """
        self._call(lambda: self._service.delete(name))

    def dead_letters(self, name: Channel[T] | str) -> SyncDeadLetters:
        """Return access to the dead letters of a channel.

        Args:
            name: The channel or its name.

        Returns:
            An object that lists, replays and purges the dead letters.

        Raises:
            Unsupported: The backend keeps no dead letters.
            LifecycleError: The service is not running.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     service.dead_letters("orders").list()
            []
        """
        return SyncDeadLetters(self._service.dead_letters(name), self._call)

    def _in_loop(self, operation: str, work: Callable[[], Coroutine[object, object, R]]) -> R:
        return self._call(work)

    def _call(self, work: Callable[[], Coroutine[object, object, R]]) -> R:
        """Run ``work`` in the event loop and wait for its result."""
        _require_no_running_loop("a call")
        caller = self._caller
        if caller is None:
            raise LifecycleError(
                "this service is not running: use `with service:` or service.start(); after a "
                "shutdown create a new SyncQueueService"
            )
        return caller.submit(work).result()


class _Call(Protocol):
    def __call__(self, work: Callable[[], Coroutine[object, object, R]], /) -> R: ...


class SyncDeadLetters:
    """Blocking access to the dead letters of one channel.

    ``service.dead_letters(name)`` of a ``SyncQueueService`` returns it.

    Args:
        letters: The asynchronous access.
        call: Runs a coroutine in the event loop and waits for its result.

    Example:
        >>> from qkit import Settings, SyncQueueService
        >>> with SyncQueueService(Settings(type="native")) as service:
        ...     service.dead_letters("orders").list()
        []
    """

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
        group: str | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters without removing them, oldest first.

        Args:
            limit: The maximum number of dead letters. Default: 100.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            ids: Only dead letters of these message ids.
            group: Only dead letters of this group of a topic.

        Returns:
            The dead letters. The list is empty if the channel has none.

        Raises:
            ValueError: ``limit`` is less than 1.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     service.dead_letters("orders").list(error="TimeoutError")
            []
        """
        return self._call(
            lambda: self._letters.list(limit, reason=reason, error=error, ids=ids, group=group)
        )

    def replay(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        group: str | None = None,
        limit: int | None = None,
    ) -> int:
        """Send dead letters back to their channel, oldest first; see ``DeadLetters.replay``.

        Args:
            ids: Only dead letters of these message ids. Default: all.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            group: Only dead letters of this group of a topic.
            limit: The maximum number of dead letters. Default: no limit.

        Returns:
            The number of dead letters that were replayed.

        Raises:
            PartialSend: Some messages were not confirmed. Their dead letters are kept.
            ValueError: ``limit`` is less than 1.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     service.dead_letters("orders").replay(error="TimeoutError")
            0
        """
        return self._call(
            lambda: self._letters.replay(ids, reason=reason, error=error, group=group, limit=limit)
        )

    def purge(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        group: str | None = None,
    ) -> int:
        """Delete dead letters; see ``DeadLetters.purge``.

        Args:
            ids: Only dead letters of these message ids. Default: all.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            group: Only dead letters of this group of a topic.

        Returns:
            The number of dead letters that were deleted.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     service.dead_letters("orders").purge()
            0
        """
        return self._call(lambda: self._letters.purge(ids, reason=reason, error=error, group=group))


def _require_no_running_loop(operation: str) -> None:
    if running_loop() is None:
        return
    raise LifecycleError(
        f"{operation} on a SyncQueueService would block the running event loop: use QueueService "
        "there",
        operation=operation,
    )


async def _call_in_loop(function: Callable[[str], None], argument: str) -> None:
    function(argument)
