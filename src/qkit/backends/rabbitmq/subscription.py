"""Subscription to a queue, with a buffer of pushed messages and batched acks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from aiormq import Channel
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait, run_to_completion
from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.common.arrivals import Arrivals
from qkit.backends.common.errors import subscription_broke
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq.ack_batcher import AckBatcher
from qkit.backends.rabbitmq.connection import ReconnectingConnection, close
from qkit.backends.rabbitmq.driver import closing_future
from qkit.backends.rabbitmq.errors import BACKEND, DRIVER_ERRORS, to_queue_error
from qkit.errors import QueueError, SubscriptionLost, Unsupported
from qkit.message import Envelope

__all__ = ["RabbitSubscription", "ReceivedMessage"]

#: Delay before a message is requeued whose copy could not be sent.
REQUEUE_DELAY_SECONDS: Final = 1.0
#: Time after which pushed messages are returned to the queue if no ``receive`` takes them.
UNRECEIVED_RETURN_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """Message that the broker pushed; the receipt of its delivery.

    Attributes:
        tag: Delivery tag on the channel.
        message: Message object of the driver.
        delivery: The delivery; ``None`` until ``receive`` returns it.
    """

    tag: int
    message: DeliveredMessage
    delivery: Delivery | None = None

    @property
    def properties(self) -> Basic.Properties:
        """AMQP properties of the message."""
        return self.message.header.properties


Republish = Callable[[str, Envelope, Basic.Properties, float], Awaitable[None]]


class RabbitSubscription:
    """Subscription with at most ``prefetch`` unsettled messages.

    Args:
        connection: Connection for consuming.
        spec: Channel, group and prefetch to consume with.
        queue: Name of the queue on the broker.
        clock: Clock of the service.
        republish: Publishes a copy of a message; returns when the broker has confirmed it.
        copies: Whether to return messages to the queue as copies. This is needed for a quorum
            queue, which counts a requeue as an attempt.
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
    ) -> None:
        self._connection = connection
        self._spec = spec
        self._queue = queue
        self._clock = clock
        self._republish = republish
        self._copies = copies
        self._channel: Channel | None = None
        self._tag: str | None = None
        self._acks: AckBatcher | None = None
        self._held: set[ReceivedMessage] = set()  # in flight, or being returned to the queue
        # If this consumer is paused, its buffered messages are returned for other consumers. If it
        # has unsettled deliveries, it is only busy and will call ``receive`` again.
        self._arrivals: Arrivals[ReceivedMessage] = Arrivals(
            unclaimed=None if spec.ordered else self._return_unclaimed,
            after=UNRECEIVED_RETURN_SECONDS,
            busy=lambda: bool(self._held),
        )
        # Attempts include the deliveries that a quorum queue has counted. The prefetched messages
        # of an ordered subscription return as the same messages, which counts as a delivery too.
        self._counts_deliveries = copies and not spec.ordered
        self._consumer_lock = asyncio.Lock()  # held while the consumer on the broker starts or ends
        self._lost: SubscriptionLost | None = None
        self._loss_callbacks: list[Callable[[Sequence[Delivery]], None]] = []
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start the consumer on the broker; return when the broker has confirmed it."""
        channel = self._channel = await self._connection.channel()
        self._acks = AckBatcher(channel)
        closing_future(channel).add_done_callback(self._channel_closed)
        channel.on_consumer_cancel_callbacks.add(self._cancelled_by_broker)
        async with asyncio.timeout(self._connection.parameters.timeout):
            await channel.basic_qos(prefetch_count=self._spec.prefetch)
            await self._start_consumer()

    async def _start_consumer(self) -> None:
        await self._consume()

    async def _consume(self) -> None:
        assert self._channel is not None
        answer = await self._channel.basic_consume(
            self._queue, self._deliver, consumer_tag=f"{self._spec.consumer}.{uuid4().hex[:8]}"
        )
        self._tag = answer.consumer_tag

    # Callbacks of the driver

    async def _deliver(self, message: DeliveredMessage) -> None:
        tag = message.delivery_tag
        assert tag is not None
        if self._lost is None:  # else the broker redelivers the message
            self._arrivals.put([ReceivedMessage(tag, message)])

    def _channel_closed(self, closing: asyncio.Future[object]) -> None:
        error: BaseException | None = None
        if not closing.cancelled():
            error = closing.exception()
        reason = "the channel was closed" if error is None else to_queue_error(error, "").message
        self._lose(reason, error)

    def _cancelled_by_broker(self, frame: Basic.Cancel) -> None:
        self._lose("RabbitMQ ended the consumer: the queue was deleted, or its node went down")

    def _lose(self, reason: str, error: BaseException | None = None) -> None:
        if self._lost is None:
            self._lost = subscription_broke(BACKEND, self._spec.queue, reason, error)
            self._arrivals.fail(self._lost, drop=True)  # they cannot be settled any more
            self._report_lost()

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        """Call ``callback`` with the unsettled deliveries when the subscription is lost."""
        self._loss_callbacks.append(callback)

    def _report_lost(self) -> None:
        lost = [received.delivery for received in self._held if received.delivery is not None]
        if lost:
            for callback in self._loss_callbacks:
                callback(lost)

    # Receiving

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages and return up to ``limit`` deliveries, or an empty list after ``stop``.

        Safe to cancel.

        Raises:
            SubscriptionLost: The connection was lost, or the queue was deleted.
        """
        while received := await self._arrivals.take(limit, self._resume_soon):
            if found := self._deliveries(received):
                return found
        return []

    def _deliveries(self, taken: list[ReceivedMessage]) -> list[Delivery]:
        found: list[Delivery] = []
        now = self._clock.time()
        for received in taken:
            envelope = codec.decode(received.properties, received.message.body, now=now)
            if self._counts_deliveries:
                envelope.attempt += codec.deliveries(received.properties)
            self._held.add(received)
            due, expires = codec.not_before(received.properties), envelope.expires_at
            if due is not None and due > now and (expires is None or expires > now):
                self._spawn(self._delay_further(received, envelope, due))
                continue
            envelope.attempt += 1
            received.delivery = delivery = Delivery(envelope, self._spec.queue, received)
            found.append(delivery)
        return found

    def _return_unclaimed(self, unclaimed: list[ReceivedMessage]) -> None:
        self._held.update(unclaimed)  # so that ``leave`` returns them if it runs first
        self._spawn(self._suspend(unclaimed))

    async def _suspend(self, unclaimed: list[ReceivedMessage]) -> None:
        """Cancel the consumer; return ``unclaimed`` and later arrivals to the queue."""
        await self._end_consumer(unclaimed)
        if self._arrivals.receivers:
            await self._resume()

    def _resume_soon(self, limit: int) -> None:
        if self._tag is None and not self._consumer_lock.locked():
            self._spawn(self._resume())

    async def _resume(self) -> None:
        async with self._consumer_lock:
            if self._tag is not None or self._stopped or self._lost is not None:
                return
            try:
                async with asyncio.timeout(self._connection.parameters.timeout):
                    await self._consume()
            except DRIVER_ERRORS as error:
                self._lose(to_queue_error(error, "receive").message, error)

    async def _delay_further(
        self, received: ReceivedMessage, envelope: Envelope, due: float
    ) -> None:
        """Send a message through the delay cascade again, because it is not due yet."""
        copy = self._encode_copy(received, envelope, envelope.attempt, due)
        await self._replace(received, envelope, copy, due - self._clock.time())

    # Settling

    async def ack(self, delivery: Delivery) -> None:
        """Acknowledge a delivery, which removes its message; acks are sent in batches.

        AMQP does not confirm acks. If the connection is lost before the ack arrives, the message is
        delivered again.

        Raises:
            SubscriptionLost: The subscription has ended.
        """
        self._settle(self._received(delivery, "ack"))
        delivery.receipt = None

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Release a delivery; the message is delivered again after ``delay`` seconds.

        The message is replaced with a copy that has the headers of the envelope. The original is
        acknowledged after the broker has confirmed the copy. In a classic queue, a message that
        does not change is requeued instead and keeps its place.

        Raises:
            SubscriptionLost: The subscription has ended.
            QueueError: The copy could not be sent; the original is requeued.
        """
        received = self._received(delivery, "release")
        envelope = delivery.envelope
        delivery.receipt = None
        before = codec.decode(received.properties, b"")
        if (
            delay <= 0
            and not count_attempt
            and not self._copies
            and envelope.headers == before.headers
        ):
            self._requeue(received)
            return
        copy = self._encode_copy(received, envelope, envelope.attempt - (not count_attempt))
        await self._replace(received, envelope, copy, delay)

    def _encode_copy(
        self, received: ReceivedMessage, envelope: Envelope, attempts: int, due: float | None = None
    ) -> Basic.Properties:
        frame = self._connection.frame
        return codec.encode_copy(
            envelope, received.properties, attempts=attempts, due=due, frame=frame
        )

    async def _replace(
        self, received: ReceivedMessage, envelope: Envelope, copy: Basic.Properties, delay: float
    ) -> None:
        """Publish a copy, then acknowledge the original."""
        try:
            await self._republish(self._queue, envelope, copy, delay)
        except BaseException:
            # The copy may not exist, so keep the original. Requeue it after a pause, because the
            # broker redelivers it immediately.
            self._spawn(self._requeue_later(received))
            raise
        self._settle(received)

    async def _requeue_later(self, received: ReceivedMessage) -> None:
        await asyncio.sleep(REQUEUE_DELAY_SECONDS)
        if received in self._held:
            self._requeue(received)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Raise ``Unsupported``: RabbitMQ has no leases; a message belongs to the open channel."""
        raise Unsupported(
            "RabbitMQ has no leases to extend; its consumer_timeout, 30 minutes by default, limits "
            "how long a delivery may stay unsettled",
            backend=BACKEND,
            operation="extend",
            queue=delivery.queue,
        )

    def _received(self, delivery: Delivery, operation: str) -> ReceivedMessage:
        received = delivery.receipt_of(ReceivedMessage, BACKEND, operation)
        if received not in self._held:
            raise delivery.settled_before(BACKEND, operation)
        if self._lost is not None:
            raise self._lost
        return received

    def _settle(self, received: ReceivedMessage) -> None:
        self._held.discard(received)
        if self._acks is not None and self._lost is None:
            self._acks.ack(received.tag)

    def _requeue(self, received: ReceivedMessage) -> None:
        self._held.discard(received)
        if self._acks is not None and self._lost is None:
            self._acks.requeue(received.tag)

    # Stopping

    async def stop(self) -> None:
        """Stop consuming and wake a waiting ``receive``; deliveries can still be settled.

        Messages that were pushed and not received return to the queue.
        """
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        await self._end_consumer([])

    async def _end_consumer(self, returned: list[ReceivedMessage]) -> None:
        """Cancel the consumer; return ``returned`` and all buffered messages to the queue."""
        async with self._consumer_lock:
            # Shielded, because the driver would close the channel if the call were cancelled.
            await run_to_completion(self._cancel_consumer())
            returned = returned + self._arrivals.drain()
            self._held.update(returned)
            await self._return_messages(returned)

    async def _cancel_consumer(self) -> None:
        """Cancel the consumer; the broker responds after it has pushed the last message."""
        tag, self._tag = self._tag, None
        if tag is not None and self._lost is None and self._channel is not None:
            with contextlib.suppress(*DRIVER_ERRORS):
                async with asyncio.timeout(self._connection.parameters.timeout):
                    await self._channel.basic_cancel(tag)
            await asyncio.sleep(0)  # let the driver's pending delivery tasks run

    async def _return_messages(self, returned: list[ReceivedMessage]) -> None:
        """Return messages to the queue without counting an attempt."""
        for received in returned:
            if self._lost is not None:
                return
            if not self._copies:
                self._requeue(received)
                continue
            now = self._clock.time()
            envelope = codec.decode(received.properties, received.message.body, now=now)
            attempts = envelope.attempt + codec.deliveries(received.properties)
            copy = self._encode_copy(received, envelope, attempts)
            try:
                await self._replace(received, envelope, copy, 0.0)
            except QueueError as error:
                logger.warning(
                    "%s: could not send the copy of a message; requeueing the original, which "
                    "counts as an attempt: %s",
                    self._spec.queue,
                    error,
                )

    async def leave(self) -> None:
        """Stop consuming, return unsettled messages to the queue, and close the channel."""
        try:
            async with asyncio.timeout(self._connection.parameters.timeout):
                await self.stop()
                await cancel_and_wait(self._tasks)
                self._held.update(self._arrivals.drain())  # if ``stop`` was cancelled
                await self._return_messages(sorted(self._held, key=lambda received: received.tag))
                if self._acks is not None:
                    await self._acks.flushed()
        except TimeoutError:
            logger.warning(
                "%s: RabbitMQ did not respond in time; unsettled messages are requeued when the "
                "channel closes",
                self._spec.queue,
            )
        finally:
            self._lose("it was closed")
            if self._channel is not None:
                await close(self._channel)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(
            _log_errors(work, self._spec.queue), name="qkit rabbitmq background work"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _log_errors(work: Coroutine[Any, Any, None], queue: str) -> None:
    try:
        await work
    except (QueueError, *DRIVER_ERRORS) as error:
        logger.warning("%s: a background task failed: %s", queue, error)
