"""``QueueService``: register handlers, send messages, consume, and come down gracefully.

The only module that knows both the policies and the backends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.coroutines import returns_coroutine
from qkit._internal.logging import logger
from qkit._internal.loop_calls import LoopCaller, running_loop
from qkit._internal.signals import handle_signals
from qkit.admin.dead_letters import DeadLetters
from qkit.admin.queues import QueueAdmin
from qkit.backend import (
    Backend,
    Capabilities,
    DeadLetterSource,
    DroppedLetterSource,
    QueueStats,
)
from qkit.backends.factory import open_backend
from qkit.consuming.consumer_pool import ConsumerPool
from qkit.consuming.settlement import record_dead_letter
from qkit.errors import ConfigError, LifecycleError
from qkit.handlers.channel import Channel, Middleware, name_of
from qkit.handlers.registry import Handler, Registry
from qkit.handlers.route import Route
from qkit.message import DeadLetter, Message, Sent
from qkit.observability.connection_state import ConnectionState
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
from qkit.observability.monitor import Monitor
from qkit.sending.envelope_builder import SendOptions
from qkit.sending.producer import Producer
from qkit.sending.sync_sender import SyncSender
from qkit.settings.model import Settings
from qkit.wiring import Wiring

__all__ = ["QueueService"]

T = TypeVar("T")
State = Literal["new", "starting", "running", "stopping", "closed"]

LOOP_STALL_SECONDS = 4.0  # seconds in which the monitor has a turn, or the loop is blocked
CLOSE_TIMEOUT = 5.0


class QueueService:
    """One service: its handlers, its sends, its connection.

    ``settings`` default to the environment's; ``backend`` replaces the one they would open;
    ``middleware`` is wrapped around every handler, the first outermost.

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
        self.settings = settings if settings is not None else Settings()
        if not isinstance(self.settings, Settings):
            raise ConfigError(
                f"QueueService takes Settings, not {type(settings).__name__}: write "
                'QueueService(Settings(type="native"))'
            )
        for item in middleware:
            if not callable(item):
                raise ConfigError(f"middleware: {item!r} is no async function(message, call_next)")
        self._middleware = tuple(middleware)
        chosen: Clock = clock if clock is not None else SystemClock()
        backend = backend or open_backend(self.settings, chosen)
        self._registry = Registry(queues=bool(backend.capabilities.queues))
        self._counters = Counters()
        self._events = Events()
        self._state: State = "new"
        self._background_timers = True  # pings and lease renewals
        self._lifecycle_lock = asyncio.Lock()  # start and shutdown, one after the other
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # from start to shutdown
        self._loop_caller: LoopCaller | None = None
        self._sync = SyncSender(self, self._require_caller)
        self._build_components(backend, chosen)

    def _build_components(self, backend: Backend, clock: Clock) -> None:
        """Everything that knows the backend or the clock."""
        self._backend = backend
        self._listening = False  # a start that failed and is tried again listens once
        self._wiring = wiring = Wiring.build(
            backend,
            self.settings,
            clock,
            registry=self._registry,
            counters=self._counters,
            events=self._events,
            middleware=self._middleware,
        )
        self._connection = wiring.connection
        self._routes = wiring.routes
        self._producer = Producer(wiring, self._require_sending)
        self._admin = QueueAdmin(wiring, self._producer)
        self._monitor = Monitor(backend, wiring.connection, clock)
        self._consumers = ConsumerPool(wiring, self._producer)

    def replace_backend_for_testing(
        self, backend: Backend, clock: Clock, wrap_handler: Callable[[Handler], Handler]
    ) -> None:
        """For ``qkit.testing``: another backend and clock, handlers watched, no recurring timers.

        Without pings and lease renewals a test can tell that nothing more will happen.
        """
        self._require("replace_backend_for_testing", "new")
        self._build_components(backend, clock)
        self._registry.handlers = [wrap_handler(handler) for handler in self._registry.handlers]
        self._background_timers = False

    # -- setting up --------------------------------------------------------------------------

    def register(self, target: object) -> None:
        """Add handlers: an instance of a ``@channel`` class, a function, or a module of them.

        Raises ``HandlerError`` for a signature that cannot be filled, ``ConfigError`` for
        contradicting declarations, ``LifecycleError`` once the service has started.
        """
        if self._state != "new":
            raise LifecycleError(
                f"register() on a service that is {self._state}: register every handler before "
                "start, or make a new service",
                operation="register",
            )
        self._registry.add(target)

    def declare(self, channel: Channel[T]) -> None:
        """Make a channel known: it is declared at start, or after that with its first send."""
        self._registry.declare(cast("Channel[object]", channel))

    @property
    def handlers(self) -> list[Handler]:
        """Every registered handler with its metadata."""
        return list(self._registry.handlers)

    @property
    def channels(self) -> list[Channel[object]]:
        """Every channel that was declared, by itself or by its handlers."""
        return list(self._registry.channels.values())

    def body_type(self, channel: Channel[T] | str) -> object | None:
        """The type that sends to a channel are checked against; ``None`` if nothing is known."""
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
        """Call ``listener`` with each event of that name; it may be a coroutine function.

        What it raises is logged and changes nothing.
        """
        self._events.on(event, listener)

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, declare every channel and begin to consume; idempotent.

        Raises ``ConfigError`` or ``Unsupported`` for what cannot work, before connecting, and
        ``BackendUnavailable`` if the broker cannot be reached; then it may be tried again.
        """
        async with self._lifecycle_lock:
            if self._state == "running":
                return
            self._require("start", "new")
            planned = self._plan()
            self._state = "starting"
            self._bind(asyncio.get_running_loop())
            self._connection.transition_to(ConnectionState.CONNECTING)
            try:
                await self._open(planned)
            except BaseException as error:
                self._connection.record_failure(error)
                await self._stop_consumers()
                await self._close_backend()
                for route in self._routes.known():
                    route.declared = False
                self._state = "new"
                self._producer.close()
                self._bind(None)
                raise

    def _plan(self) -> list[tuple[Route, Handler]]:
        """Everything that can be refused is refused here, before any connection is tried."""
        self._routes.check_settings()
        planned: list[tuple[Route, Handler]] = []
        for channel in list(self._registry.channels.values()):
            self._routes.resolve(channel)
        for handler in self._registry.handlers:
            route = self._routes.resolve(self._registry.channels[handler.channel])
            self._routes.check_handler(route, handler)
            self._routes.prefetch(route, handler)
            planned.append((route, handler))
        return planned

    async def _open(self, planned: list[tuple[Route, Handler]]) -> None:
        self._wiring.telemetry.start(lambda: self._counters.snapshot().channels)
        await self._backend.start()
        self._connection.transition_to(ConnectionState.CONNECTED)
        if not self._backend.capabilities.durable:
            logger.warning(
                "%s is not durable: what it holds is lost when it ends", self._backend.name
            )
        if not self._listening:
            if isinstance(self._backend, DeadLetterSource):
                self._backend.on_dead_letter(self._on_backend_dead_letter)
            if isinstance(self._backend, DroppedLetterSource):
                self._backend.on_dropped_letter(self._on_dropped_letter)
            self._listening = True  # also if this start fails and is tried again
        for route in self._routes.known():
            await self._producer.declare(route)
        self._state = "running"  # from here on handlers may run, and they may send
        self._producer.open()
        for route, handler in planned:
            self._consumers.start(route, handler, renew_leases=self._background_timers)
        if self._background_timers:
            self._monitor.start()
        await self._consumers.wait_ready(self.settings.send_timeout)

    async def run(self) -> None:
        """Consume until SIGTERM, SIGINT or ``stop()``, then shut down; starts if needed.

        A second signal forces: handlers are cancelled at once and their messages given back.
        """
        loop = asyncio.get_running_loop()

        def first(name: str) -> None:
            logger.info("%s: shutting down, a second signal forces", name)
            self.stop()

        def second(name: str) -> None:
            logger.warning("%s again: not waiting for handlers", name)
            self.force()

        # Before the start, in which handlers may begin to work: a signal must not cut them off.
        with handle_signals(loop, first, second):
            await self.start()
            try:
                await self._stop.wait()
            finally:
                await self.shutdown()

    def stop(self) -> None:
        """Ask ``run`` to end, from a handler or a listener; returns at once.

        From here on the service is not ready, so that probes hear of the end before it comes.
        """
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for: by a signal, ``stop()`` or ``shutdown()``."""
        return self._stop.is_set()

    def force(self) -> None:
        """Do not wait for handlers any longer in a shutdown: what the second signal does."""
        self._force.set()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Come down in order: stop fetching, finish handlers, flush, close; idempotent.

        Handlers get ``timeout`` seconds (default ``shutdown.timeout``); those that are not done
        by then are cancelled and their messages given back with no attempt charged.
        """
        self._stop.set()
        task = asyncio.create_task(self._shut_down(timeout), name="qkit shutdown")
        # Coming down is not to be cut short: a caller that is cancelled, be it again and again,
        # waits for the end of it.
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and not task.cancelled():
            raise cancelled
        await task

    async def _shut_down(self, timeout: float | None) -> None:
        async with self._lifecycle_lock:
            if self._state in ("new", "closed"):
                self._state = "closed"
                return
            self._state = "stopping"  # readiness is false from here on
            self._connection.transition_to(ConnectionState.CLOSING)
            if timeout is None:
                timeout = self.settings.shutdown.timeout
            abandoned = await self._consumers.drain(timeout, self._force)
            await self._stop_consumers()
            await self._producer.drain()
            self._producer.close()
            self._consumers.threads.close()
            await self._close_backend()
            self._state = "closed"
            self._bind(None)
            self._connection.transition_to(ConnectionState.CLOSED)
            logger.info("shut down, %d handlers abandoned", abandoned)
            self._events.emit(ShutDown(abandoned))
            await self._events.drain(0.5 if self._force.is_set() else CLOSE_TIMEOUT)

    async def _stop_consumers(self) -> None:
        await self._monitor.stop()
        await self._consumers.stop(0.0 if self._force.is_set() else self.settings.send_timeout)

    async def _close_backend(self) -> None:
        """Close it, whatever it says to that: nothing is left that could depend on it."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._backend.aclose()
        except Exception as error:
            logger.warning(
                "%s did not close cleanly: %s: %s",
                self._backend.name,
                type(error).__name__,
                error,
            )

    async def __aenter__(self) -> Self:
        """``start``."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """``shutdown``."""
        await self.shutdown()

    # -- sending -----------------------------------------------------------------------------

    @property
    def sync(self) -> SyncSender:
        """Blocking ``send``, ``send_many`` and ``publish`` for other threads.

        Use it in a synchronous handler, which runs in a thread of its own:

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
        """Send one message to a queue; returns once the broker has confirmed it.

        ``options`` are ``priority``, ``delay`` and ``ttl`` in seconds, ``key`` and ``headers``.

        >>> async def place(service: QueueService) -> None:
        ...     sent = await service.send("orders", {"id": 1}, priority=8, delay=2.5, ttl=60)
        ...     print(sent.message_id, sent.position)

        Raises ``LifecycleError`` at the call, before there is a coroutine, unless the service's
        event loop runs in this thread: a synchronous handler uses ``service.sync.send``. All
        other errors come when it is awaited: ``InvalidBody``, ``InvalidPriority``,
        ``InvalidHeader``, ``PayloadTooLarge`` and ``ValueError`` before anything leaves;
        ``QueueFull``, ``SendTimeout``, ``CircuitOpen`` and ``BackendUnavailable`` after.
        """
        if self._loop is None or running_loop() is not self._loop:
            self._check_loop("send")
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
        """Broadcast one message: every group of the topic gets a copy.

        Options, and errors at the call and on await, are those of ``send``.
        """
        if self._loop is None or running_loop() is not self._loop:
            self._check_loop("publish")
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
        """Send many messages with the same options, in as few round trips as the broker allows.

        Every body is checked before the first leaves. Raises ``PartialSend`` when only some were
        accepted: its ``results`` has a ``Sent`` or an error for each. Other errors are those of
        ``send``.
        """
        if self._loop is None or running_loop() is not self._loop:
            self._check_loop("send_many")
        return self._producer.send_many(channel, bodies, options)

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Note the event loop in which the service runs, ``None`` before start and at the end."""
        self._loop = loop
        self._loop_caller = None if loop is None else LoopCaller(loop)

    def _check_loop(self, operation: str) -> None:
        """Raise unless a send may be awaited in this thread.

        A service that has not started, or was shut down, has no event loop. Then any will do: the
        error comes when the send is awaited.
        """
        running = running_loop()
        if running is not None and (self._loop is None or running is self._loop):
            return
        where = "no event loop runs" if running is None else "another event loop runs"
        raise LifecycleError(
            f"service.{operation}() was called in a thread where {where}, so nothing was sent. "
            f"In a synchronous handler or any other thread write service.sync.{operation}(…), "
            f"which blocks until the broker has confirmed; `await service.{operation}(…)` belongs "
            "in the event loop in which the service was started",
            operation=operation,
        )

    def _require_caller(self, operation: str) -> LoopCaller:
        """Return the entry to the service's event loop for other threads."""
        while (caller := self._loop_caller) is None:
            self._require(f"sync.{operation}", "running")  # passes if it has started just now
        return caller

    # -- steering ----------------------------------------------------------------------------

    def pause(self, channel: Channel[T] | str) -> None:
        """Start no more handlers of a channel until ``resume``; running ones go on."""
        self._require("pause", "running")
        for consumer in self._consumers.consumers_of(name_of(channel), "pause"):
            consumer.pause()

    def resume(self, channel: Channel[T] | str) -> None:
        """Consume a channel again, also one that rests because a dependency was unavailable."""
        self._require("resume", "running")
        for consumer in self._consumers.consumers_of(name_of(channel), "resume"):
            consumer.resume()

    # -- watching ----------------------------------------------------------------------------

    @property
    def connection_state(self) -> ConnectionState:
        """Where the connection to the broker stands."""
        return self._connection.state

    @property
    def backend_name(self) -> str:
        """What the chosen backend calls itself."""
        return self._backend.name

    @property
    def capabilities(self) -> Capabilities:
        """What the chosen backend can do."""
        return self._backend.capabilities

    @property
    def ready(self) -> bool:
        """Whether the service does its work: started, connected, every consumer alive."""
        return self.health_check().status == "healthy"

    def health_check(self) -> Health:
        """How the service is doing. Costs nothing: the connection is watched in the background.

        May be asked from another thread, which hears of a blocked event loop too.
        """
        consumers, working = self._consumers.health()
        connected = self._connection.state is ConnectionState.CONNECTED
        still = self._monitor.seconds_since_last_run
        turning = still < LOOP_STALL_SECONDS
        serving = self._state == "running" and not self.stopping
        well = serving and connected and working and turning
        failing = [f"{item.channel}: {item.failing}" for item in consumers if item.failing]
        return Health(
            status="healthy" if well else "unhealthy",
            connection_state=self._connection.state,
            durable=bool(self._backend.capabilities.durable),
            breaker=str(self._producer.guarded.breaker.state),
            last_success_at=self._connection.last_success_at,
            last_error=(failing[0] if failing else self._connection.last_error)
            if turning
            else f"the event loop has been blocked for {still:.0f} s: a handler may not wait in it",
            disconnected_at=self._connection.disconnected_at,
            consumers=consumers,
        )

    def metrics(self) -> Metrics:
        """The counters, together and for each channel."""
        return self._counters.snapshot()

    def _on_backend_dead_letter(self, letter: DeadLetter) -> None:
        """The backend itself wrote a dead letter: a lease expired too often, or a TTL ran out."""
        for route in self._routes.known():
            if route.queue == letter.channel:
                record_dead_letter(
                    replace(letter, channel=route.name),
                    kept=route.dead_letter is not None,
                    counters=route.counters,
                    events=self._events,
                    consumer=letter.group or route.name,
                )

    def _on_dropped_letter(self, letter: DeadLetter) -> None:
        """The dead letters are full and the oldest went: the one thing that qkit lets go."""
        logger.error(
            "%s: the dead letters are full, the oldest is dropped: message %s (%s)",
            letter.channel,
            letter.message_id,
            letter.reason,
            extra={"queue": letter.channel, "message_id": letter.message_id},
        )
        self._events.emit(DeadLettered(letter, kept=False))

    # -- administration ----------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The names of all queues, or where the broker cannot list them, of those in use here."""
        return await self._administer("queues").queues()

    async def stats(self, name: Channel[T] | str) -> QueueStats:
        """A queue's depth and counters; ``QueueNotFound`` if there is no such queue."""
        return await self._administer("stats").stats(name_of(name))

    async def peek(self, name: Channel[T] | str, limit: int = 10) -> list[Message]:
        """The next messages in the order of delivery, without consuming them."""
        return await self._administer("peek").peek(name_of(name), limit)

    async def purge(self, name: Channel[T] | str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return await self._administer("purge").purge(name_of(name))

    async def delete(self, name: Channel[T] | str) -> None:
        """Delete a queue with all that is in it. The next send declares it anew."""
        await self._administer("delete").delete(name_of(name))

    def dead_letters(self, name: Channel[T] | str) -> DeadLetters:
        """A channel's dead letters: ``list``, ``replay``, ``purge``."""
        return self._administer("dead_letters").dead_letters(name_of(name))

    def _administer(self, operation: str) -> QueueAdmin:
        self._require_sending(operation)
        return self._admin

    def _require_sending(self, operation: str) -> None:
        if self._state not in ("running", "stopping"):  # a handler may send while it drains
            self._require(operation, "running")

    def _require(self, operation: str, state: State) -> None:
        if self._state == state:
            return
        advice = {
            "new": "start it first: `async with service:` or `await service.start()`",
            "starting": "wait until start() has returned",
            "running": "it runs already",
            "stopping": "it is shutting down",
            "closed": "it was shut down, and a service starts once: make a new QueueService",
        }[self._state]
        raise LifecycleError(
            f"{operation}() on a service that is {self._state}: {advice}", operation=operation
        )
