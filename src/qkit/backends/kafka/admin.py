"""Administration: how much waits, what it is, and how to be rid of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qkit.backend import QueueStats
from qkit.backends.kafka import codec, driver
from qkit.backends.kafka.cluster import Cluster, not_found
from qkit.backends.kafka.codec import Facts, KafkaRecord
from qkit.backends.kafka.driver import TopicPartition
from qkit.backends.kafka.names import Names
from qkit.backends.kafka.offsets import Saved, Tracker, left
from qkit.backends.kafka.publisher import Outgoing, Placed, Sending
from qkit.backends.kafka.reader import Reader
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import QueueError
from qkit.message import GROUP, Envelope

__all__ = ["Administration"]

Place = Any  # the driver's TopicPartition


class _Message(NamedTuple):
    """A message in the log, and when it was written."""

    place: Place
    offset: int
    written_at: float
    envelope: Envelope
    facts: Facts


@dataclass(slots=True)
class _Log:
    """Where the partitions of a channel and of its waiting room begin and end."""

    begins: dict[Place, int] = field(default_factory=dict[Place, int])
    ends: dict[Place, int] = field(default_factory=dict[Place, int])
    removed: dict[Place, set[int]] = field(default_factory=dict[Place, set[int]])


class Administration:
    """What ``Admin`` promises, on Kafka. ``is_topic`` tells what was declared as one here."""

    def __init__(
        self,
        cluster: Cluster,
        reader: Reader,
        sending: Sending,
        names: Names,
        subscriptions: Collection[KafkaSubscription],
        *,
        is_topic: Callable[[str], bool],
    ) -> None:
        self._cluster = cluster
        self._reader = reader
        self._sending = sending
        self._names = names
        self._subscriptions = subscriptions
        self._is_topic = is_topic

    # How much

    async def stats(self, queue: str) -> QueueStats:
        """Depth is what the groups have not done yet, without what waits for its time."""
        log = await self._log(queue, "stats")
        depth = waiting = consumers = held = ours = 0
        for group in await self._groups(queue):
            marks = await self._marks(group, queue)
            for place, end in log.ends.items():
                mark = marks.get(place, Saved(log.begins[place]))
                count = left(mark, log.begins[place], end)
                if place.topic == queue:
                    gone = log.removed.get(place, ())
                    depth += count - sum(1 for offset in gone if offset >= mark.offset)
                else:
                    waiting += count
            consumers += await self._cluster.members(group)
            local = self._local(group)
            ours += len(local)
            for tracker, is_ready in self._trackers(local, queue):
                held += tracker.held
                depth -= tracker.held if is_ready else 0
                waiting -= 0 if is_ready else tracker.held
        known = consumers == ours  # else another process holds some, and does not say how many
        return QueueStats(
            queue=queue,
            depth=max(0, depth if known else depth + held),
            scheduled=max(0, waiting),
            consumers=consumers,
            in_flight=held if known else None,
        )

    # What

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Oldest first, by the time of writing over all partitions; then what waits."""
        log = await self._log(queue, "peek")
        ready: list[_Message] = []
        waiting: list[_Message] = []
        for group, name in (await self._groups(queue)).items():
            marks = await self._marks(group, queue)
            held = {(item.place, item.offset) for each in self._local(group) for item in each.held}
            for message in await self._read(log, marks, "peek", limit):
                if name is not None:
                    message.envelope.headers[GROUP] = name
                if (message.place, message.offset) in held:
                    continue
                (ready if message.place.topic == queue else waiting).append(message)
        ready.sort(key=lambda message: message.written_at)
        waiting.sort(key=lambda message: message.facts.not_before or 0.0)
        return [message.envelope for message in (*ready, *waiting)][:limit]

    async def _read(
        self, log: _Log, marks: dict[Place, Saved], operation: str, most: int | None = None
    ) -> list[_Message]:
        """What a group has not done yet; ``most`` of each partition are enough."""
        ranges: dict[Place, tuple[int, int]] = {}
        trackers: dict[Place, Tracker] = {}
        hidden = 0
        for place, end in log.ends.items():
            mark = marks.get(place, Saved(log.begins[place]))
            first = max(mark.offset, log.begins[place])
            ranges[place] = first, end
            trackers[place] = Tracker(mark.offset, mark.metadata)
            settled = end - first - left(mark, log.begins[place], end)
            hidden = max(hidden, settled + 2 * len(log.removed.get(place, ())))
        enough = None if most is None else most + hidden
        found: list[_Message] = []
        for item in await self._reader.read(ranges, operation, enough):
            place = TopicPartition(item.topic, item.partition)
            if trackers[place].is_settled(item.offset):
                continue
            if item.offset not in log.removed.get(place, ()):
                found.append(_message(place, item))
        return found

    # Away with it

    async def purge(self, queue: str) -> int:
        """Delete what nobody holds: consumers in this process keep theirs, and know it.

        What a consumer of another process has read already it still handles.
        """
        before = await self.stats(queue)
        log = await self._log(queue, "purge")
        deletable = dict(log.ends)
        for group in await self._groups(queue):
            for each in self._local(group):
                each.purge(log.ends)
                for place, tracker in each.membership.trackers.items():
                    if place in deletable and tracker.pending:
                        deletable[place] = min(deletable[place], *tracker.pending)
        await self._cluster.delete_records(
            {place: end for place, end in deletable.items() if end > log.begins[place]}
        )
        held = 0 if before.in_flight is not None else self._held(queue)
        return max(0, before.depth + (before.scheduled or 0) - held)

    def _held(self, queue: str) -> int:
        return sum(len(each.held) for each in self._subscriptions if each.queue == queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Hide a message for each id, oldest first, by a marker behind it in its partition.

        What lies before the first message that is left needs none: it is deleted.
        """
        log = await self._log(queue, "remove", waiting=False)
        wanted = Counter(ids)
        gone: list[_Message] = []
        floors = dict(log.ends)  # where the first message that stays lies
        for message in await self._read(log, {}, "remove"):
            if wanted[message.envelope.id] > 0:
                wanted[message.envelope.id] -= 1
                gone.append(message)
            else:
                floors[message.place] = min(floors[message.place], message.offset)
        hidden = [message for message in gone if message.offset > floors[message.place]]
        if hidden:
            await self._mark(queue, hidden)
        await self._cluster.delete_records(
            {place: floor for place, floor in floors.items() if floor > log.begins[place]}
        )
        return len(gone)

    async def _mark(self, queue: str, messages: list[_Message]) -> None:
        markers = [
            Outgoing(*codec.marker(message.offset), message.place.partition) for message in messages
        ]
        until: dict[int, int] = {}
        for result in await self._sending.send(queue, markers, "remove"):
            if not isinstance(result, Placed):
                raise result
            until[result.partition] = max(until.get(result.partition, 0), result.offset + 1)
        await self._cluster.commit(self._names.markers(queue), queue, until)

    async def drop_oldest(self, queue: str, limit: int) -> list[Envelope]:
        """Delete the oldest while there are more than ``limit``; return them."""
        log = await self._log(queue, "publish", waiting=False)
        if any(log.removed.values()):
            messages = await self._read(log, {}, "publish")
        else:  # as usual: so many offsets are so many messages, and only the oldest are looked at
            excess = {
                place: (log.begins[place], max(log.begins[place], end - limit))
                for place, end in log.ends.items()
            }
            read = await self._reader.read(excess, "publish")
            messages = [_message(TopicPartition(item.topic, item.partition), item) for item in read]
            limit = 0
        dropped = messages[: len(messages) - limit]
        before: dict[Place, int] = {}
        for message in dropped:
            before[message.place] = message.offset + 1
        await self._cluster.delete_records(before)
        return [message.envelope for message in dropped]

    async def delete(self, queue: str) -> None:
        """Delete the topic and its waiting room; Kafka forgets what groups committed of them."""
        if not await self._cluster.look(queue):
            raise not_found(queue, "delete")
        groups = [*await self._groups(queue), self._names.markers(queue)]
        retry = self._names.retry(queue)
        await self._cluster.delete([queue, *([retry] if await self._cluster.look(retry) else [])])
        with contextlib.suppress(QueueError):  # a group that still has members stays
            await self._cluster.delete_groups(groups)

    # Where things are

    async def _log(self, queue: str, operation: str, *, waiting: bool = True) -> _Log:
        if not await self._cluster.look(queue):
            raise not_found(queue, operation)
        topics = [queue]
        retry = self._names.retry(queue)
        if waiting and await self._cluster.look(retry):
            topics.append(retry)
        log = _Log()
        for topic in topics:
            for target, which in ((log.begins, driver.EARLIEST), (log.ends, driver.LATEST)):
                for partition, offset in (await self._cluster.offsets(topic, which)).items():
                    target[TopicPartition(topic, partition)] = offset
        await self._find_removed(queue, log, operation)
        return log

    async def _find_removed(self, queue: str, log: _Log, operation: str) -> None:
        """Which offsets are hidden, or are markers; only where a group says that there are some."""
        flags = await self._cluster.committed(self._names.markers(queue), [queue])
        ranges = {
            place: (log.begins[place], saved.offset)
            for place, saved in flags.items()
            if place in log.begins
        }
        for item in await self._reader.read(ranges, operation):
            _, facts = codec.decode(item)
            if facts.removed is not None:
                place = TopicPartition(item.topic, item.partition)
                log.removed.setdefault(place, set()).update((facts.removed, item.offset))

    async def _groups(self, queue: str) -> dict[str, str | None]:
        found = self._names.groups(queue, await self._cluster.groups())
        nobody = self._names.group(queue, None)
        if found == {nobody: None} and self._is_topic(queue):
            return {}  # a topic that no group wants holds nothing for anybody
        return found

    async def _marks(self, group: str, queue: str) -> dict[Place, Saved]:
        """How far a group is; our own consumers know better than their last commit."""
        marks = await self._cluster.committed(group, [queue, self._names.retry(queue)])
        for each in self._local(group):
            for place, tracker in each.membership.trackers.items():
                marks[place] = tracker.snapshot()
        return marks

    def _local(self, group: str) -> list[KafkaSubscription]:
        return [each for each in self._subscriptions if each.group == group and each.joined]

    def _trackers(self, local: list[KafkaSubscription], queue: str) -> list[tuple[Tracker, bool]]:
        return [
            (tracker, place.topic == queue)
            for each in local
            for place, tracker in each.membership.trackers.items()
        ]


def _message(place: Place, item: KafkaRecord) -> _Message:
    envelope, facts = codec.decode(item)
    return _Message(place, item.offset, item.timestamp / 1000, envelope, facts)
