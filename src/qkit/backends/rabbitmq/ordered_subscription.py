"""Ordered subscription: one is active per queue, the others wait on standby.

Messages go back to the queue only when the channel is closed, because that is the only way that
keeps their order in classic and quorum queues.
"""

from __future__ import annotations

import asyncio
from typing import Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.rabbitmq.active_lock import ActiveLocks
from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.errors import DRIVER_ERRORS, to_queue_error
from qkit.backends.rabbitmq.subscription import RabbitSubscription, ReceivedMessage, Republish
from qkit.errors import QueueError

__all__ = ["OrderedSubscription"]

#: Interval at which a subscription on standby tries to become active.
STANDBY_RETRY_SECONDS: Final = 1.0
#: Time that the broker gets to remove the consumer of a closed channel or connection. A consumer
#: that is still there afterwards belongs to another program, or is not ordered.
REMOVAL_TIMEOUT_SECONDS: Final = 2.0
REMOVAL_CHECK_SECONDS: Final = 0.05
#: Interval at which an active subscription looks for unordered consumers.
CONSUMER_CHECK_SECONDS: Final = 10.0


class OrderedSubscription(RabbitSubscription):
    """Subscription that consumes only while it holds the lock of its queue.

    Args:
        connection: Connection for consuming.
        spec: Channel, group and prefetch to consume with.
        queue: Name of the queue on the broker.
        clock: Clock of the service.
        republish: Publishes a copy of a message; returns when the broker has confirmed it.
        copies: Whether the queue is a quorum queue.
        locks: Locks of the connection.
    """

    def __init__(
        self,
        connection: ReconnectingConnection,
        spec: SubscriptionSpec,
        queue: str,
        *,
        clock: Clock,
        republish: Republish,
        copies: bool,
        locks: ActiveLocks,
    ) -> None:
        super().__init__(connection, spec, queue, clock=clock, republish=republish, copies=copies)
        self._locks = locks
        self._standby = True
        if copies:
            logger.info(
                "%s: ordered=True on a quorum queue: a message that ends its worker is delivered "
                "again without counting an attempt",
                spec.queue,
                extra={"queue": spec.queue},
            )

    @property
    def standby(self) -> bool:
        """Whether another subscription is active, so that this one receives nothing."""
        return self._standby

    async def _start_consumer(self) -> None:
        """Start the consumer, or try again in the background while another one is active."""
        await self._count_consumers()  # raises if the queue does not exist, also on standby
        locked = await self._locks.acquire(self._queue, self)
        if locked and not await self._count_consumers():
            await self._activate()
        else:
            self._spawn(self._wait_until_active(locked))

    async def _wait_until_active(self, locked: bool) -> None:
        try:
            while not locked:
                await asyncio.sleep(STANDBY_RETRY_SECONDS)
                locked = await self._locks.acquire(self._queue, self)
            await self._wait_for_removal()
            async with asyncio.timeout(self._connection.parameters.timeout):
                await self._activate()
        except QueueError as error:
            self._lose(error.message, error)
        except DRIVER_ERRORS as error:
            self._lose(to_queue_error(error, "receive").message, error)

    async def _activate(self) -> None:
        if not self._stopped and self._lost is None:
            await self._consume()
            self._standby = False
            self._spawn(self._watch_consumers())

    async def _wait_for_removal(self) -> None:
        """Wait until the broker has removed the consumer that was active before.

        The broker frees the lock of a closed connection and returns its messages independently. It
        removes a consumer together with returning its messages.
        """
        for _ in range(round(REMOVAL_TIMEOUT_SECONDS / REMOVAL_CHECK_SECONDS)):
            if not await self._count_consumers():
                return
            await asyncio.sleep(REMOVAL_CHECK_SECONDS)

    async def _watch_consumers(self) -> None:
        """Log a warning once if the queue has another consumer while this one is active."""
        while True:
            try:
                others = await self._count_consumers() - 1
            except (QueueError, *DRIVER_ERRORS):
                others = 0  # the loss of the connection or of the queue ends the subscription
            if others > 0:
                logger.warning(
                    "%s: %d other consumer(s) of this queue are not ordered, so messages with the "
                    "same key are not handled in order: set ordered=True for all consumers",
                    self._spec.queue,
                    others,
                    extra={"queue": self._spec.queue, "consumer": self._spec.consumer},
                )
                return
            await asyncio.sleep(CONSUMER_CHECK_SECONDS)

    async def _count_consumers(self) -> int:
        async with self._connection.control() as channel:
            answer = await channel.queue_declare(self._queue, passive=True)
        return answer.consumer_count or 0

    def _resume_soon(self, limit: int) -> None:
        """Do nothing: an ordered consumer is not suspended, and standby ends in the background."""

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Release a delivery; without a delay, its message returns when the subscription ends.

        The message then has its old place, and neither its headers nor its attempts have changed.
        With a delay, the message is replaced with a copy.

        Raises:
            SubscriptionLost: The subscription has ended.
            QueueError: The copy could not be sent; the original is requeued.
        """
        if delay > 0:
            await super().release(delivery, delay, count_attempt=count_attempt)
            return
        received = self._received(delivery, "release")
        delivery.receipt = None
        self._held.discard(received)

    async def _end_consumer(self, returned: list[ReceivedMessage]) -> None:
        """Keep the consumer and its messages until the channel is closed.

        While the broker lists the consumer, the next active subscription waits.
        """

    async def _return_messages(self, returned: list[ReceivedMessage]) -> None:
        """Do nothing: closing the channel returns the messages."""

    async def leave(self) -> None:
        """Return unsettled messages to the queue, close the channel and free the lock."""
        try:
            await super().leave()
        finally:
            await self._locks.release(self._queue, self)
