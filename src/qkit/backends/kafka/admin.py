"""Administration of topics: statistics, peek, purge, remove and delete."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qkit.backend import QueueStats
from qkit.backends.kafka import codec, driver
from qkit.backends.kafka.cluster import Cluster, not_found
from qkit.backends.kafka.codec import KafkaRecord, RecordAttributes
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.names import TopicNames
from qkit.backends.kafka.offsets import CommittedOffset, OffsetTracker, count_unsettled
from qkit.backends.kafka.publisher import OutgoingRecord, Publisher, RecordMetadata
from qkit.backends.kafka.reader import PartitionReader
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import QueueError
from qkit.message import GROUP, Envelope

__all__ = ["KafkaAdmin"]


class _Message(NamedTuple):
    """Message in the log, with its position and the time at which it was written."""

    partition: Partition
    offset: int
    written_at: float
    envelope: Envelope
    attributes: RecordAttributes


@dataclass(slots=True)
class _Log:
    """Offset ranges of the partitions of a channel and, unless excluded, of its retry topic.

    Attributes:
        begins: First offset of each partition.
        ends: Offset after the last record of each partition.
        removed: Offsets of removed messages and of the markers that hide them.
    """

    begins: dict[Partition, int] = field(default_factory=dict[Partition, int])
    ends: dict[Partition, int] = field(default_factory=dict[Partition, int])
    removed: dict[Partition, set[int]] = field(default_factory=dict[Partition, set[int]])


class KafkaAdmin:
    """Implementation of ``Admin`` for Kafka.

    Args:
        cluster: Client for metadata, offsets and groups.
        reader: Reader of messages, without a consumer group.
        publisher: Publisher of the markers that hide removed messages.
        names: Names of topics and groups.
        subscriptions: The open subscriptions of this backend.
        is_topic: Returns whether this backend declared a channel as a topic.
    """

    def __init__(
        self,
        cluster: Cluster,
        reader: PartitionReader,
        publisher: Publisher,
        names: TopicNames,
        subscriptions: Collection[KafkaSubscription],
        *,
        is_topic: Callable[[str], bool],
    ) -> None:
        self._cluster = cluster
        self._reader = reader
        self._publisher = publisher
        self._names = names
        self._subscriptions = subscriptions
        self._is_topic = is_topic

    # Statistics

    async def stats(self, queue: str) -> QueueStats:
        """Return the statistics of a channel, summed over its groups.

        The depth is the lag of the groups, without messages in the retry topic. Those count as
        scheduled. Messages in flight are unknown if another process consumes; the depth then
        includes them.
        """
        log = await self._log(queue, "stats")
        depth = scheduled = consumers = held = local_consumers = 0
        for group in await self._groups(queue):
            marks = await self._marks(group, queue)
            for partition, end in log.ends.items():
                mark = marks.get(partition, CommittedOffset(log.begins[partition]))
                count = count_unsettled(mark, log.begins[partition], end)
                if partition.topic == queue:
                    removed = log.removed.get(partition, ())
                    depth += count - sum(1 for offset in removed if offset >= mark.offset)
                else:
                    scheduled += count
            consumers += await self._cluster.members(group)
            local = self._local(group)
            local_consumers += len(local)
            for tracker, is_ready in self._trackers(local, queue):
                held += tracker.held
                depth -= tracker.held if is_ready else 0
                scheduled -= 0 if is_ready else tracker.held
        # Other processes do not report their messages in flight.
        known = consumers == local_consumers
        return QueueStats(
            queue=queue,
            depth=max(0, depth if known else depth + held),
            scheduled=max(0, scheduled),
            consumers=consumers,
            in_flight=held if known else None,
        )

    # Reading

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages, oldest first over all partitions, delayed ones last."""
        log = await self._log(queue, "peek")
        ready: list[_Message] = []
        scheduled: list[_Message] = []
        for group, name in (await self._groups(queue)).items():
            marks = await self._marks(group, queue)
            held = {
                (item.partition, item.offset) for each in self._local(group) for item in each.held
            }
            for message in await self._read(log, marks, "peek", limit):
                if name is not None:
                    message.envelope.headers[GROUP] = name
                if (message.partition, message.offset) in held:
                    continue
                (ready if message.partition.topic == queue else scheduled).append(message)
        ready.sort(key=lambda message: message.written_at)
        scheduled.sort(key=lambda message: message.attributes.not_before or 0.0)
        return [message.envelope for message in (*ready, *scheduled)][:limit]

    async def _read(
        self,
        log: _Log,
        marks: dict[Partition, CommittedOffset],
        operation: str,
        limit: int | None = None,
    ) -> list[_Message]:
        """Return the unsettled messages of a group.

        With ``limit``, at least that many of each partition are returned if it has them.
        """
        ranges: dict[Partition, tuple[int, int]] = {}
        trackers: dict[Partition, OffsetTracker] = {}
        hidden = 0
        for partition, end in log.ends.items():
            mark = marks.get(partition, CommittedOffset(log.begins[partition]))
            first = max(mark.offset, log.begins[partition])
            ranges[partition] = first, end
            trackers[partition] = OffsetTracker(mark.offset, mark.metadata)
            settled = end - first - count_unsettled(mark, log.begins[partition], end)
            hidden = max(hidden, settled + 2 * len(log.removed.get(partition, ())))
        read_limit = None if limit is None else limit + hidden
        found: list[_Message] = []
        for item in await self._reader.read(ranges, operation, read_limit):
            partition = Partition(item.topic, item.partition)
            if trackers[partition].is_settled(item.offset):
                continue
            if item.offset not in log.removed.get(partition, ()):
                found.append(_message(partition, item))
        return found

    # Deleting

    async def purge(self, queue: str) -> int:
        """Delete the messages that are not in flight in this process; return how many.

        A consumer in another process still handles the messages that it has already read.
        """
        before = await self.stats(queue)
        log = await self._log(queue, "purge")
        deletable = dict(log.ends)
        for group in await self._groups(queue):
            for each in self._local(group):
                each.purge(log.ends)
                for partition, tracker in each.membership.trackers.items():
                    if partition in deletable and tracker.pending:
                        deletable[partition] = min(deletable[partition], *tracker.pending)
        await self._cluster.delete_records(
            {partition: end for partition, end in deletable.items() if end > log.begins[partition]}
        )
        held = 0 if before.in_flight is not None else self._held(queue)
        return max(0, before.depth + (before.scheduled or 0) - held)

    def _held(self, queue: str) -> int:
        return sum(len(each.held) for each in self._subscriptions if each.queue == queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Remove one message for each id; return how many were found.

        Kafka deletes records only from the beginning of a partition. A message after one that
        remains is hidden instead: a marker with its offset is appended to its partition.
        """
        log = await self._log(queue, "remove", include_retry=False)
        wanted = Counter(ids)
        removed: list[_Message] = []
        floors = dict(log.ends)  # first offset that remains, by partition
        for message in await self._read(log, {}, "remove"):
            if wanted[message.envelope.id] > 0:
                wanted[message.envelope.id] -= 1
                removed.append(message)
            else:
                floors[message.partition] = min(floors[message.partition], message.offset)
        hidden = [message for message in removed if message.offset > floors[message.partition]]
        if hidden:
            await self._mark(queue, hidden)
        await self._cluster.delete_records(
            {
                partition: floor
                for partition, floor in floors.items()
                if floor > log.begins[partition]
            }
        )
        return len(removed)

    async def _mark(self, queue: str, messages: list[_Message]) -> None:
        markers = [
            OutgoingRecord(*codec.marker(message.offset), message.partition.partition)
            for message in messages
        ]
        until: dict[int, int] = {}
        for result in await self._publisher.send(queue, markers, "remove"):
            if not isinstance(result, RecordMetadata):
                raise result
            until[result.partition] = max(until.get(result.partition, 0), result.offset + 1)
        await self._cluster.commit(self._names.markers(queue), queue, until)

    async def drop_oldest(self, queue: str, limit: int) -> list[Envelope]:
        """Delete the oldest messages of a dead-letter topic beyond ``limit``; return them."""
        log = await self._log(queue, "publish", include_retry=False)
        if any(log.removed.values()):
            messages = await self._read(log, {}, "publish")
        else:  # usual case: every offset is a message, so only the excess must be read
            excess = {
                partition: (log.begins[partition], max(log.begins[partition], end - limit))
                for partition, end in log.ends.items()
            }
            read = await self._reader.read(excess, "publish")
            messages = [_message(Partition(item.topic, item.partition), item) for item in read]
            limit = 0
        dropped = messages[: max(0, len(messages) - limit)]
        before: dict[Partition, int] = {}
        for message in dropped:
            before[message.partition] = message.offset + 1
        await self._cluster.delete_records(before)
        return [message.envelope for message in dropped]

    async def delete(self, queue: str) -> None:
        """Delete the topic, its retry topic, and its consumer groups with their commits."""
        if not await self._cluster.count_partitions(queue):
            raise not_found(queue, "delete")
        groups = [*await self._groups(queue), self._names.markers(queue)]
        topics = [queue]
        retry = self._names.retry(queue)
        if await self._cluster.count_partitions(retry):
            topics.append(retry)
        await self._cluster.delete(topics)
        with contextlib.suppress(QueueError):  # a group with members cannot be deleted
            await self._cluster.delete_groups(groups)

    # Offsets

    async def _log(self, queue: str, operation: str, *, include_retry: bool = True) -> _Log:
        if not await self._cluster.count_partitions(queue):
            raise not_found(queue, operation)
        topics = [queue]
        retry = self._names.retry(queue)
        if include_retry and await self._cluster.count_partitions(retry):
            topics.append(retry)
        log = _Log()
        for topic in topics:
            for target, which in ((log.begins, driver.EARLIEST), (log.ends, driver.LATEST)):
                for partition, offset in (await self._cluster.offsets(topic, which)).items():
                    target[Partition(topic, partition)] = offset
        await self._find_removed(queue, log, operation)
        return log

    async def _find_removed(self, queue: str, log: _Log, operation: str) -> None:
        """Fill ``log.removed`` from the markers, which end at the commit of the marker group."""
        marked = await self._cluster.committed(self._names.markers(queue), [queue])
        ranges = {
            partition: (log.begins[partition], saved.offset)
            for partition, saved in marked.items()
            if partition in log.begins
        }
        for item in await self._reader.read(ranges, operation):
            _, attributes = codec.decode(item)
            if attributes.removed is not None:
                partition = Partition(item.topic, item.partition)
                log.removed.setdefault(partition, set()).update((attributes.removed, item.offset))

    async def _groups(self, queue: str) -> dict[str, str | None]:
        found = self._names.groups(queue, await self._cluster.groups())
        queue_group = self._names.group(queue, None)
        if found == {queue_group: None} and self._is_topic(queue):
            return {}  # a topic without groups delivers no messages
        return found

    async def _marks(self, group: str, queue: str) -> dict[Partition, CommittedOffset]:
        """Return the commits of a group; those of local consumers include uncommitted acks."""
        marks = await self._cluster.committed(group, [queue, self._names.retry(queue)])
        for each in self._local(group):
            for partition, tracker in each.membership.trackers.items():
                marks[partition] = tracker.snapshot()
        return marks

    def _local(self, group: str) -> list[KafkaSubscription]:
        return [each for each in self._subscriptions if each.group == group and each.joined]

    def _trackers(
        self, local: list[KafkaSubscription], queue: str
    ) -> list[tuple[OffsetTracker, bool]]:
        return [
            (tracker, partition.topic == queue)
            for each in local
            for partition, tracker in each.membership.trackers.items()
        ]


def _message(partition: Partition, item: KafkaRecord) -> _Message:
    envelope, attributes = codec.decode(item)
    return _Message(partition, item.offset, item.timestamp / 1000, envelope, attributes)
