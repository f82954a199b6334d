"""Consumer of a channel's retry topic, which holds delayed and retried messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
from qkit._internal.text import error_text
from qkit.backends.kafka import codec, driver
from qkit.backends.kafka.codec import KafkaRecord, RecordAttributes
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Consumer, Partition
from qkit.backends.kafka.errors import DRIVER_ERRORS
from qkit.backends.kafka.fetched_message import FetchedMessage
from qkit.backends.kafka.offsets import OffsetTracker
from qkit.backends.kafka.publisher import OutgoingRecord, Publisher, RecordMetadata
from qkit.backends.kafka.retry_tiers import DueHeap, leaves_tier_at, tier_of
from qkit.errors import QueueError
from qkit.message import GROUP, Envelope

__all__ = ["RetryTopicConsumer", "retry_record"]

READ_AHEAD: Final = 1_000  # maximum number of records per tier in memory
MAX_POLL_SECONDS: Final = 5.0
RETRY_DELAY_SECONDS: Final = 1.0  # after a failed read, or a failed write of due messages


def retry_record(
    envelope: Envelope, deliveries: int, due: float | None, now: float, attributes: RecordAttributes
) -> OutgoingRecord:
    """Return the record of a message for the retry topic; its tier depends on the remaining delay.

    Args:
        envelope: The message.
        deliveries: Number of deliveries so far.
        due: Time at which the message is due, in seconds since the epoch; ``None`` for now.
        now: Current time in seconds since the epoch.
        attributes: Attributes of the record; ``due`` replaces ``not_before``.
    """
    tier = tier_of(due - now) if due is not None else 0
    key, value, headers = codec.encode(
        envelope, deliveries=deliveries, attributes=attributes._replace(not_before=due)
    )
    return OutgoingRecord(key, value, headers, tier)


class RetryTopicConsumer:
    """Consumer of the tiers that are assigned to one subscription.

    The tiers are assigned and committed through the consumer group of the channel. They are read by
    a separate driver consumer without a group, because waiting for records of idle tiers would
    delay fetches of the channel.

    Args:
        parameters: Connection parameters.
        publisher: Publisher for messages that move to a lower tier.
        topic: Name of the retry topic.
        ordered_topic: Topic of the channel if the subscription is ordered: each message that is due
            is written there, to the partition of its key. ``None`` to call ``on_due`` instead.
        group: Name of the topic's group; ``None`` for a queue.
        clock: Clock of the service.
        on_due: Called with each message that is due.
        on_settled: Called with the tracker of a tier when a record was written elsewhere.
        on_task_done: Done callback of the background task.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        publisher: Publisher,
        *,
        topic: str,
        ordered_topic: str | None,
        group: str | None,
        clock: Clock,
        on_due: Callable[[FetchedMessage], None],
        on_settled: Callable[[OffsetTracker], None],
        on_task_done: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._parameters = parameters
        self._publisher = publisher
        self._topic = topic
        self._ordered_topic = ordered_topic
        self._group = group
        self._clock = clock
        self._on_due = on_due
        self._on_settled = on_settled
        self._on_task_done = on_task_done
        self._consumer: Any = None
        self._trackers: dict[Partition, OffsetTracker] = {}
        self._due: DueHeap[FetchedMessage] = DueHeap()
        self._assigned = asyncio.Event()  # set when the consumer must seek before the next read
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect and start the background task, which reads when tiers are assigned."""
        self._consumer = driver.disable_topic_creation(
            Consumer(
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                **self._parameters.options(),
            )
        )
        async with asyncio.timeout(self._parameters.timeout):
            await self._consumer.start()
        self._task = asyncio.create_task(self._run(), name=f"qkit kafka {self._topic}")
        self._task.add_done_callback(self._on_task_done)

    async def stop(self) -> None:
        """Stop reading and disconnect; messages that are not due remain in the retry topic."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait([task])
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await driver.close_consumer(consumer)

    def assign(self, trackers: Mapping[Partition, OffsetTracker]) -> None:
        """Set the tiers to read; each is read from the position of its tracker."""
        self._trackers = dict(trackers)
        self._assigned.set()

    async def _run(self) -> None:
        while True:
            try:
                if self._assigned.is_set():
                    self._assigned.clear()
                    self._seek()
                for tracker, records in await self._poll():
                    for found in records:
                        self._read(tracker, found)
                await self._process_due()
            except driver.errors.UnsupportedCodecError:
                raise  # a retry cannot succeed, so the subscription ends
            except DRIVER_ERRORS as error:
                logger.warning("%s: could not read; retrying: %r", self._topic, error)
                self._assigned.set()  # seek again: the driver may have dropped fetched records
                await asyncio.sleep(RETRY_DELAY_SECONDS)

    def _seek(self) -> None:
        self._consumer.assign(list(self._trackers))
        for partition, tracker in self._trackers.items():
            self._consumer.seek(partition, tracker.end)

    async def _poll(self) -> list[tuple[OffsetTracker, Sequence[KafkaRecord]]]:
        """Return the next records; return none as soon as a message is due or tiers are assigned.

        An early return loses no records.
        """
        trackers = self._trackers  # ``assign`` may replace the attribute during this poll
        due = self._due.next_at
        seconds = MAX_POLL_SECONDS
        if due is not None:
            seconds = min(seconds, max(0.0, due - self._clock.time()))
        assigned = asyncio.ensure_future(self._assigned.wait())
        polling: asyncio.Task[Any] | None = None
        try:
            waits: set[asyncio.Future[Any]] = {assigned}
            if trackers:
                self._limit_read_ahead()
                milliseconds = round(seconds * 1000)
                polling = asyncio.create_task(
                    self._consumer.getmany(timeout_ms=milliseconds, max_records=READ_AHEAD),
                    name=f"qkit kafka {self._topic} poll",
                )
                waits.add(polling)
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            assigned.cancel()
            if polling is not None and not polling.done():
                await cancel_and_wait([polling])
        if polling is None or polling.cancelled():
            return []
        found = polling.result()
        return [
            (trackers[partition], records)
            for partition, records in found.items()
            if partition in trackers
        ]

    def _limit_read_ahead(self) -> None:
        """Pause tiers with ``READ_AHEAD`` pending records; resume them below half of that."""
        for partition, tracker in self._trackers.items():
            full = len(tracker.pending) >= READ_AHEAD
            paused = partition in self._consumer.paused()
            if full and not paused:
                self._consumer.pause(partition)
            elif paused and len(tracker.pending) < READ_AHEAD // 2:
                self._consumer.resume(partition)

    def _read(self, tracker: OffsetTracker, found: KafkaRecord) -> None:
        if found.offset < tracker.end or tracker.lost:
            return
        if tracker.is_settled(found.offset):
            tracker.skip_to(found.offset + 1)
            return
        envelope, attributes = codec.decode(found)
        if attributes.removed is not None or (
            self._group is not None and not codec.for_group(envelope, self._group)
        ):
            tracker.skip_to(found.offset + 1)
            return
        partition = Partition(found.topic, found.partition)
        message = FetchedMessage(tracker, partition, found.offset, envelope, attributes)
        tracker.read(found.offset, message)
        written_at = found.timestamp / 1000
        due = attributes.not_before
        if due is None:  # the clock of the sender may be ahead
            leaves = min(written_at, self._clock.time())
        else:
            leaves = leaves_tier_at(found.partition, written_at, due)
        self._due.add(leaves, message)

    async def _process_due(self) -> None:
        """Deliver messages that are due; move the others that leave their tier to a lower tier."""
        now = self._clock.time()
        due: list[FetchedMessage] = []
        to_move: list[FetchedMessage] = []
        for message in self._due.pop_due(now):
            if not message.pending:
                continue  # the message was purged, or the tier was lost
            not_before = message.attributes.not_before
            (due if not_before is None or not_before <= now else to_move).append(message)
        if self._ordered_topic is None:
            for message in due:
                self._on_due(message)
        elif due:
            await self._write_to_channel(self._ordered_topic, due)
        if to_move:
            records = [self._next_record(message, now) for message in to_move]
            for message, _ in await self._move(self._topic, to_move, records):
                self._due.add(now + RETRY_DELAY_SECONDS, message)

    async def _write_to_channel(self, topic: str, due: list[FetchedMessage]) -> None:
        """Write messages that are due to the channel's topic, each to the partition of its key.

        If a write fails, wait before the next write, so that no later message of the same key is
        written first.
        """
        records = [self._record(message) for message in due]
        failed = await self._move(topic, due, records)
        if not failed:
            return
        logger.warning(
            "%s: could not write %d messages that are due to the topic; retrying in %.0f s: %s",
            topic,
            len(failed),
            RETRY_DELAY_SECONDS,
            error_text(failed[0][1]),
        )
        for message, _ in failed:
            self._due.add(message.attributes.not_before or 0.0, message)
        await asyncio.sleep(RETRY_DELAY_SECONDS)

    async def _move(
        self, topic: str, messages: list[FetchedMessage], records: list[OutgoingRecord]
    ) -> list[tuple[FetchedMessage, QueueError]]:
        """Write the records of messages to a topic and settle these; return those that failed."""
        results: Sequence[RecordMetadata | QueueError]
        try:
            results = await self._publisher.send(topic, records, "release")
        except QueueError as error:
            results = [error] * len(messages)
        failed: list[tuple[FetchedMessage, QueueError]] = []
        for message, result in zip(messages, results, strict=True):
            if isinstance(result, RecordMetadata):
                message.tracker.settle(message.offset)
                self._on_settled(message.tracker)
            else:
                failed.append((message, result))
        return failed

    def _next_record(self, message: FetchedMessage, now: float) -> OutgoingRecord:
        """Return the record of a message for the next tier."""
        envelope = self._addressed(message)
        return retry_record(
            envelope, envelope.attempt - 1, message.attributes.not_before, now, message.attributes
        )

    def _record(self, message: FetchedMessage) -> OutgoingRecord:
        """Return the record of a message for the channel's topic."""
        envelope = self._addressed(message)
        attributes = message.attributes._replace(not_before=None)
        return OutgoingRecord(
            *codec.encode(envelope, deliveries=envelope.attempt - 1, attributes=attributes)
        )

    def _addressed(self, message: FetchedMessage) -> Envelope:
        """Return the envelope, addressed to the group: each group of a topic moves its own copy."""
        if self._group is not None:
            message.envelope.headers[GROUP] = self._group
        return message.envelope
