"""A consumer of a channel: deliveries up to its prefetch, settled in any order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.common.errors import subscription_broke
from qkit.backends.kafka import codec
from qkit.backends.kafka.cluster import Cluster
from qkit.backends.kafka.codec import KafkaRecord, Origin
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.errors import BACKEND, DRIVER_ERRORS, translate_errors
from qkit.backends.kafka.fetched_message import FetchedMessage
from qkit.backends.kafka.group import GroupMembership, GroupTimeouts, lost
from qkit.backends.kafka.offsets import OffsetTracker
from qkit.backends.kafka.publisher import OutgoingRecord, Publisher, RecordMetadata
from qkit.backends.kafka.retry_tiers import TIERS
from qkit.backends.kafka.retry_topic import RetryTopicConsumer, retry_record
from qkit.errors import (
    AckDeadlineExceeded,
    QueueError,
    Unsupported,
)
from qkit.message import GROUP, Envelope

__all__ = ["KafkaSubscription"]

MAX_WAIT_SECONDS: Final = 5.0
RETRY_DELAY_SECONDS: Final = 1.0  # until a message that could not be sent back comes again


class KafkaSubscription:
    """A live claim on a channel's partitions: at most ``prefetch`` unsettled deliveries.

    What is given back uncharged and at once stays here and is delivered next. Only when this
    consumer stops does it go to the retry topic, where the others find it. A message with a key
    does not, or it could overtake one that was sent before it: it stays in its place in the log.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        cluster: Cluster,
        publisher: Publisher,
        spec: SubscriptionSpec,
        *,
        group: str,
        retry: str,
        timeouts: GroupTimeouts,
        batch: int | None,
        clock: Clock,
    ) -> None:
        self.queue = spec.queue
        self.group = group
        self._group = spec.group if spec.broadcast else None
        self._retry = retry
        self._prefetch = spec.prefetch
        self._publisher = publisher
        self._clock = clock
        self._held = 0
        self._waiting: deque[FetchedMessage] = deque()  # for a ``receive``
        self._polling: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._stopped = False
        self._loss_callbacks: list[Callable[[Sequence[Delivery]], None]] = []
        self._settlement_callbacks: list[Callable[[str, Exception | None], None]] = []
        self.membership = GroupMembership(
            parameters,
            cluster,
            group=group,
            topic=spec.queue,
            retry=retry,
            from_end=spec.broadcast,
            timeouts=timeouts,
            batch=batch,
            moved=self._moved,
            lost=self._report,
            changed=self._wake,
            committed=self._committed,
        )
        self._retry_consumer = RetryTopicConsumer(
            parameters,
            publisher,
            topic=retry,
            group=self._group,
            clock=clock,
            ready=self._is_due,
            settled=self.membership.settled,
            ended=self.membership.end_with,
        )

    @property
    def joined(self) -> bool:
        """Whether it is a member of its group."""
        return self.membership.joined

    async def open(self) -> None:
        """Join the group; returns when this consumer has its first share of it."""
        await self._retry_consumer.start()
        await self.membership.join()

    # Receive

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the topic is deleted or the driver gives up.
        """
        deadline = self._clock.monotonic() + MAX_WAIT_SECONDS
        while not self._stopped:
            if self.membership.broken is not None:
                raise self.membership.broken
            self._news.clear()
            free = min(limit, self._prefetch - self._held)
            if free > 0:
                found = self._take(free) or await self._read_now(free)
                if found:
                    return found
            seconds = deadline - self._clock.monotonic()
            if seconds <= 0:
                return []
            await self._wait(free, seconds)
        return []

    def _take(self, most: int) -> list[Delivery]:
        """What is here already: given back, due, or read for a ``receive`` that was cancelled."""
        taken: list[FetchedMessage] = []
        while self._waiting and len(taken) < most:
            message = self._waiting.popleft()
            if message.pending:
                taken.append(message)
        return self._deliver(taken)

    def _deliver(self, messages: list[FetchedMessage]) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for message in messages:
            message.held = delivery = Delivery(message.envelope, self.queue, message)
            message.tracker.held += 1
            deliveries.append(delivery)
        self._held += len(messages)
        return deliveries

    async def _read_now(self, most: int) -> list[Delivery]:
        """What the driver has fetched already; it does not wait."""
        if self._polling is not None or not self.membership.steady:
            return []
        messages: list[FetchedMessage] = []
        try:
            for partition, records in await self.membership.poll(most, 0.0):
                messages += self._accept(partition, records)
        except DRIVER_ERRORS as error:
            raise self._lost(error) from error
        return self._deliver(messages)

    async def _wait(self, free: int, seconds: float) -> None:
        """Wait for a record, or for news of any other kind; safe to cancel."""
        if free > 0 and self._polling is None:
            self._polling = asyncio.create_task(
                self._poll(free, seconds), name=f"qkit kafka {self.group} poll"
            )
            self._polling.add_done_callback(self._polled)
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _poll(self, most: int, seconds: float) -> None:
        for partition, records in await self.membership.poll(most, seconds):
            self._waiting += self._accept(partition, records)

    def _polled(self, polling: asyncio.Task[None]) -> None:
        self._polling = None
        if not polling.cancelled() and (error := polling.exception()) is not None:
            self.membership.fail(self._lost(error))
        self._wake()

    def _accept(self, partition: Partition, records: list[KafkaRecord]) -> list[FetchedMessage]:
        """Turn what was read into messages, in the order of the log."""
        tracker = self.membership.trackers[partition]
        group = self._group
        messages: list[FetchedMessage] = []
        for found in records:
            offset = found.offset
            if offset < tracker.end:
                self.membership.fail(self._lost(LookupError("the topic was made anew")))
                return []
            if tracker.is_settled(offset):
                tracker.skip_to(offset + 1)
                continue
            envelope, attributes = codec.decode(found)
            if attributes.removed is not None or (
                group is not None and not codec.for_group(envelope, group)
            ):
                tracker.skip_to(offset + 1)
                continue
            message = FetchedMessage(tracker, partition, offset, envelope, attributes)
            tracker.read(offset, message)
            messages.append(message)
        if not messages:
            self.membership.settled(tracker)  # all of it was for others
        return messages

    def _is_due(self, message: FetchedMessage) -> None:
        self._waiting.append(message)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        if self.membership.broken is not None:
            self._retry_consumer.assign({})
        polling = self._polling
        if polling is not None and not self.membership.steady:
            polling.cancel()  # it would return what was read before the rebalance

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """The work is done; the commit follows, with those of others."""
        message = self._message(delivery, "ack")
        delivery.receipt = None
        self._settle(message)

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Give the message back with the envelope's headers, after ``delay`` seconds."""
        message = self._message(delivery, "release")
        delivery.receipt = None
        unchanged = delay <= 0 and not count_attempt
        if unchanged and not self._stopped:
            self._forget(message)
            self._put_back(message)
            return
        if unchanged and message.envelope.key is not None:
            self._leave_in_log(message)
            return
        try:
            await self._send_back([message], delay, count_attempt=count_attempt)
        except BaseException:  # there may be a copy, and there must not be none
            self._leave_in_log(message)
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY_DELAY_SECONDS, self._deliver_again, message, count_attempt)
            raise
        self._settle(message)

    def _leave_in_log(self, message: FetchedMessage) -> None:
        """Nobody works on it, and it is not settled: the mark stays before it."""
        if not message.tracker.lost:
            self._forget(message)
            self.membership.settled(message.tracker)  # perhaps others wait for its partition

    def _deliver_again(self, message: FetchedMessage, count_attempt: bool) -> None:
        message.envelope.attempt += count_attempt
        self._put_back(message)

    def _put_back(self, message: FetchedMessage) -> None:
        """Let a message be delivered next, after those that lie before it in its partition."""
        place = 0
        for number, other in enumerate(self._waiting, 1):
            if other.tracker is message.tracker and other.offset < message.offset:
                place = number
        self._waiting.insert(place, message)
        self._wake()

    async def _send_back(
        self, messages: list[FetchedMessage], delay: float, *, count_attempt: bool
    ) -> None:
        """A copy in the retry topic first, then it may be settled here."""
        now = self._clock.time()
        due = now + delay if delay > 0 else None
        records: list[OutgoingRecord] = []
        for message in messages:
            envelope = message.envelope
            if self._group is not None:
                headers = {**envelope.headers, GROUP: self._group}
                envelope = Envelope(
                    envelope.id, envelope.body, headers, envelope.key,
                    expires_at=envelope.expires_at, attempt=envelope.attempt,
                )  # fmt: skip
            deliveries = envelope.attempt - (not count_attempt)
            sent = retry_record(envelope, deliveries, due, now, message.attributes)
            records.append(sent._replace(partition=self._idle_tier()) if due is None else sent)
        for result in await self._publisher.send(self._retry, records, "release"):
            if not isinstance(result, RecordMetadata):
                raise result

    def _idle_tier(self) -> int:
        """A tier of which this consumer holds nothing, so that it can go to another at once."""
        busy = {
            partition.partition
            for partition, tracker in self.membership.trackers.items()
            if partition.topic == self._retry and tracker.held
        }
        return next((tier for tier in range(TIERS) if tier not in busy), 0)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Kafka has no leases: a message is this consumer's while it has the partition."""
        raise Unsupported(
            "Kafka has no leases to extend",
            backend=BACKEND,
            operation="extend",
            queue=delivery.queue,
        )

    def _message(self, delivery: Delivery, operation: str) -> FetchedMessage:
        message = delivery.receipt_of(FetchedMessage, BACKEND, operation)
        if not message.held:
            raise delivery.settled_before(BACKEND, operation)
        if message.tracker.lost:
            raise AckDeadlineExceeded(
                "the partition of this message went to another consumer, which handles it again: "
                "make handlers shorter than half the session, or run fewer rebalances",
                backend=BACKEND,
                operation=operation,
                queue=delivery.queue,
                message_id=delivery.envelope.id,
            )
        return message

    def _settle(self, message: FetchedMessage) -> None:
        if message.tracker.lost:
            return  # it went to another while the copy was written
        message.tracker.settle(message.offset)
        self._forget(message)
        self.membership.settled(message.tracker)

    def _forget(self, message: FetchedMessage) -> None:
        message.held = None
        message.tracker.held -= 1
        self._held -= 1
        self._news.set()

    # Partitions come and go

    def _moved(self) -> None:
        self._held = sum(tracker.held for tracker in self.membership.trackers.values())
        if not self._stopped:
            tiers: dict[Partition, OffsetTracker] = {
                partition: tracker
                for partition, tracker in self.membership.trackers.items()
                if partition.topic == self._retry
            }
            self._retry_consumer.assign(tiers)

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        """Call ``callback`` with what is held of partitions that went to others."""
        self._loss_callbacks.append(callback)

    def on_settlement(self, callback: Callable[[str, Exception | None], None]) -> None:
        """Call ``callback`` when acks cannot be committed, and when that is over."""
        self._settlement_callbacks.append(callback)

    def _committed(self, error: Exception | None) -> None:
        for callback in self._settlement_callbacks:
            callback("acknowledgements cannot be committed", error)

    def _report(self, trackers: list[OffsetTracker]) -> None:
        lost = [message.held for message in _messages(trackers) if message.held is not None]
        if lost:
            for callback in self._loss_callbacks:
                callback(lost)

    def purge(self, ends: dict[Partition, int]) -> int:
        """Let go of everything before these offsets that nobody works on; return how many left."""
        kept = 0
        for partition, tracker in self.membership.trackers.items():
            end = ends.get(partition, 0)
            for offset, message in list(tracker.pending.items()):
                if offset < end and isinstance(message, FetchedMessage) and not message.held:
                    tracker.settle(offset)
            kept += len(tracker.pending)
            self.membership.skip_to(partition, max(tracker.end, end))
            self.membership.settled(tracker)
        self._moved()
        return kept

    @property
    def held(self) -> list[FetchedMessage]:
        """What somebody works on."""
        return [message for message in _messages(self.membership.trackers.values()) if message.held]

    def origin_of(self, envelope: Envelope) -> Origin | None:
        """Where a message that is held here lay at first; a dead letter tells it."""
        for message in self.held:
            if message.envelope.body is envelope.body and message.envelope.id == envelope.id:
                return message.attributes.origin
        return None

    def _lost(self, error: BaseException) -> QueueError:
        if isinstance(error, LookupError):
            return subscription_broke(BACKEND, self.queue, str(error), error)
        return lost(error, self.queue)

    # The end

    async def stop(self) -> None:
        """Fetch no more and let others have what nobody here works on; acks still count."""
        if self._stopped:
            return
        self._stopped = True
        self._wake()
        await self._cancel_polling()
        await self._retry_consumer.stop()
        await self._pass_on()
        if self._held:
            self.membership.give_up_idle_partitions()
        else:
            await self.membership.leave()

    async def _pass_on(self) -> None:
        """What was read and not begun goes on, where a message that is held keeps its partition.

        What has a key keeps its place behind the one that is held.
        """
        messages = [
            message
            for message in self._waiting
            if message.tracker.held and message.pending and message.envelope.key is None
        ]
        if not messages:
            return
        try:
            with translate_errors("release", self.queue):
                await self._send_back(messages, 0.0, count_attempt=False)
        except QueueError as error:  # they stay in the log, for whoever has the partition next
            logger.warning("%s: messages could not be passed on: %s", self.queue, error)
            return
        for message in messages:
            message.tracker.settle(message.offset)
            self.membership.settled(message.tracker)

    async def _cancel_polling(self) -> None:
        if self._polling is not None:
            await cancel_and_wait([self._polling])

    async def leave(self) -> None:
        """Stop, commit, leave the group; what is not settled comes again to others."""
        try:
            await self._cancel_polling()
        finally:
            self._stopped = True
            try:
                await self._retry_consumer.stop()
            finally:
                await self.membership.leave()
                self._committed(None)  # what was not committed is delivered again


def _messages(trackers: Iterable[OffsetTracker]) -> Iterator[FetchedMessage]:
    """What was read of these partitions and is not settled."""
    for tracker in trackers:
        for message in tracker.pending.values():
            if isinstance(message, FetchedMessage):
                yield message
