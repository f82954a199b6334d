"""Consumer that fills stages: one subscription, kept from batch to batch in a loop thread."""

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
IDLE_TIMEOUT_SECONDS: Final = 0.2  # without a message, after which there are none
FILL_TIMEOUT_SECONDS: Final = 2.0  # for one stage: leases run, and Spark waits for its batch
FIRST_FILL_TIMEOUT_SECONDS: Final = 5.0  # for the first message: joining a group takes time
CLOSE_TIMEOUT_SECONDS: Final = 5.0  # of a broken connection
UNKNOWN: Final = 1 << 60  # the depth of what does not tell its own


class StageConsumer:
    """Receives messages, lets the caller keep them, then acknowledges them.

    When the broker goes away a call raises ``BackendUnavailable``, and the next connects anew.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop = LoopThread("qkit-spark")
        self._stack: AsyncExitStack | None = None
        self._subscription: RawSubscription | None = None
        self._timeout = FIRST_FILL_TIMEOUT_SECONDS

    def depth(self) -> int:
        """How many messages wait now; ``UNKNOWN`` where the backend cannot tell."""
        return self._loop.call(self._depth)

    def take(self, limit: int, keep: Callable[[Sequence[Envelope]], None]) -> int:
        """Up to ``limit`` messages to ``keep``; acknowledged once that returned. How many.

        Fewer than ``PREFETCH``, and than ``limit``, if no more came in a while.
        """
        return self._loop.call(lambda: self._take(limit, keep))

    def close(self) -> None:
        """Leave the broker and end the thread."""
        self._loop.call(self._close)
        self._loop.close()

    async def _depth(self) -> int:
        backend = open_backend(self._plan.settings, SystemClock())
        try:
            await start_for_reading(backend, self._plan)
            if not await exists(backend, self._plan):
                return 0
            # The depth of a topic is not that of the group, which may not even exist yet.
            topic = self._plan.broadcast and not self._plan.dead_letters
            if isinstance(backend, Admin) and backend.capabilities.depth and not topic:
                return (await backend.stats(self._plan.queue)).depth
        finally:
            await backend.aclose()
        return UNKNOWN

    async def _take(self, limit: int, keep: Callable[[Sequence[Envelope]], None]) -> int:
        try:
            subscription = await self._subscribed()
            if subscription is None:
                return 0
            deliveries = await self._receive(subscription, min(limit, PREFETCH))
            if not deliveries:
                return 0
            await asyncio.to_thread(keep, [delivery.envelope for delivery in deliveries])
            await _acknowledge(subscription.subscription, deliveries)
        except BackendUnavailable:
            await self._close()
            raise
        return len(deliveries)

    async def _receive(self, subscription: RawSubscription, limit: int) -> list[Delivery]:
        """What comes until there is quiet, or for a while."""
        timeout, self._timeout = self._timeout, IDLE_TIMEOUT_SECONDS
        found = await _within(timeout, subscription.receive(limit))
        time = asyncio.get_running_loop().time
        until = time() + FILL_TIMEOUT_SECONDS
        while 0 < len(found) < limit and time() < until:
            more = await _within(IDLE_TIMEOUT_SECONDS, subscription.receive(limit - len(found)))
            if not more:
                break
            found += more
        return found

    async def _subscribed(self) -> RawSubscription | None:
        """Subscribe, unless that is done; ``None`` while there is no dead-letter queue yet.

        The channel must exist. What a subscription needs beside it is made: a topic's group, and
        on Kafka the topic of retries.
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
                logger.warning("%s: closing what was lost: %s", self._plan.channel, error)


async def _within(seconds: float, coming: Awaitable[list[Delivery]]) -> list[Delivery]:
    """What comes in time; parking is safe to cancel."""
    try:
        async with asyncio.timeout(seconds):
            return await coming
    except TimeoutError:
        return []


async def _acknowledge(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    """What cannot be acknowledged any more comes again: a duplicate, not a loss."""
    if isinstance(subscription, AckMany):
        results = await subscription.ack_many(deliveries)
    else:
        results = [await _ack(subscription, delivery) for delivery in deliveries]
    failed = [error for error in results if error is not None]
    if failed:
        logger.warning(
            "%d of %d messages were staged and not acknowledged, they will come again: %s",
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
