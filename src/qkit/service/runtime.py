"""``ServiceRuntime``: starts and stops the connection, the producer and the consumers."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Literal

from qkit._internal.forks import watch_forks
from qkit._internal.logging import logger
from qkit._internal.loop_calls import LoopCaller, require_asyncio, running_loop
from qkit.backend import DeadLetterSource, DroppedLetterSource, DurabilityReporting
from qkit.consuming.consumer_pool import ConsumerPool
from qkit.consuming.settlement import record_dead_letter
from qkit.errors import LifecycleError
from qkit.handlers.registry import Handler
from qkit.handlers.route import Route
from qkit.message import DeadLetter
from qkit.observability.connection_state import ConnectionState
from qkit.observability.events import DeadLettered, ShutDown
from qkit.observability.health import Health
from qkit.observability.monitor import Monitor
from qkit.sending.producer import Producer
from qkit.wiring import Wiring

__all__ = ["ServiceRuntime"]

State = Literal["new", "starting", "running", "stopping", "closed", "forked"]
"""``forked``: this is a copy, in a child process, of a service that was started before the fork."""

LOOP_STALL_SECONDS = 4.0  # the loop counts as blocked if the monitor has not run for this long
CLOSE_TIMEOUT = 5.0  # seconds, for the backend and for event listeners
FORCED_LISTENER_TIMEOUT = 0.5  # seconds, for event listeners after a forced shutdown


class ServiceRuntime:
    """Lifecycle of a service: its state, its producer and its consumers.

    Args:
        wiring: Objects shared by all parts of the service.
        background_timers: Whether to ping the broker and renew leases. Default: true.

    Attributes:
        state: The state of the service.
        loop: The service's event loop; ``None`` before the start and after the shutdown.
        force: Event that makes a shutdown stop waiting for handlers.
        producer: Sends messages.
        consumers: The running consumers.
    """

    def __init__(self, wiring: Wiring, *, background_timers: bool = True) -> None:
        self.wiring = wiring
        self.state: State = "new"
        self.loop: asyncio.AbstractEventLoop | None = None
        self.force: asyncio.Event = asyncio.Event()
        self.producer: Producer = Producer(wiring, self.require_sending)
        self.consumers: ConsumerPool = ConsumerPool(wiring, self.producer, self._exit)
        self._backend = wiring.backend
        self._settings = wiring.settings
        self._routes = wiring.routes
        self._connection = wiring.connection
        self._events = wiring.events
        self._monitor = Monitor(wiring.backend, wiring.connection, wiring.clock)
        self._background_timers = background_timers
        self._listening = False  # stays set if a start fails, so that callbacks are registered once
        self._lifecycle_lock = asyncio.Lock()  # serializes start and shutdown
        self._loop_caller: LoopCaller | None = None
        self._exiting: asyncio.Task[None] | None = None  # raises a handler's ``SystemExit``
        self._process = 0  # the process in which the service was started
        watch_forks(self)

    async def start(self) -> None:
        """Connect, declare all channels and start the consumers; see ``QueueService.start``."""
        # Before the lock, which a task of the parent process or of another loop may hold.
        self._check_owner("start")
        loop = require_asyncio("start")
        async with self._lifecycle_lock:
            if self.state == "running":
                return
            self.require("start", "new")
            planned = self._plan()
            self.state = "starting"
            self._bind(loop)
            self._connection.transition_to(ConnectionState.CONNECTING)
            try:
                await self._open(planned)
            except BaseException as error:
                self._connection.record_failure(error)
                await self._stop_consumers()
                await self._close_backend()
                for route in self._routes.known():
                    route.declared = False
                self.state = "new"
                self.producer.close()
                self._bind(None)
                raise

    def _plan(self) -> list[tuple[Route, Handler]]:
        """Check all settings, channels and handlers before connecting.

        Returns:
            Each handler with the route of its channel.
        """
        self._routes.check_settings()
        self.wiring.registry.warn_about_classes()
        planned: list[tuple[Route, Handler]] = []
        for channel in list(self.wiring.registry.channels.values()):
            self._routes.resolve(channel)
        for handler in self.wiring.registry.handlers:
            route = self._routes.resolve(self.wiring.registry.channels[handler.channel])
            self._routes.check_handler(route, handler)
            self._routes.prefetch(route, handler)
            planned.append((route, handler))
        return planned

    async def _open(self, planned: list[tuple[Route, Handler]]) -> None:
        self.wiring.telemetry.start(lambda: self.wiring.counters.snapshot().channels)
        await self._backend.start()
        self._connection.transition_to(ConnectionState.CONNECTED)
        if self._durable() is False:
            logger.warning(
                "%s is not durable: its messages are lost when it stops", self._backend.name
            )
        if not self._listening:
            if isinstance(self._backend, DeadLetterSource):
                self._backend.on_dead_letter(self._on_backend_dead_letter)
            if isinstance(self._backend, DroppedLetterSource):
                self._backend.on_dropped_letter(self._on_dropped_letter)
            self._listening = True
        for route in self._routes.known():
            await self.producer.declare(route)
        self.state = "running"  # before the consumers start, because handlers may send
        self.producer.open()
        for route, handler in planned:
            self.consumers.start(route, handler, renew_leases=self._background_timers)
        if self._background_timers:
            self._monitor.start()
        await self.consumers.wait_ready(self._settings.send_timeout)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Drain the service and close the backend; see ``QueueService.shutdown``."""
        self._check_owner("shutdown")
        require_asyncio("shutdown")
        task = asyncio.create_task(self._shut_down(timeout), name="qkit shutdown")
        # A shutdown always completes; if the caller is cancelled, that is raised afterwards.
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
            if self.state in ("new", "closed"):
                self.state = "closed"
                return
            self.state = "stopping"  # from now on, the service is not ready
            self._connection.transition_to(ConnectionState.CLOSING)
            if timeout is None:
                timeout = self._settings.shutdown.timeout
            abandoned = await self.consumers.drain(timeout, self.force)
            await self._stop_consumers()
            await self.producer.drain()
            self.producer.close()
            self.consumers.threads.close()
            await self._close_backend()
            self.state = "closed"
            self._bind(None)
            self._connection.transition_to(ConnectionState.CLOSED)
            logger.info("shut down; cancelled %d running handlers", abandoned)
            self._events.emit(ShutDown(abandoned))
            await self._events.drain(
                FORCED_LISTENER_TIMEOUT if self.force.is_set() else CLOSE_TIMEOUT
            )

    def _exit(self, error: BaseException) -> None:
        """Shut down, then raise the ``SystemExit`` or ``KeyboardInterrupt`` of a handler."""
        if self._exiting is None:
            logger.error("a handler raised %r: shutting down to end the process", error)
            self._exiting = asyncio.create_task(self._raise_after_shutdown(error), name="qkit exit")

    async def _raise_after_shutdown(self, error: BaseException) -> None:
        try:
            await self.shutdown()
        except asyncio.CancelledError:
            pass
        except Exception:
            logger.exception("the shutdown failed")
        raise error  # asyncio raises it in the event loop, which ends ``asyncio.run``

    async def _stop_consumers(self) -> None:
        await self._monitor.stop()
        await self.consumers.stop(0.0 if self.force.is_set() else self._settings.send_timeout)

    async def _close_backend(self) -> None:
        """Close the backend; only log its errors, because nothing depends on it any more."""
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

    def health(self, *, stopping: bool) -> Health:
        """Return the health of the service; see ``QueueService.health_check``.

        Args:
            stopping: Whether a stop was requested, which makes the service unhealthy.
        """
        consumers, working = self.consumers.health()
        connected = self._connection.state is ConnectionState.CONNECTED
        stalled = self._monitor.seconds_since_last_run
        responsive = stalled < LOOP_STALL_SECONDS
        serving = self.state == "running" and not stopping
        healthy = serving and connected and working and responsive
        failing = [f"{item.channel}: {item.failing}" for item in consumers if item.failing]
        return Health(
            status="healthy" if healthy else "unhealthy",
            connection_state=self._connection.state,
            durable=self._durable(),
            breaker=str(self.producer.guarded.breaker.state),
            last_success_at=self._connection.last_success_at,
            last_error=(failing[0] if failing else self._connection.last_error)
            if responsive
            else f"the event loop has been blocked for {stalled:.0f} s: an async handler must not "
            "make blocking calls",
            disconnected_at=self._connection.disconnected_at,
            consumers=consumers,
        )

    def _durable(self) -> bool | None:
        """Return whether confirmed messages survive a restart; ``None`` if that is unknown."""
        if not self._backend.capabilities.durable:
            return False
        return self._backend.durable if isinstance(self._backend, DurabilityReporting) else True

    def _on_backend_dead_letter(self, letter: DeadLetter) -> None:
        """Record a dead letter that the backend wrote itself, such as an expired message."""
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
        """Report a dead letter that was dropped because its queue was full."""
        logger.error(
            "%s: the dead-letter queue is full; dropped the oldest dead letter, message %s (%s)",
            letter.channel,
            letter.message_id,
            letter.reason,
            extra={"queue": letter.channel, "message_id": letter.message_id},
        )
        self._events.emit(DeadLettered(letter, kept=False))

    # -- checks ------------------------------------------------------------------------------

    def require_sending(self, operation: str) -> None:
        """Raise ``LifecycleError`` unless the service is running or draining."""
        if self.state not in ("running", "stopping"):  # a handler may send while draining
            self.require(operation, "running")

    def require_outside_handler(self, operation: str) -> None:
        """Raise ``LifecycleError`` if a handler of this service is the caller."""
        if self.state != "new" and self.consumers.is_running(asyncio.current_task()):
            raise LifecycleError(
                f"{operation}() was called in a handler, which the shutdown would wait for: call "
                "service.stop(), which returns at once and makes run() shut down",
                operation=operation,
            )

    def require(self, operation: str, state: State) -> None:
        """Raise ``LifecycleError`` for ``operation`` unless the service is in ``state``."""
        if self.state == state:
            return
        self._check_process(operation)
        advice = {
            "new": "start it first: `async with service:` or `await service.start()`",
            "starting": "wait until start() has returned",
            "running": "it is already running",
            "stopping": "it is shutting down",
            "closed": "it was shut down and cannot be restarted; create a new QueueService",
        }[self.state]
        raise LifecycleError(
            f"{operation}() on a service that is {self.state}: {advice}", operation=operation
        )

    def require_in_loop(self, operation: str) -> None:
        """Raise ``LifecycleError`` unless the service is running or draining in this event loop."""
        self.require_sending(operation)
        self.check_other_loop(operation)

    def check_other_loop(self, operation: str) -> None:
        """Raise ``LifecycleError`` if this thread runs an event loop other than the service's."""
        running = running_loop()
        if self.loop is None or running is None or running is self.loop:
            return
        raise LifecycleError(
            f"{operation}() in an event loop other than the one in which the service was started; "
            "nothing was sent to the broker. Connections belong to one event loop: start, use and "
            "shut down a service in the same one (for example in one asyncio.run), or create a "
            "service for each",
            operation=operation,
        )

    def _check_owner(self, operation: str) -> None:
        """Raise ``LifecycleError`` in another event loop and in a forked child process."""
        self._check_process(operation)
        self.check_other_loop(operation)

    def _check_process(self, operation: str) -> None:
        if self.state == "forked":
            raise LifecycleError(
                f"{operation}() in a forked child process: the service was started in process "
                f"{self._process}; create and start a service in each process",
                operation=operation,
            )

    def after_fork(self) -> None:
        """Reject all calls in a child process, where the event loop of the service does not run."""
        if self.state in ("starting", "running", "stopping"):
            self.state = "forked"
            self.producer.close()
            self._bind(None)

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Set the event loop of the service; ``None`` clears it."""
        if loop is not None:
            self._process = os.getpid()
        self.loop = loop
        self._loop_caller = None if loop is None else LoopCaller(loop)

    def check_loop(self, operation: str) -> None:
        """Raise ``LifecycleError`` unless a send may be awaited in this thread.

        A service that is not running has no event loop. In that case any loop passes, and awaiting
        the send raises the error.
        """
        self._check_process(operation)
        running = running_loop()
        if running is not None and (self.loop is None or running is self.loop):
            return
        where = "no event loop runs" if running is None else "another event loop runs"
        raise LifecycleError(
            f"service.{operation}() was called in a thread where {where}, so nothing was sent. "
            f"In a synchronous handler or another thread call service.sync.{operation}(…), which "
            f"blocks until the broker has confirmed. Use `await service.{operation}(…)` only in "
            "the event loop in which the service was started",
            operation=operation,
        )

    def require_caller(self, operation: str) -> LoopCaller:
        """Return the caller that lets other threads run code in the service's event loop."""
        while (caller := self._loop_caller) is None:
            self.require(f"sync.{operation}", "running")  # returns if the service has just started
        return caller
