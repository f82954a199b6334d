"""Consumer that fills staging files, with one subscription that stays open between batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit._internal.logging import logger
from qkit._internal.loop_thread import LoopThread
from qkit.backend import AckMany, Admin, Delivery, Subscription, SubscriptionSpec
from qkit.backends.factory import open_backend
from qkit.consuming.raw_subscription import RawSubscription, subscribe_raw
from qkit.errors import BackendUnavailable, QueueError
from qkit.handlers.channel import undeclared
from qkit.message import Envelope
from qkit.spark.existing import exists, start_for_reading
from qkit.spark.options import Plan
from qkit.wiring import Wiring

__all__ = ["PREFETCH", "StageConsumer"]

PREFETCH: Final = 1_000
IDLE_TIMEOUT_SECONDS: Final = 0.2  # idle time after which the queue counts as empty
FILL_TIMEOUT_SECONDS: Final = 2.0  # to fill one file, while leases run and Spark waits
FIRST_FILL_TIMEOUT_SECONDS: Final = 5.0  # to receive the first message: joining a group takes time
CLOSE_TIMEOUT_SECONDS: Final = 5.0  # to close a broken connection
UNKNOWN_DEPTH: Final = 1 << 60  # for backends that do not report a depth


class StageConsumer:
    """Blocking consumer that acknowledges messages after the caller has stored them.

    During an outage, a call raises ``BackendUnavailable``; the next call reconnects.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop = LoopThread("qkit-spark")
        self._stack: AsyncExitStack | None = None
        self._subscription: RawSubscription | None = None
        self._timeout = FIRST_FILL_TIMEOUT_SECONDS

    def depth(self) -> int:
        """Return the number of ready messages; ``UNKNOWN_DEPTH`` if it is unavailable."""
        return self._loop.call(self._depth)

    def take(self, limit: int, store: Callable[[Sequence[Envelope]], None]) -> int:
        """Pass up to ``limit`` messages to ``store``, then acknowledge them.

        Returns:
            The number of messages. If it is less than both ``limit`` and ``PREFETCH``, no more
            messages arrived in time.
        """
        return self._loop.call(lambda: self._take(limit, store))

    def close(self) -> None:
        """Disconnect and stop the thread."""
        self._loop.call(self._close)
        self._loop.close()

    async def _depth(self) -> int:
        backend = open_backend(self._plan.settings, SystemClock())
        try:
            await start_for_reading(backend, self._plan)
            if not await exists(backend, self._plan):
                return 0
            # The depth of a topic is not that of its group, and the group may not exist yet.
            topic = self._plan.broadcast and not self._plan.dead_letters
            if isinstance(backend, Admin) and backend.capabilities.depth and not topic:
                return (await backend.stats(self._plan.queue)).depth
        finally:
            await backend.aclose()
        return UNKNOWN_DEPTH

    async def _take(self, limit: int, store: Callable[[Sequence[Envelope]], None]) -> int:
        try:
            subscription = await self._subscribe()
            if subscription is None:
                return 0
            deliveries = await self._receive(subscription, min(limit, PREFETCH))
            if not deliveries:
                return 0
            await asyncio.to_thread(store, [delivery.envelope for delivery in deliveries])
            await _acknowledge(subscription.subscription, deliveries)
        except BackendUnavailable:
            await self._close()
            raise
        return len(deliveries)

    async def _receive(self, subscription: RawSubscription, limit: int) -> list[Delivery]:
        """Receive until the queue is idle, ``limit`` is reached or the fill timeout passes."""
        timeout, self._timeout = self._timeout, IDLE_TIMEOUT_SECONDS
        deliveries = await _within_timeout(timeout, subscription.receive(limit))
        time = asyncio.get_running_loop().time
        deadline = time() + FILL_TIMEOUT_SECONDS
        while 0 < len(deliveries) < limit and time() < deadline:
            more = await _within_timeout(
                IDLE_TIMEOUT_SECONDS, subscription.receive(limit - len(deliveries))
            )
            if not more:
                break
            deliveries += more
        return deliveries

    async def _subscribe(self) -> RawSubscription | None:
        """Return the subscription, opened on first use; ``None`` if there is no queue yet.

        Only a dead-letter queue may be missing; the channel itself must exist. The
        declaration also creates the group of a topic and, on Kafka, the retry topic.
        """
        if self._subscription is None:
            settings, clock = self._plan.settings, SystemClock()
            backend = open_backend(settings, clock)
            wiring = Wiring.build(backend, settings, clock)
            route = wiring.routes.resolve(
                undeclared(self._plan.name, broadcast=self._plan.broadcast)
            )
            stack = AsyncExitStack()
            try:
                stack.push_async_callback(backend.aclose)
                await start_for_reading(backend, self._plan)
                if not await exists(backend, self._plan):
                    await stack.aclose()
                    return None
                await backend.declare(route.spec)
                spec = SubscriptionSpec(
                    queue=self._plan.queue,
                    group=self._plan.group,
                    consumer=f"spark-{new_id()}",
                    prefetch=PREFETCH,
                    broadcast=route.broadcast,
                    ack_deadline=settings.ack_deadline if backend.capabilities.lease else None,
                )
                self._subscription = await stack.enter_async_context(
                    subscribe_raw(wiring, route, spec)
                )
            except BaseException:
                await stack.aclose()
                raise
            self._stack, self._timeout = stack, FIRST_FILL_TIMEOUT_SECONDS
        return self._subscription

    async def _close(self) -> None:
        stack, self._stack, self._subscription = self._stack, None, None
        if stack is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await stack.aclose()
            except (QueueError, TimeoutError, OSError) as error:
                logger.warning(
                    "%s: could not close the subscription cleanly: %s", self._plan.channel, error
                )


async def _within_timeout(seconds: float, receiving: Awaitable[list[Delivery]]) -> list[Delivery]:
    """Return the received messages, or none after a timeout; ``receive`` is safe to cancel."""
    try:
        async with asyncio.timeout(seconds):
            return await receiving
    except TimeoutError:
        return []


async def _acknowledge(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    """Acknowledge messages; a message whose ack fails will be delivered again."""
    if isinstance(subscription, AckMany):
        results = await subscription.ack_many(deliveries)
    else:
        results = [await _ack(subscription, delivery) for delivery in deliveries]
    failed = [error for error in results if error is not None]
    if failed:
        logger.warning(
            "%d of %d messages were staged but not acknowledged and will be redelivered: %s",
            len(failed),
            len(deliveries),
            failed[0],
        )


async def _ack(subscription: Subscription, delivery: Delivery) -> QueueError | None:
    try:
        await subscription.ack(delivery)
    except QueueError as error:
        return error
    return None
