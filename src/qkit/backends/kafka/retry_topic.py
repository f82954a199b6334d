"""Consumer of a channel's retry topic: reads ahead, delivers or sends on when due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
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

READ_AHEAD: Final = 1_000  # records of a tier that wait in memory; the others wait in the log
MAX_POLL_SECONDS: Final = 5.0
RETRY_DELAY_SECONDS: Final = 1.0  # until a hop that failed is tried again


def retry_record(
    envelope: Envelope, deliveries: int, due: float | None, now: float, attributes: RecordAttributes
) -> OutgoingRecord:
    """A record for the retry topic, in the tier where it waits next."""
    tier = tier_of(due - now) if due is not None else 0
    key, value, headers = codec.encode(
        envelope, deliveries=deliveries, attributes=attributes._replace(not_before=due)
    )
    return OutgoingRecord(key, value, headers, tier)


class RetryTopicConsumer:
    """Reads the tiers that this consumer has, and gives ``ready`` what is due.

    The group decides who has which tier, and keeps what is settled of it; reading is done by a
    consumer without a group, so that idle tiers never hold up the channel itself.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        publisher: Publisher,
        *,
        topic: str,
        group: str | None,
        clock: Clock,
        ready: Callable[[FetchedMessage], None],
        settled: Callable[[OffsetTracker], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._parameters = parameters
        self._publisher = publisher
        self._topic = topic
        self._group = group  # none: a queue has one
        self._clock = clock
        self._ready = ready
        self._settled = settled
        self._ended = ended
        self._consumer: Any = None
        self._trackers: dict[Partition, OffsetTracker] = {}
        self._due: DueHeap[FetchedMessage] = DueHeap()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect; reads once tiers are assigned."""
        self._consumer = driver.create_nothing(
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
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Read no more; what waits is left in the log for whoever has the tier next."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait([task])
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await driver.close_consumer(consumer)

    def assign(self, trackers: Mapping[Partition, OffsetTracker]) -> None:
        """These tiers are ours now; those that were before go on where they were."""
        self._trackers = dict(trackers)
        self._moved.set()

    async def _run(self) -> None:
        while True:
            try:
                if self._moved.is_set():
                    self._moved.clear()
                    self._seek()
                for tracker, records in await self._poll():
                    for found in records:
                        self._read(tracker, found)
                await self._let_go()
            except driver.errors.UnsupportedCodecError:
                raise  # trying again does not help: the subscription ends with it
            except DRIVER_ERRORS as error:
                logger.warning("%s: could not be read, trying again: %r", self._topic, error)
                self._moved.set()  # the driver may have dropped what it had read: read it again
                await asyncio.sleep(RETRY_DELAY_SECONDS)

    def _seek(self) -> None:
        self._consumer.assign(list(self._trackers))
        for partition, tracker in self._trackers.items():
            self._consumer.seek(partition, tracker.end)

    async def _poll(self) -> list[tuple[OffsetTracker, Sequence[KafkaRecord]]]:
        """Records, or nothing when something is due or was assigned; no record is lost by that."""
        trackers = self._trackers  # what is found belongs to those who asked, not to their heirs
        due = self._due.next_at
        seconds = MAX_POLL_SECONDS
        if due is not None:
            seconds = min(seconds, max(0.0, due - self._clock.time()))
        moved = asyncio.ensure_future(self._moved.wait())
        polling: asyncio.Task[Any] | None = None
        try:
            waits: set[asyncio.Future[Any]] = {moved}
            if trackers:
                self._hold_back()
                milliseconds = round(seconds * 1000)
                polling = asyncio.create_task(
                    self._consumer.getmany(timeout_ms=milliseconds, max_records=READ_AHEAD),
                    name=f"qkit kafka {self._topic} poll",
                )
                waits.add(polling)
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
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

    def _hold_back(self) -> None:
        """Read a tier on only while little of it waits here."""
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
        now = self._clock.time()
        if attributes.not_before is None or attributes.not_before <= now:
            self._ready(message)
        else:
            leaves = leaves_tier_at(found.partition, found.timestamp / 1000, attributes.not_before)
            self._due.add(leaves, message)

    async def _let_go(self) -> None:
        """Deliver what is due; what has only sat out its tier hops to a lower one."""
        now = self._clock.time()
        hops: list[FetchedMessage] = []
        for message in self._due.pop_due(now):
            if not message.pending:
                continue  # it was purged, or whoever has the tier now reads it again
            if message.attributes.not_before is None or message.attributes.not_before <= now:
                self._ready(message)
            else:
                hops.append(message)
        if hops:
            await self._hop(hops, now)

    async def _hop(self, messages: list[FetchedMessage], now: float) -> None:
        records = [self._next_stop(message, now) for message in messages]
        try:
            results = await self._publisher.send(self._topic, records, "release")
        except QueueError as error:
            results = [error] * len(messages)
        for message, result in zip(messages, results, strict=True):
            if isinstance(result, RecordMetadata):
                message.tracker.settle(message.offset)
                self._settled(message.tracker)
            else:
                self._due.add(now + RETRY_DELAY_SECONDS, message)

    def _next_stop(self, message: FetchedMessage, now: float) -> OutgoingRecord:
        if self._group is not None:  # every group of a topic sends its own copy on
            message.envelope.headers[GROUP] = self._group
        envelope = message.envelope
        return retry_record(
            envelope, envelope.attempt - 1, message.attributes.not_before, now, message.attributes
        )
