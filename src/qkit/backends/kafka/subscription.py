"""Subscription to a channel whose deliveries can be settled in any order."""

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
from qkit.backends.kafka.group import GroupMembership, GroupTimeouts, subscription_error
from qkit.backends.kafka.offsets import OffsetTracker
from qkit.backends.kafka.publisher import OutgoingRecord, Publisher, RecordMetadata
from qkit.backends.kafka.retry_tiers import TIERS
from qkit.backends.kafka.retry_topic import RetryTopicConsumer, retry_record
from qkit.errors import AckDeadlineExceeded, QueueError, Unsupported
from qkit.message import GROUP, Envelope

__all__ = ["KafkaSubscription"]

MAX_WAIT_SECONDS: Final = 5.0
RETRY_DELAY_SECONDS: Final = 1.0  # until redelivery if a released message could not be copied


class KafkaSubscription:
    """Subscription with at most ``prefetch`` unsettled deliveries.

    A message that is released without a delay and without counting the attempt stays in memory and
    is delivered next. After ``stop``, such a message is copied to the retry topic for other
    consumers. A message with a key is not copied, because it could then overtake an earlier message
    with the same key. It stays at its position in the log.

    An ordered subscription neither delivers from the retry topic nor writes releases to it. Delayed
    messages that are due are written to the channel's topic, to the partition of their key. A
    released message stays in memory, and after ``stop`` at its position in the log.

    Args:
        parameters: Connection parameters.
        cluster: Client for topics, offsets and commits.
        publisher: Publisher for released messages, which go to the retry topic.
        spec: Channel, group, prefetch and order to consume with.
        group: Id of the consumer group.
        retry: Retry topic of the channel.
        timeouts: Timeouts of the group member.
        batch: Settled messages per commit; ``None`` commits as soon as possible.
        clock: Clock of the service.
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
        self.queue: str = spec.queue
        self.group = group
        self._group = spec.group if spec.broadcast else None
        self._retry = retry
        self._prefetch = spec.prefetch
        self._ordered = spec.ordered
        self._hold_until = 0.0  # monotonic time before which an ordered subscription delivers none
        self._publisher = publisher
        self._clock = clock
        self._held = 0
        self._waiting: deque[FetchedMessage] = deque()  # for the next ``receive``
        self._polling: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set when a waiting ``receive`` must check the state again
        self._stopped = False
        self._loss_callbacks: list[Callable[[Sequence[Delivery]], None]] = []
        self._settlement_callbacks: list[Callable[[str, Exception | None], None]] = []
        self.membership: GroupMembership = GroupMembership(
            parameters,
            cluster,
            group=group,
            topic=spec.queue,
            retry=retry,
            from_end=spec.broadcast,
            timeouts=timeouts,
            batch=batch,
            on_rebalanced=self._on_rebalanced,
            on_lost=self._report_lost,
            on_change=self._wake,
            on_commit=self._report_commit,
        )
        self._retry_consumer = RetryTopicConsumer(
            parameters,
            publisher,
            topic=retry,
            ordered_topic=spec.queue if spec.ordered else None,
            group=self._group,
            clock=clock,
            on_due=self._on_due,
            on_settled=self.membership.settled,
            on_task_done=self.membership.on_task_done,
        )

    @property
    def joined(self) -> bool:
        """Whether this consumer has joined its group and not left it."""
        return self.membership.joined

    async def open(self) -> None:
        """Join the group; return when this consumer has its first assignment."""
        await self._retry_consumer.start()
        await self.membership.join()

    # Receiving

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages and return up to ``limit`` deliveries.

        Return an empty list after ``MAX_WAIT_SECONDS`` without a message, and after ``stop``.

        Raises:
            SubscriptionLost: The topic was deleted, or the driver failed.
            ConfigError: The driver failed with an error that subscribing again does not fix.
        """
        deadline = self._clock.monotonic() + MAX_WAIT_SECONDS
        while not self._stopped:
            if self.membership.broken is not None:
                raise self.membership.broken
            self._changed.clear()
            free = min(limit, self._prefetch - self._held)
            held_for = self._hold_until - self._clock.monotonic() if self._hold_until else 0.0
            if held_for > 0:
                free = 0
            if free > 0:
                deliveries = self._take_waiting(free) or await self._read_fetched(free)
                if deliveries:
                    return deliveries
            seconds = deadline - self._clock.monotonic()
            if seconds <= 0:
                return []
            await self._wait(free, min(seconds, held_for) if held_for > 0 else seconds)
        return []

    def _take_waiting(self, limit: int) -> list[Delivery]:
        """Deliver messages in memory: released, due, or read in the background."""
        taken: list[FetchedMessage] = []
        while self._waiting and len(taken) < limit:
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

    async def _read_fetched(self, limit: int) -> list[Delivery]:
        """Deliver messages that the driver has already fetched, without waiting."""
        if self._polling is not None or not self.membership.stable:
            return []
        messages: list[FetchedMessage] = []
        try:
            for partition, records in await self.membership.poll(limit, 0.0):
                messages += self._accept(partition, records)
        except DRIVER_ERRORS as error:
            raise self._error(error) from error
        return self._deliver(messages)

    async def _wait(self, free: int, seconds: float) -> None:
        """Wait up to ``seconds`` for a record or another change; safe to cancel."""
        if free > 0 and self._polling is None:
            self._polling = asyncio.create_task(
                self._poll(free, seconds), name=f"qkit kafka {self.group} poll"
            )
            self._polling.add_done_callback(self._on_polled)
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _poll(self, limit: int, seconds: float) -> None:
        for partition, records in await self.membership.poll(limit, seconds):
            self._waiting += self._accept(partition, records)

    def _on_polled(self, polling: asyncio.Task[None]) -> None:
        self._polling = None
        if not polling.cancelled() and (error := polling.exception()) is not None:
            self.membership.fail(self._error(error))
        self._wake()

    def _accept(self, partition: Partition, records: list[KafkaRecord]) -> list[FetchedMessage]:
        """Convert fetched records to messages.

        Settled messages, markers and messages for other groups are skipped.
        """
        tracker = self.membership.trackers[partition]
        group = self._group
        messages: list[FetchedMessage] = []
        for found in records:
            offset = found.offset
            if offset < tracker.end:
                error = LookupError("the topic was deleted and created again")
                self.membership.fail(self._error(error))
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
            self.membership.settled(tracker)  # commit the skipped offsets
        return messages

    def _on_due(self, message: FetchedMessage) -> None:
        self._waiting.append(message)
        self._wake()

    def _wake(self) -> None:
        """Make a waiting ``receive`` check the state again."""
        self._changed.set()
        if self.membership.broken is not None:
            self._retry_consumer.assign({})
        polling = self._polling
        if polling is not None and not self.membership.stable:
            polling.cancel()  # it could return records from before the rebalance

    # Settling

    async def ack(self, delivery: Delivery) -> None:
        """Acknowledge a delivery; its offset is committed later, together with others.

        Raises:
            AckDeadlineExceeded: This consumer has lost the partition.
        """
        message = self._message(delivery, "ack")
        delivery.receipt = None
        self._settle(message)

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Release a delivery; the message is delivered again after ``delay`` seconds.

        Changes to the headers of the envelope are kept. If the message could not be copied to the
        retry topic, this consumer delivers it again after ``RETRY_DELAY_SECONDS``.

        On an ordered subscription, all other messages wait for ``delay`` too. After ``stop`` the
        message stays in the log, and the next consumer of the partition delivers it first, without
        a delay and with its old attempt.

        Raises:
            AckDeadlineExceeded: This consumer has lost the partition.
            QueueError: The message could not be copied to the retry topic.
        """
        message = self._message(delivery, "release")
        delivery.receipt = None
        unchanged = delay <= 0 and not count_attempt
        if not self._stopped and (unchanged or self._ordered):
            if delay > 0:
                self._hold_until = max(self._hold_until, self._clock.monotonic() + delay)
            self._end_delivery(message)
            self._deliver_again(message, count_attempt)
            return
        if self._ordered or (unchanged and message.envelope.key is not None):
            self._leave_in_log(message)
            return
        try:
            await self._copy_to_retry_topic([message], delay, count_attempt=count_attempt)
        except BaseException:  # the copy may not exist, so keep the original
            self._leave_in_log(message)
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY_DELAY_SECONDS, self._deliver_again, message, count_attempt)
            raise
        self._settle(message)

    def _leave_in_log(self, message: FetchedMessage) -> None:
        """End a delivery without settling the message, so that its offset is not committed."""
        if not message.tracker.lost:
            self._end_delivery(message)
            self.membership.settled(message.tracker)  # the partition may be ready to be given up

    def _deliver_again(self, message: FetchedMessage, count_attempt: bool) -> None:
        message.envelope.attempt += count_attempt
        self._put_back(message)

    def _put_back(self, message: FetchedMessage) -> None:
        """Queue a message for the next ``receive``, after earlier messages of its partition."""
        index = 0
        for following, other in enumerate(self._waiting, 1):
            if other.tracker is message.tracker and other.offset < message.offset:
                index = following
        self._waiting.insert(index, message)
        self._wake()

    async def _copy_to_retry_topic(
        self, messages: list[FetchedMessage], delay: float, *, count_attempt: bool
    ) -> None:
        """Copy messages to the retry topic; the caller then settles the originals."""
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
        """Return a tier that has no messages in flight here, so that it can move immediately."""
        busy = {
            partition.partition
            for partition, tracker in self.membership.trackers.items()
            if partition.topic == self._retry and tracker.held
        }
        return next((tier for tier in range(TIERS) if tier not in busy), 0)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Raise ``Unsupported``: a delivery has no lease and lasts as long as the assignment."""
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
                "this consumer has lost the partition of the message, and another consumer will "
                "receive it: keep handlers shorter than 10 s, or restart consumers less often",
                backend=BACKEND,
                operation=operation,
                queue=delivery.queue,
                message_id=delivery.envelope.id,
            )
        return message

    def _settle(self, message: FetchedMessage) -> None:
        if message.tracker.lost:
            return  # the partition was lost during the copy
        message.tracker.settle(message.offset)
        self._end_delivery(message)
        self.membership.settled(message.tracker)

    def _end_delivery(self, message: FetchedMessage) -> None:
        message.held = None
        message.tracker.held -= 1
        self._held -= 1
        self._changed.set()

    # Rebalances

    def _on_rebalanced(self) -> None:
        self._held = sum(tracker.held for tracker in self.membership.trackers.values())
        if not self._stopped:
            tiers: dict[Partition, OffsetTracker] = {
                partition: tracker
                for partition, tracker in self.membership.trackers.items()
                if partition.topic == self._retry
            }
            self._retry_consumer.assign(tiers)

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        """Call ``callback`` with the unsettled deliveries when partitions are lost."""
        self._loss_callbacks.append(callback)

    def on_settlement(self, callback: Callable[[str, Exception | None], None]) -> None:
        """Call ``callback`` after each commit, with a description and the error or ``None``."""
        self._settlement_callbacks.append(callback)

    def _report_commit(self, error: Exception | None) -> None:
        for callback in self._settlement_callbacks:
            callback("acks cannot be committed", error)

    def _report_lost(self, trackers: list[OffsetTracker]) -> None:
        lost = [message.held for message in _messages(trackers) if message.held is not None]
        if lost:
            for callback in self._loss_callbacks:
                callback(lost)

    def purge(self, ends: dict[Partition, int]) -> int:
        """Drop messages before ``ends`` that are not in flight; return how many remain."""
        kept = 0
        for partition, tracker in self.membership.trackers.items():
            end = ends.get(partition, 0)
            for offset, message in list(tracker.pending.items()):
                if offset < end and isinstance(message, FetchedMessage) and not message.held:
                    tracker.settle(offset)
            kept += len(tracker.pending)
            self.membership.skip_to(partition, max(tracker.end, end))
            self.membership.settled(tracker)
        self._on_rebalanced()
        return kept

    @property
    def held(self) -> list[FetchedMessage]:
        """Messages that are in flight."""
        return [message for message in _messages(self.membership.trackers.values()) if message.held]

    def origin_of(self, envelope: Envelope) -> Origin | None:
        """Return the origin of a message, for its dead letter; ``None`` if it is not in flight."""
        for message in self.held:
            if message.envelope.body is envelope.body and message.envelope.id == envelope.id:
                return message.attributes.origin
        return None

    def _error(self, error: BaseException) -> QueueError:
        if isinstance(error, LookupError):
            return subscription_broke(BACKEND, self.queue, str(error), error)
        return subscription_error(error, self.queue)

    # Stopping

    async def stop(self) -> None:
        """Stop fetching and give up messages that are not in flight; settling still works."""
        if self._stopped:
            return
        self._stopped = True
        self._wake()
        await self._cancel_polling()
        await self._retry_consumer.stop()
        await self._hand_over_waiting()
        if self._held:
            self.membership.hand_over_idle_partitions()
        else:
            await self.membership.leave()

    async def _hand_over_waiting(self) -> None:
        """Copy waiting messages to the retry topic if messages in flight keep their partition here.

        A message with a key is not copied, to keep its order. It stays in the log. An ordered
        subscription copies none.
        """
        if self._ordered:
            return
        messages = [
            message
            for message in self._waiting
            if message.tracker.held and message.pending and message.envelope.key is None
        ]
        if not messages:
            return
        try:
            with translate_errors("release", self.queue):
                await self._copy_to_retry_topic(messages, 0.0, count_attempt=False)
        except QueueError as error:  # the next consumer of the partition reads them from the log
            logger.warning(
                "%s: could not copy waiting messages to the retry topic; they stay in the log: %s",
                self.queue,
                error,
            )
            return
        for message in messages:
            message.tracker.settle(message.offset)
            self.membership.settled(message.tracker)

    async def _cancel_polling(self) -> None:
        if self._polling is not None:
            await cancel_and_wait([self._polling])

    async def leave(self) -> None:
        """Stop fetching, commit and leave the group; unsettled messages are delivered again."""
        try:
            await self._cancel_polling()
        finally:
            self._stopped = True
            try:
                await self._retry_consumer.stop()
            finally:
                await self.membership.leave()
                self._report_commit(None)  # clear a reported commit error


def _messages(trackers: Iterable[OffsetTracker]) -> Iterator[FetchedMessage]:
    """Yield the pending messages of these trackers."""
    for tracker in trackers:
        for message in tracker.pending.values():
            if isinstance(message, FetchedMessage):
                yield message
