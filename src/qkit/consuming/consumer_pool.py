"""``ConsumerPool``: the consumers of a service, each in its own task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket

from qkit._internal.logging import logger
from qkit._internal.tasks import detach
from qkit.backend import SubscriptionSpec
from qkit.consuming.consumer import Consumer
from qkit.consuming.executor import Executor
from qkit.consuming.handler_threads import HandlerThreads
from qkit.consuming.settlement import Settlement
from qkit.errors import QueueNotFound
from qkit.handlers.registry import Handler
from qkit.handlers.route import Route
from qkit.observability.health import ConsumerHealth
from qkit.sending.producer import Producer
from qkit.wiring import Wiring

__all__ = ["ConsumerPool"]

MAX_CANCEL_ROUNDS = 3  # one second each
RELEASE_TIMEOUT = 2.0  # seconds, for the messages of handlers that ignore their cancellation
NO_LEASE_EXPIRY = float("inf")


class ConsumerPool:
    """The running consumers of a service.

    Args:
        wiring: Objects shared by all parts of the service.
        producer: Declares channels and writes dead letters.

    Attributes:
        threads: Threads of synchronous handlers.
    """

    def __init__(self, wiring: Wiring, producer: Producer) -> None:
        self.threads: HandlerThreads = HandlerThreads()
        self._wiring = wiring
        self._producer = producer
        self._tasks: dict[Consumer, asyncio.Task[None]] = {}

    def start(self, route: Route, handler: Handler, *, renew_leases: bool) -> None:
        """Start a consumer for a handler.

        Args:
            route: The channel.
            handler: The handler.
            renew_leases: Whether to renew leases. If false, leases never expire.
        """
        consumer = self._consumer(route, handler, renew_leases=renew_leases)
        self._tasks[consumer] = asyncio.create_task(
            consumer.run(), name=f"qkit consumer {consumer.channel} {consumer.group}"
        )

    def _consumer(self, route: Route, handler: Handler, *, renew_leases: bool) -> Consumer:
        spec = SubscriptionSpec(
            queue=route.queue,
            group=handler.group,
            consumer=f"{socket.gethostname()}-{os.getpid()}-{handler.group}",
            prefetch=self._wiring.routes.prefetch(route, handler),
            broadcast=route.broadcast,
            ack_deadline=route.ack_deadline if renew_leases else NO_LEASE_EXPIRY,
            needs_delay=route.policy.mode == "release" and route.policy.max_attempts > 1,
            ordered=route.ordered,
        )
        if route.ordered and not self._wiring.backend.capabilities.key_lock:
            logger.warning(
                "%s: %s keeps the order per key only within one process: run one process for "
                "this channel",
                route.name,
                route.backend,
                extra={"queue": route.name, "consumer": spec.consumer},
            )
        settlement = Settlement(self._wiring, route, spec, self._producer.dead_letter_writer(route))
        executor = Executor(self._wiring, route, handler, self.threads, settlement.record_retry)
        declare = functools.partial(self._producer.redeclare, route)
        return Consumer(self._wiring, route, spec, executor, settlement, declare)

    async def wait_ready(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until all consumers have subscribed.

        A consumer that has not subscribed by then keeps trying.

        Raises:
            ConfigError: The broker rejected a subscription.
            Unsupported: The backend lacks a feature that a subscription needs.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for consumer in self._tasks:
                    await consumer.ready.wait()
        for consumer in self._tasks:
            if consumer.rejected is not None:
                raise consumer.rejected

    def consumers_of(self, channel: str, operation: str) -> list[Consumer]:
        """Return the consumers of a channel; raise ``QueueNotFound`` if there are none."""
        found = [consumer for consumer in self._tasks if consumer.channel == channel]
        if not found:
            channels = sorted({consumer.channel for consumer in self._tasks})
            raise QueueNotFound(
                f"this service does not consume {channel!r}; it consumes "
                f"{', '.join(channels) or 'nothing'}",
                operation=operation,
                queue=channel,
            )
        return found

    def health(self) -> tuple[list[ConsumerHealth], bool]:
        """Return the health of each consumer, and whether all of them work. Thread-safe."""
        tasks = list(self._tasks.items())  # copy, because the loop may change it during the call
        consumers = [consumer.health() for consumer, _ in tasks]
        working = not any(task.done() for _, task in tasks) and not any(
            consumer.state in ("reconnecting", "starting") or consumer.failing
            for consumer in consumers
        )
        return consumers, working

    def is_running(self, task: asyncio.Task[object] | None) -> bool:
        """Return whether a task is running a handler of this service."""
        return any(consumer.is_running(task) for consumer in self._tasks)

    async def drain(self, timeout: float, force: asyncio.Event) -> int:
        """Stop fetching, wait for running handlers, then cancel those that still run.

        Args:
            timeout: Seconds to wait for running handlers.
            force: Ends the wait when it is set.

        Returns:
            The number of cancelled handlers.
        """
        for consumer in self._tasks:
            consumer.stop()
        working = set(self._tasks.values())
        forced = asyncio.ensure_future(force.wait())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while working and not forced.done() and (left := deadline - loop.time()) > 0:
            done, _ = await asyncio.wait(
                {*working, forced}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            working -= done
        forced.cancel()
        abandoned = sum(consumer.abandon() for consumer in self._tasks)
        if abandoned:
            logger.warning("cancelled %d handlers that did not finish in time", abandoned)
        return abandoned

    async def stop(self, settle_timeout: float) -> None:
        """Cancel running handlers, wait for settlements, then cancel consumers that still run.

        Args:
            settle_timeout: Seconds to wait while only settlements are in progress.
        """
        tasks = set(self._tasks.values())
        for consumer in self._tasks:
            consumer.stop()
            consumer.abandon()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settle_timeout
        rounds = MAX_CANCEL_ROUNDS
        while tasks and rounds:
            _, tasks = await asyncio.wait(tasks, timeout=1.0)
            if any(consumer.settling for consumer in self._tasks) and loop.time() < deadline:
                continue  # the handlers have finished, and their messages are being settled
            rounds -= 1
            for task in tasks:
                task.cancel()
        for consumer, task in self._tasks.items():
            if not task.done():
                await self._give_up(consumer, task)
        self._tasks.clear()

    async def _give_up(self, consumer: Consumer, task: asyncio.Task[None]) -> None:
        """Release the messages of handlers that ignore their cancellation; wait no longer."""
        stuck: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                stuck = await consumer.give_up()
        except TimeoutError:
            pass  # the broker delivers them again
        logger.error(
            "%s: %d handlers of group %s ignored their cancellation and still run; their messages "
            "were released, and the service no longer waits for them",
            consumer.channel,
            len(stuck),
            consumer.group,
            extra={"queue": consumer.channel},
        )
        for left in (*stuck, task):
            detach(left)
