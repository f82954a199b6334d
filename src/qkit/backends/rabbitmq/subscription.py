"""A consumer of a queue: the broker pushes, ``receive`` takes, acks go out together."""

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

#: Until a message of which no copy could be sent goes back to the queue.
REQUEUE_DELAY_SECONDS: Final = 1.0
#: Until messages that the broker pushed and no caller receives go back to the queue.
UNRECEIVED_RETURN_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """What is needed to settle a delivery: its tag on the channel, and how the message came."""

    tag: int
    message: DeliveredMessage
    delivery: Delivery | None = None  # none for what never reaches a handler

    @property
    def properties(self) -> Basic.Properties:
        """AMQP's own facts about it."""
        return self.message.header.properties


Republish = Callable[[str, Envelope, Basic.Properties, float], Awaitable[None]]


class RabbitSubscription:
    """A live claim on a queue: the broker hands out at most ``prefetch`` unsettled messages.

    ``copies`` is for quorum queues: they count whatever is given back, so what must not be charged
    is replaced by a copy. ``republish`` returns once the broker has confirmed it.
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
        self._held: set[ReceivedMessage] = set()  # received or being given back, not yet settled
        # Others should get what a paused consumer does not receive. One that holds deliveries is
        # busy, and will receive again.
        self._arrivals: Arrivals[ReceivedMessage] = Arrivals(
            unclaimed=self._return_unclaimed,
            after=UNRECEIVED_RETURN_SECONDS,
            busy=lambda: bool(self._held),
        )
        self._changing = asyncio.Lock()  # of the consumer on the broker
        self._lost: SubscriptionLost | None = None
        self._loss_callbacks: list[Callable[[Sequence[Delivery]], None]] = []
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin to consume; returns once the broker has said that it does."""
        channel = self._channel = await self._connection.channel()
        self._acks = AckBatcher(channel)
        closing_future(channel).add_done_callback(self._channel_closed)
        channel.on_consumer_cancel_callbacks.add(self._cancelled_by_broker)
        async with asyncio.timeout(self._connection.parameters.timeout):
            await channel.basic_qos(prefetch_count=self._spec.prefetch)
            await self._consume()

    async def _consume(self) -> None:
        assert self._channel is not None
        answer = await self._channel.basic_consume(
            self._queue, self._deliver, consumer_tag=f"{self._spec.consumer}.{uuid4().hex[:8]}"
        )
        self._tag = answer.consumer_tag

    # In the driver's callbacks: nothing but taking note

    async def _deliver(self, message: DeliveredMessage) -> None:
        tag = message.delivery_tag
        assert tag is not None
        if self._lost is None:  # otherwise the broker delivers it again
            self._arrivals.put([ReceivedMessage(tag, message)])

    def _channel_closed(self, closing: asyncio.Future[object]) -> None:
        error: BaseException | None = None
        if not closing.cancelled():
            error = closing.exception()
        said = "the channel was closed" if error is None else to_queue_error(error, "").message
        self._lose(said, error)

    def _cancelled_by_broker(self, frame: Basic.Cancel) -> None:
        self._lose("RabbitMQ ended the consumer: the queue was deleted, or its node went down")

    def _lose(self, said: str, error: BaseException | None = None) -> None:
        if self._lost is None:
            self._lost = subscription_broke(BACKEND, self._spec.queue, said, error)
            self._arrivals.fail(self._lost, drop=True)  # a dead channel settles nothing
            self._report()

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        """Call ``callback`` with what is held when the subscription breaks: it comes again."""
        self._loss_callbacks.append(callback)

    def _report(self) -> None:
        lost = [received.delivery for received in self._held if received.delivery is not None]
        if lost:
            for callback in self._loss_callbacks:
                callback(lost)

    # Receive

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the connection breaks or the queue is deleted. Taking and
        returning are one step of the loop, so a cancelled call has taken nothing.
        """
        while received := await self._arrivals.take(limit, self._resume_soon):
            if found := self._deliveries(received):
                return found
        return []

    def _deliveries(self, taken: list[ReceivedMessage]) -> list[Delivery]:
        found: list[Delivery] = []
        now = self._clock.time()
        for received in taken:
            envelope = codec.decode(received.properties, received.message.body)
            if self._copies:
                envelope.attempt += codec.deliveries(received.properties)
            self._held.add(received)
            due, expires = codec.not_before(received.properties), envelope.expires_at
            if due is not None and due > now and (expires is None or expires > now):
                self._spawn(self._wait_longer(received, envelope, due))
                continue
            envelope.attempt += 1
            received.delivery = delivery = Delivery(envelope, self._spec.queue, received)
            found.append(delivery)
        return found

    def _return_unclaimed(self, unclaimed: list[ReceivedMessage]) -> None:
        self._held.update(unclaimed)  # if it is left before they are given back, ``leave`` does it
        self._spawn(self._suspend(unclaimed))

    async def _suspend(self, unclaimed: list[ReceivedMessage]) -> None:
        """Consume no more, and give these messages back, with those that arrive until then."""
        await self._end_consumer(unclaimed)
        if self._arrivals.receivers:
            await self._resume()

    def _resume_soon(self, limit: int) -> None:
        if self._tag is None and not self._changing.locked():
            self._spawn(self._resume())

    async def _resume(self) -> None:
        async with self._changing:
            if self._tag is not None or self._stopped or self._lost is not None:
                return
            try:
                async with asyncio.timeout(self._connection.parameters.timeout):
                    await self._consume()
            except DRIVER_ERRORS as error:
                self._lose(to_queue_error(error, "receive").message, error)

    async def _wait_longer(self, received: ReceivedMessage, envelope: Envelope, due: float) -> None:
        again = self._encode_again(received, envelope, envelope.attempt, due)
        await self._replace(received, envelope, again, due - self._clock.time())

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """The work is done: remove the message. All acks of a turn of the loop go together.

        AMQP confirms no ack. If the connection breaks before it arrives the message comes again.
        """
        self._settle(self._received(delivery, "ack"))
        delivery.receipt = None

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Give the message back with the envelope's headers, after ``delay`` seconds.

        A copy is confirmed before the original is acknowledged. Where nothing changes the original
        itself goes back, to its old place.
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
        again = self._encode_again(received, envelope, envelope.attempt - (not count_attempt))
        await self._replace(received, envelope, again, delay)

    def _encode_again(
        self, received: ReceivedMessage, envelope: Envelope, attempts: int, due: float | None = None
    ) -> Basic.Properties:
        frame = self._connection.frame
        return codec.encode_again(
            envelope, received.properties, attempts=attempts, due=due, frame=frame
        )

    async def _replace(
        self, received: ReceivedMessage, envelope: Envelope, again: Basic.Properties, delay: float
    ) -> None:
        try:
            await self._republish(self._queue, envelope, again, delay)
        except BaseException:
            # There may be a copy, and there must not be none. After a rest: it comes again at once.
            self._spawn(self._requeue_later(received))
            raise
        self._settle(received)

    async def _requeue_later(self, received: ReceivedMessage) -> None:
        await asyncio.sleep(REQUEUE_DELAY_SECONDS)
        if received in self._held:
            self._requeue(received)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """There is nothing to extend: a message is held for as long as the connection lives."""
        raise Unsupported(
            "RabbitMQ keeps no leases; its consumer_timeout, 30 minutes by default, is the limit",
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

    # The end

    async def stop(self) -> None:
        """Fetch no more and wake a parked ``receive``; what was delivered can be settled."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        await self._end_consumer([])

    async def _end_consumer(self, returned: list[ReceivedMessage]) -> None:
        """End the consumer on the broker, and give back what it pushed and no caller received."""
        async with self._changing:
            await run_to_completion(self._cancel_consumer())  # cancelled, it closes the channel
            returned = returned + self._arrivals.drain()
            self._held.update(returned)
            await self._give_back(returned)

    async def _cancel_consumer(self) -> None:
        """What is on its way still arrives: the broker's answer comes after it."""
        tag, self._tag = self._tag, None
        if tag is not None and self._lost is None and self._channel is not None:
            with contextlib.suppress(*DRIVER_ERRORS):
                async with asyncio.timeout(self._connection.parameters.timeout):
                    await self._channel.basic_cancel(tag)
            await asyncio.sleep(0)  # each delivery is a task of the driver's, begun before this

    async def _give_back(self, returned: list[ReceivedMessage]) -> None:
        """Uncharged: a quorum queue counts what comes back to it, so there it is a copy."""
        for received in returned:
            if self._lost is not None:
                return
            if not self._copies:
                self._requeue(received)
                continue
            envelope = codec.decode(received.properties, received.message.body)
            attempts = envelope.attempt + codec.deliveries(received.properties)
            again = self._encode_again(received, envelope, attempts)
            try:
                await self._replace(received, envelope, again, 0.0)
            except QueueError as error:
                logger.warning("%s: a message went back and counts: %s", self._spec.queue, error)

    async def leave(self) -> None:
        """Stop, give back what is held, and close the channel."""
        try:
            async with asyncio.timeout(self._connection.parameters.timeout):
                await self.stop()
                await cancel_and_wait(self._tasks)
                self._held.update(self._arrivals.drain())  # if ``stop`` was cancelled
                await self._give_back(sorted(self._held, key=lambda received: received.tag))
                if self._acks is not None:
                    await self._acks.flushed()
        except TimeoutError:
            logger.warning("%s: what is held goes back when the channel ends", self._spec.queue)
        finally:
            self._lose("it was left")
            if self._channel is not None:
                await close(self._channel)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work, self._spec.queue), name="qkit rabbitmq side work")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _quietly(work: Coroutine[Any, Any, None], queue: str) -> None:
    try:
        await work
    except (QueueError, *DRIVER_ERRORS) as error:
        logger.warning("%s: %s", queue, error)
