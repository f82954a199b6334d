"""``QueueService``: register handlers, send messages, consume, administer, shut down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.coroutines import returns_coroutine
from qkit._internal.logging import logger
from qkit._internal.loop_calls import running_loop
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
        self._stop = asyncio.Event()
        self._sync = SyncSender(self, lambda operation: self._runtime.require_caller(operation))
        self._build(backend, chosen, background_timers=True)

    def _build(self, backend: Backend, clock: Clock, *, background_timers: bool) -> None:
        """Build everything that knows the backend or the clock."""
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
        self._admin = QueueAdmin(wiring, self._producer)

    def replace_backend_for_testing(
        self, backend: Backend, clock: Clock, wrap_handler: Callable[[Handler], Handler]
    ) -> None:
        """For ``qkit.testing``: another backend and clock, handlers watched, no recurring timers.

        Without pings and lease renewals a test can tell that nothing more will happen.
        """
        self._runtime.require("replace_backend_for_testing", "new")
        self._build(backend, clock, background_timers=False)
        self._registry.handlers = [wrap_handler(handler) for handler in self._registry.handlers]

    # -- setting up --------------------------------------------------------------------------

    def register(self, target: object) -> None:
        """Add handlers: an instance of a ``@channel`` class, a function, or a module of them.

        Raises ``HandlerError`` for a signature that cannot be filled, ``ConfigError`` for
        contradicting declarations, ``LifecycleError`` once the service has started.
        """
        if (state := self._runtime.state) != "new":
            raise LifecycleError(
                f"register() on a service that is {state}: register every handler before "
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
        await self._runtime.start()

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
        self._runtime.force.set()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Come down in order: stop fetching, finish handlers, flush, close; idempotent.

        Handlers get ``timeout`` seconds (default ``shutdown.timeout``); those that are not done
        by then are cancelled and their messages given back with no attempt charged.
        """
        self._stop.set()
        await self._runtime.shutdown(timeout)

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
        """Broadcast one message: every group of the topic gets a copy.

        Options, and errors at the call and on await, are those of ``send``.
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
        """Send many messages with the same options, in as few round trips as the broker allows.

        Every body is checked before the first leaves. Raises ``PartialSend`` when only some were
        accepted: its ``results`` has a ``Sent`` or an error for each. Other errors are those of
        ``send``.
        """
        loop = self._runtime.loop
        if loop is None or running_loop() is not loop:
            self._runtime.check_loop("send_many")
        return self._producer.send_many(channel, bodies, options)

    # -- steering ----------------------------------------------------------------------------

    def pause(self, channel: Channel[T] | str) -> None:
        """Start no more handlers of a channel until ``resume``; running ones go on."""
        self._runtime.require("pause", "running")
        for consumer in self._runtime.consumers.consumers_of(name_of(channel), "pause"):
            consumer.pause()

    def resume(self, channel: Channel[T] | str) -> None:
        """Consume a channel again, also one that rests because a dependency was unavailable."""
        self._runtime.require("resume", "running")
        for consumer in self._runtime.consumers.consumers_of(name_of(channel), "resume"):
            consumer.resume()

    # -- watching ----------------------------------------------------------------------------

    @property
    def connection_state(self) -> ConnectionState:
        """Where the connection to the broker stands."""
        return self._runtime.wiring.connection.state

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
        return self._runtime.health(stopping=self.stopping)

    def metrics(self) -> Metrics:
        """The counters, together and for each channel."""
        return self._counters.snapshot()

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
        self._runtime.require_sending(operation)
        return self._admin
