"""``QueueService``: the asynchronous entry point of qkit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.coroutines import returns_coroutine
from qkit._internal.logging import logger
from qkit._internal.loop_calls import require_asyncio, running_loop
from qkit._internal.signals import handle_signals
from qkit.admin.dead_letters import DeadLetters
from qkit.admin.queues import QueueAdmin
from qkit.backend import Backend, Capabilities, QueueStats
from qkit.backends.factory import open_backend
from qkit.errors import ConfigError, LifecycleError
from qkit.handlers.channel import Channel, Middleware, name_of
from qkit.handlers.registry import Handler, Registry
from qkit.message import Message, Sent
from qkit.observability.connection_state import ConnectionState
from qkit.observability.durations import DurationHistogram
from qkit.observability.events import (
    DeadLettered,
    EventName,
    Events,
    Reconnected,
    Retried,
    ShutDown,
    StateChanged,
)
from qkit.observability.health import Health
from qkit.observability.metrics import Counters, Metrics
from qkit.sending.envelope_builder import SendOptions
from qkit.sending.sync_sender import SyncSender
from qkit.service.runtime import ServiceRuntime
from qkit.settings.model import Settings
from qkit.wiring import Wiring

__all__ = ["QueueService"]

T = TypeVar("T")


class QueueService:
    """Asynchronous service that sends messages and runs handlers.

    Register handlers first, then use ``async with service:`` or ``run``. A service cannot be
    restarted after its shutdown. It belongs to the event loop in which it was started: in another
    event loop, and in a forked child process, its calls raise ``LifecycleError``.

    Args:
        settings: The settings. Default: ``Settings()``, which reads ``QKIT_*`` variables.
        backend: A backend to use instead of the one in the settings. Default: none.
        middleware: Functions wrapped around every handler call, outermost first. Default: none.
        clock: The source of time. Default: the system clock.

    Attributes:
        settings: The settings of this service.

    Raises:
        ConfigError: An argument has the wrong type, or the backend cannot be opened with these
            settings.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings, consume
        >>> @consume("greetings")
        ... async def greet(name: str) -> None:
        ...     print(f"hello {name}")
        ...     service.stop()
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(greet)
        >>> async def main() -> None:
        ...     async with service:
        ...         await service.send("greetings", "world")
        ...         await service.run()
        >>> asyncio.run(main())
        hello world
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        backend: Backend | None = None,
        middleware: Sequence[Middleware] = (),
        clock: Clock | None = None,
    ) -> None:
        self.settings: Settings = settings if settings is not None else Settings()
        if not isinstance(self.settings, Settings):
            raise ConfigError(
                f"expected Settings, got {type(settings).__name__}: write "
                'QueueService(Settings(type="native"))'
            )
        for item in middleware:
            if not callable(item):
                raise ConfigError(
                    f"middleware: expected an async function(message, call_next), got {item!r}"
                )
        self._middleware = tuple(middleware)
        chosen: Clock = clock if clock is not None else SystemClock()
        backend = backend or open_backend(self.settings, chosen)
        self._registry = Registry(queues=bool(backend.capabilities.queues))
        self._counters = Counters()
        self._events = Events()
        self._stop = asyncio.Event()
        self._sync = SyncSender(self, lambda operation: self._runtime.require_caller(operation))
        self._build(backend, chosen, background_timers=True)

    def _build(self, backend: Backend, clock: Clock, *, background_timers: bool) -> None:
        """Build the parts that depend on the backend or the clock."""
        wiring = Wiring.build(
            backend,
            self.settings,
            clock,
            registry=self._registry,
            counters=self._counters,
            events=self._events,
            middleware=self._middleware,
        )
        self._runtime = ServiceRuntime(wiring, background_timers=background_timers)
        self._backend = backend
        self._producer = self._runtime.producer
        self._admin = QueueAdmin(wiring, self._producer, self._runtime.require_in_loop)

    def replace_backend_for_testing(
        self, backend: Backend, clock: Clock, wrap_handler: Callable[[Handler], Handler]
    ) -> None:
        """Replace the backend and the clock; used by ``qkit.testing.TestService``.

        Also turns off pings and lease renewals, so that a test can detect when the service is idle.

        Args:
            backend: The backend to use.
            clock: The source of time.
            wrap_handler: Called with each registered handler; returns the handler to use instead.

        Raises:
            LifecycleError: The service was already started.

        Example:
            >>> from qkit import QueueService, Settings
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.native import Engine
            >>> from qkit.testing import VirtualClock
            >>> clock = VirtualClock()
            >>> service = QueueService(Settings(type="native"))
            >>> service.replace_backend_for_testing(
            ...     NativeBackend(engine=Engine(clock=clock)), clock, wrap_handler=lambda item: item
            ... )
        """
        self._runtime.require("replace_backend_for_testing", "new")
        self._build(backend, clock, background_timers=False)
        self._registry.handlers = [wrap_handler(handler) for handler in self._registry.handlers]

    # -- setup -------------------------------------------------------------------------------

    def register(self, target: object) -> None:
        """Register handlers.

        If one handler of ``target`` is rejected, none of them is registered.

        Args:
            target: A function decorated with ``@consume``, an instance of a ``@channel`` class, or
                a module that contains such functions and instances.

        Raises:
            HandlerError: qkit cannot supply a parameter of the handler.
            ConfigError: ``target`` has no handlers, or a declaration conflicts with another.
            LifecycleError: The service was already started.

        Example:
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders")
            ... async def place(order: dict) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> [handler.channel for handler in service.handlers]
            ['orders']
        """
        if (state := self._runtime.state) != "new":
            raise LifecycleError(
                f"register() on a service that is {state}: register all handlers before "
                "start, or create a new service",
                operation="register",
            )
        self._registry.add(target)

    def declare(self, channel: Channel[T]) -> None:
        """Add a channel without a handler.

        The channel is declared on the broker when the service starts. If the service has already
        started, the first send declares it.

        Args:
            channel: The channel. Its options are merged with earlier declarations of the same name.

        Raises:
            ConfigError: The declaration conflicts with an earlier one.

        Example:
            >>> from qkit import Channel, QueueService, Settings
            >>> service = QueueService(Settings(type="native"))
            >>> service.declare(Channel("invoices", dict))
            >>> service.channels
            [Channel('invoices', dict)]
        """
        self._registry.declare(cast("Channel[object]", channel))

    @property
    def handlers(self) -> list[Handler]:
        """All registered handlers.

        Example:
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders")
            ... async def place(order: dict) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> [(handler.name, handler.body_type) for handler in service.handlers]
            [('place', <class 'dict'>)]
        """
        return list(self._registry.handlers)

    @property
    def channels(self) -> list[Channel[object]]:
        """All channels declared by ``declare``, by a handler, or by a send.

        Example:
            >>> from qkit import Channel, QueueService, Settings
            >>> service = QueueService(Settings(type="native"))
            >>> service.declare(Channel("invoices"))
            >>> service.channels
            [Channel('invoices')]
        """
        return list(self._registry.channels.values())

    def body_type(self, channel: Channel[T] | str) -> object | None:
        """Return the type that bodies sent to a channel are checked against.

        Args:
            channel: The channel or its name.

        Returns:
            The type of the ``Channel``, or else the type that all its handlers take. ``None`` if
            there is neither.

        Example:
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders")
            ... async def place(order: dict) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> service.body_type("orders")
            <class 'dict'>
        """
        return self._registry.body_type(name_of(channel))

    @overload
    def on(
        self, event: Literal["state_change"], listener: Callable[[StateChanged], object]
    ) -> None: ...
    @overload
    def on(
        self, event: Literal["reconnected"], listener: Callable[[Reconnected], object]
    ) -> None: ...
    @overload
    def on(self, event: Literal["retry"], listener: Callable[[Retried], object]) -> None: ...
    @overload
    def on(
        self, event: Literal["dead_letter"], listener: Callable[[DeadLettered], object]
    ) -> None: ...
    @overload
    def on(self, event: Literal["shutdown"], listener: Callable[[ShutDown], object]) -> None: ...
    def on(self, event: EventName, listener: Callable[..., object]) -> None:
        """Register a listener for one kind of event.

        Exceptions that a listener raises are logged and otherwise ignored.

        Args:
            event: ``"state_change"``, ``"reconnected"``, ``"retry"``, ``"dead_letter"`` or
                ``"shutdown"``.
            listener: A function or coroutine function that takes the event.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> service = QueueService(Settings(type="native"))
            >>> service.on("shutdown", lambda event: print("abandoned:", event.abandoned))
            >>> async def main() -> None:
            ...     async with service:
            ...         pass
            >>> asyncio.run(main())
            abandoned: 0
        """
        self._events.on(event, listener)

    # -- lifecycle ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, declare all channels and start the consumers.

        Does nothing if the service is running. Options are checked before the connection is made.
        After a failed start, you may call ``start`` again.

        Raises:
            ConfigError: The settings or the options of a channel or handler are invalid.
            Unsupported: The backend lacks a feature that a channel or handler needs.
            BackendUnavailable: The broker cannot be reached.
            LifecycleError: The service was shut down, or runs in another event loop or process.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     service = QueueService(Settings(type="native"))
            ...     await service.start()
            ...     print(service.ready)
            ...     await service.shutdown()
            >>> asyncio.run(main())
            True
        """
        await self._runtime.start()

    async def run(self) -> None:
        """Consume until SIGTERM, SIGINT or ``stop``, then shut down.

        Starts the service if needed. A second signal cancels running handlers immediately and
        releases their messages.

        Raises:
            QueueError: The start failed; see ``start``.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     service = QueueService(Settings(type="native"))
            ...     asyncio.get_running_loop().call_soon(service.stop)
            ...     await service.run()
            ...     print(service.connection_state)
            >>> asyncio.run(main())
            closed
        """
        loop = require_asyncio("run")

        def first(name: str) -> None:
            logger.info("%s: shutting down; a second signal cancels running handlers", name)
            self.stop()

        def second(name: str) -> None:
            logger.warning("second signal (%s): cancelling running handlers", name)
            self.force()

        # Install the signal handlers first: message handlers may run before ``start`` returns, and
        # a signal must not kill them.
        with handle_signals(loop, first, second):
            await self.start()
            try:
                await self._stop.wait()
            finally:
                await self.shutdown()

    def stop(self) -> None:
        """Make ``run`` shut down and return.

        Returns immediately, so a handler or a listener may call it. The service is no longer ready
        after this call, so readiness probes fail before the shutdown begins.

        Example:
            >>> from qkit import QueueService, Settings
            >>> service = QueueService(Settings(type="native"))
            >>> service.stop()
            >>> service.stopping
            True
        """
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether a signal, ``stop`` or ``shutdown`` has requested a shutdown.

        Example:
            >>> from qkit import QueueService, Settings
            >>> QueueService(Settings(type="native")).stopping
            False
        """
        return self._stop.is_set()

    def force(self) -> None:
        """Make the shutdown cancel running handlers immediately, as a second signal does.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> started = asyncio.Event()
            >>> @consume("orders")
            ... async def place(order: int) -> None:
            ...     started.set()
            ...     await asyncio.sleep(3600)
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> service.on("shutdown", lambda event: print("abandoned:", event.abandoned))
            >>> async def main() -> None:
            ...     async with service:
            ...         await service.send("orders", 1)
            ...         await started.wait()
            ...         service.force()
            >>> asyncio.run(main())
            abandoned: 1
        """
        self._runtime.force.set()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Stop fetching, let running handlers finish, flush sends and close the backend.

        Handlers that are still running after ``timeout`` are cancelled. Their messages are released
        and no attempt is counted. A handler that ignores its cancellation is left behind. Does
        nothing if the service is already shut down.

        Args:
            timeout: Seconds to wait for running handlers. Default: the ``shutdown.timeout``
                setting.

        Raises:
            LifecycleError: A handler called it: the shutdown would wait for that handler, which
                waits for the shutdown. A handler calls ``stop`` instead.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     service = QueueService(Settings(type="native"))
            ...     await service.start()
            ...     await service.shutdown(timeout=5)
            ...     print(service.connection_state)
            >>> asyncio.run(main())
            closed
        """
        self._runtime.require_outside_handler("shutdown")
        self._stop.set()
        await self._runtime.shutdown(timeout)

    async def __aenter__(self) -> Self:
        """Start the service."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the service down."""
        await self.shutdown()

    # -- sending -----------------------------------------------------------------------------

    @property
    def sync(self) -> SyncSender:
        """Blocking ``send``, ``send_many`` and ``publish`` for other threads.

        Use it in a synchronous handler, which runs in a thread.

        Example:
            >>> from qkit import QueueService, Settings, consume
            >>> service = QueueService(Settings(type="native"))
            >>> @consume("orders")
            ... def place(order: dict) -> None:
            ...     service.sync.send("invoices", {"order": order["id"]})
        """
        return self._sync

    @overload
    def send(
        self, channel: Channel[T], body: T, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @overload
    def send(
        self, channel: str, body: object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @returns_coroutine
    def send(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]:
        """Send one message to a queue and wait until the broker has confirmed it.

        Call it in the service's event loop. A synchronous handler uses ``service.sync.send``.

        Args:
            channel: The queue, as a ``Channel`` or by name.
            body: The body. It must match the channel's type.
            **options: ``priority``, ``delay``, ``ttl``, ``key`` and ``headers``; see
                ``SendOptions``.

        Returns:
            The id of the message and, if the broker reports it, its position.

        Raises:
            LifecycleError: The service is not running, or the call was made outside its event loop
                or in a forked child process. The call itself raises the latter two; all other
                errors are raised when the result is awaited.
            InvalidBody: The body does not match the channel's type. Nothing was sent.
            InvalidPriority: The priority is out of range. Nothing was sent.
            InvalidHeader: A header is invalid or reserved. Nothing was sent.
            PayloadTooLarge: The encoded body exceeds ``max_message_bytes``. Nothing was sent.
            ValueError: Another option is invalid. Nothing was sent.
            Unsupported: The backend lacks a feature that an option needs. Nothing was sent.
            QueueFull: The queue is at its ``max_depth``.
            SendTimeout: The broker did not confirm the message within ``send_timeout``.
            CircuitOpen: The circuit breaker is open.
            BackendUnavailable: The broker cannot be reached.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send("orders", {"id": 1}, priority=8, ttl=60)
            ...         print((await service.stats("orders")).depth)
            >>> asyncio.run(main())
            1
        """
        loop = self._runtime.loop
        if loop is None or running_loop() is not loop:
            self._runtime.check_loop("send")
        return self._producer.send(channel, body, options)

    @overload
    def publish(
        self, channel: Channel[T], body: T, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @overload
    def publish(
        self, channel: str, body: object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @returns_coroutine
    def publish(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]:
        """Publish one message to a topic and wait until the broker has confirmed it.

        Every group of the topic receives a copy.

        Args:
            channel: The topic, as a ``Channel`` or by name.
            body: The body. It must match the channel's type.
            **options: As for ``send``.

        Returns:
            The id of the message and, if the broker reports it, its position.

        Raises:
            QueueError: See ``send``.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("prices", broadcast=True, group="audit")
            ... async def audit(price: int) -> None:
            ...     print("price", price)
            ...     service.stop()
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(audit)
            >>> async def main() -> None:
            ...     async with service:
            ...         await service.publish("prices", 7)
            ...         await service.run()
            >>> asyncio.run(main())
            price 7
        """
        loop = self._runtime.loop
        if loop is None or running_loop() is not loop:
            self._runtime.check_loop("publish")
        return self._producer.publish(channel, body, options)

    @overload
    def send_many(
        self, channel: Channel[T], bodies: Iterable[T], **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, list[Sent]]: ...
    @overload
    def send_many(
        self, channel: str, bodies: Iterable[object], **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, list[Sent]]: ...
    @returns_coroutine
    def send_many(
        self,
        channel: Channel[T] | str,
        bodies: Iterable[T] | Iterable[object],
        **options: Unpack[SendOptions],
    ) -> Coroutine[Any, Any, list[Sent]]:
        """Send many messages to a queue and wait until the broker has confirmed them.

        Messages are sent in batches. All bodies are checked before the first is sent.

        Args:
            channel: The queue, as a ``Channel`` or by name.
            bodies: The bodies. Each must match the channel's type.
            **options: As for ``send``; they apply to every message.

        Returns:
            One ``Sent`` for each body, in order.

        Raises:
            PartialSend: Only some messages were confirmed. Its ``results`` holds a ``Sent`` or an
                error for each body.
            QueueError: See ``send``.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         sent = await service.send_many("orders", [{"id": 1}, {"id": 2}])
            ...         print(len(sent))
            >>> asyncio.run(main())
            2
        """
        loop = self._runtime.loop
        if loop is None or running_loop() is not loop:
            self._runtime.check_loop("send_many")
        return self._producer.send_many(channel, bodies, options)

    # -- pause and resume --------------------------------------------------------------------

    def pause(self, channel: Channel[T] | str) -> None:
        """Stop consuming a channel until ``resume``; running handlers continue.

        Args:
            channel: The channel or its name.

        Raises:
            QueueNotFound: This service does not consume the channel.
            LifecycleError: The service is not running.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders")
            ... async def place(order: int) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with service:
            ...         service.pause("orders")
            ...         print(service.health_check().consumers[0].state)
            >>> asyncio.run(main())
            paused
        """
        self._runtime.require("pause", "running")
        self._runtime.check_other_loop("pause")
        for consumer in self._runtime.consumers.consumers_of(name_of(channel), "pause"):
            consumer.pause()

    def resume(self, channel: Channel[T] | str) -> None:
        """Resume a channel that was paused by ``pause`` or by an ``Unavailable`` error.

        Args:
            channel: The channel or its name.

        Raises:
            QueueNotFound: This service does not consume the channel.
            LifecycleError: The service is not running.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders")
            ... async def place(order: int) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with service:
            ...         service.pause("orders")
            ...         service.resume("orders")
            ...         print(service.health_check().consumers[0].state)
            >>> asyncio.run(main())
            consuming
        """
        self._runtime.require("resume", "running")
        self._runtime.check_other_loop("resume")
        for consumer in self._runtime.consumers.consumers_of(name_of(channel), "resume"):
            consumer.resume()

    # -- state and health --------------------------------------------------------------------

    @property
    def connection_state(self) -> ConnectionState:
        """State of the connection to the broker.

        Example:
            >>> from qkit import QueueService, Settings
            >>> print(QueueService(Settings(type="native")).connection_state)
            disconnected
        """
        return self._runtime.wiring.connection.state

    @property
    def backend_name(self) -> str:
        """Name of the backend.

        Example:
            >>> from qkit import QueueService, Settings
            >>> QueueService(Settings(type="native")).backend_name
            'native'
        """
        return self._backend.name

    @property
    def capabilities(self) -> Capabilities:
        """Features that the backend supports.

        Example:
            >>> from qkit import QueueService, Settings
            >>> bool(QueueService(Settings(type="native")).capabilities.delay)
            True
        """
        return self._backend.capabilities

    @property
    def peek_affects_queue(self) -> bool:
        """Whether ``peek`` affects the queue, because it receives messages and returns them.

        Example:
            >>> from qkit import QueueService, Settings
            >>> QueueService(Settings(type="native")).peek_affects_queue
            False
        """
        return self._admin.peek_affects_queue

    @property
    def ready(self) -> bool:
        """Whether the service is running and connected, and all its consumers work.

        Example:
            >>> from qkit import QueueService, Settings
            >>> QueueService(Settings(type="native")).ready
            False
        """
        return self.health_check().status == "healthy"

    def health_check(self) -> Health:
        """Return the health of the connection and of each consumer.

        Sends nothing to the broker: a background task checks the connection. Any thread may call
        this method; from another thread, it also reports a blocked event loop.

        Returns:
            The status, the state of the connection, the last error and each consumer's health.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         print(service.health_check().status)
            >>> asyncio.run(main())
            healthy
        """
        return self._runtime.health(stopping=self.stopping)

    def metrics(self) -> Metrics:
        """Return the counters of this process, in total and for each channel.

        Returns:
            A snapshot of the counters.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send("orders", {"id": 1})
            ...         print(service.metrics().messages_sent)
            >>> asyncio.run(main())
            1
        """
        return self._counters.snapshot()

    def measure_durations(self) -> None:
        """Measure the durations of sends and handler calls, for ``duration_histograms``.

        ``qkit.web.create_app`` calls it, for ``/metrics``. Call it before ``start``: a later call
        has no effect. Without it, nothing is measured.

        Example:
            >>> from qkit import QueueService, Settings
            >>> QueueService(Settings(type="native")).measure_durations()
        """
        if self._runtime.state == "new":
            self._runtime.wiring.telemetry.keep_durations()

    def duration_histograms(self) -> list[DurationHistogram]:
        """Return the durations of sends and handler calls by channel; see ``measure_durations``.

        Returns:
            A snapshot of the histograms; empty if nothing was measured.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     service = QueueService(Settings(type="native"))
            ...     service.measure_durations()
            ...     async with service:
            ...         await service.send("orders", {"id": 1})
            ...     (histogram,) = service.duration_histograms()
            ...     print(histogram.operation, histogram.channel, sum(histogram.counts))
            >>> asyncio.run(main())
            send orders 1
        """
        durations = self._runtime.wiring.telemetry.durations
        return [] if durations is None else durations.snapshot()

    # -- administration ----------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """List the names of all queues.

        Returns:
            The names without the prefix, sorted. If the broker cannot list queues, the queues that
            this service uses.

        Raises:
            Unsupported: The backend cannot administer queues.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send("orders", {"id": 1})
            ...         print("orders" in await service.queues())
            >>> asyncio.run(main())
            True
        """
        return await self._administer("queues").queues()

    async def stats(self, name: Channel[T] | str) -> QueueStats:
        """Return the statistics of a queue, such as its depth.

        Args:
            name: The queue, as a ``Channel`` or by name.

        Returns:
            The statistics that the broker reports, for all producers and consumers.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend does not report statistics.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send("orders", {"id": 1})
            ...         print((await service.stats("orders")).depth)
            >>> asyncio.run(main())
            1
        """
        return await self._administer("stats").stats(name_of(name))

    async def peek(self, name: Channel[T] | str, limit: int = 10) -> list[Message]:
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
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send("orders", {"id": 1})
            ...         print([message.body for message in await service.peek("orders")])
            >>> asyncio.run(main())
            [b'{"id":1}']
        """
        return await self._administer("peek").peek(name_of(name), limit)

    async def purge(self, name: Channel[T] | str) -> int:
        """Delete all messages of a queue that are not in flight.

        Args:
            name: The queue, as a ``Channel`` or by name.

        Returns:
            The number of deleted messages.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend cannot purge.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send_many("orders", [1, 2, 3])
            ...         print(await service.purge("orders"))
            >>> asyncio.run(main())
            3
        """
        return await self._administer("purge").purge(name_of(name))

    async def delete(self, name: Channel[T] | str) -> None:
        """Delete a queue with all its messages. The next send declares it again.

        Args:
            name: The queue, as a ``Channel`` or by name.

        Raises:
            QueueNotFound: There is no such queue.
            Unsupported: The backend cannot delete queues.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         await service.send("orders", {"id": 1})
            ...         await service.delete("orders")
            ...         print("orders" in await service.queues())
            >>> asyncio.run(main())
            False
        """
        await self._administer("delete").delete(name_of(name))

    def dead_letters(self, name: Channel[T] | str) -> DeadLetters:
        """Return the dead letters of a channel, to list, replay or purge them.

        Args:
            name: The channel or its name.

        Returns:
            An object that lists, replays and purges the dead letters.

        Raises:
            Unsupported: The backend keeps no dead letters.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         print(await service.dead_letters("orders").list())
            >>> asyncio.run(main())
            []
        """
        self._runtime.require_sending("dead_letters")  # callable without a loop; it sends nothing
        return self._admin.dead_letters(name_of(name))

    def _administer(self, operation: str) -> QueueAdmin:
        self._runtime.require_in_loop(operation)
        return self._admin
