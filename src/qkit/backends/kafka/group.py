"""Membership of a consumer in its group: which partitions it has, and what it commits of them.

The driver's rebalance takes all partitions away, rewinds those that stay, and assigns all again.
Here a partition that stays goes on where it was: as long as the group's commit is still ours,
nobody else has touched it. Commits are gathered: one at a time, and not more often than needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
from qkit.backends.kafka import driver
from qkit.backends.kafka.assignor import Assignor, MemberState
from qkit.backends.kafka.cluster import Cluster
from qkit.backends.kafka.codec import KafkaRecord
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Consumer, Listener, OffsetAndMetadata, Partition
from qkit.backends.kafka.errors import BACKEND, DRIVER_ERRORS, to_queue_error
from qkit.backends.kafka.offsets import CommittedOffset, OffsetTracker
from qkit.errors import AckDeadlineExceeded, ConfigError, QueueError, SubscriptionLost

__all__ = ["GroupMembership", "GroupTimeouts", "lost"]


COMMIT_INTERVAL_SECONDS: Final = 0.05
COMMIT_RETRY_SECONDS: Final = 0.5
COMMIT_TIMEOUT_SECONDS: Final = 5.0
REBALANCE_WAIT_SECONDS: Final = 2.0  # for a rebalance that is under way when this consumer leaves
BATCH_COMMIT_SECONDS: Final = 1.0  # an incomplete batch is committed after so long
FETCH_BYTES: Final = 512 << 10  # of a partition; more would only wait in memory
FETCH_WAIT_SECONDS: Final = 0.25
TOPIC_CHECK_INTERVAL_SECONDS: Final = 2.0
MAX_POLL_INTERVAL_MS: Final = (1 << 31) - 1  # no limit: a paused channel is no dead consumer


class GroupTimeouts:
    """How long a silent consumer keeps its partitions, and how soon it hears of a change."""

    def __init__(self, session: float = 45.0, heartbeat: float = 1.0) -> None:
        self.session = session
        self.heartbeat = min(heartbeat, session / 3)
        # A partition that another should have is drained for so long, then let go as it is.
        self.drain = min(10.0, session * 0.4)


class GroupMembership:
    """Joined to a group from ``join`` to ``leave``.

    ``moved`` is called after every rebalance, before anything is read, ``lost`` when partitions
    went to others, and ``changed`` whenever there may be news for whoever waits. ``committed`` is
    called after every commit, with the error of one that failed.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        cluster: Cluster,
        *,
        group: str,
        topic: str,
        retry: str,
        from_end: bool,
        timeouts: GroupTimeouts,
        batch: int | None,
        moved: Callable[[], None],
        lost: Callable[[list[OffsetTracker]], None],
        changed: Callable[[], None],
        committed: Callable[[Exception | None], None],
    ) -> None:
        self._parameters = parameters
        self._cluster = cluster
        self.group = group
        self.topic = topic
        self._retry = retry
        self._from_end = from_end  # a new group of a topic begins with what is sent from now on
        self._timeouts = timeouts
        self._batch = batch
        self._moved = moved
        self._tell_lost = lost
        self._changed = changed
        self._tell_committed = committed
        self.trackers: dict[Partition, OffsetTracker] = {}
        self.broken: QueueError | None = None
        self._consumer: Any = None
        self._leaving = False
        self._ending = False
        self._left = False
        self._wanted: dict[Partition, float] = {}  # since when another should have it
        self._steady = asyncio.Event()  # no rebalance is under way
        self._dirty = asyncio.Event()
        self._unsaved = 0
        self._flushing: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()  # a partition that is wanted holds nothing any more
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def steady(self) -> bool:
        """Whether no rebalance is under way."""
        return self._steady.is_set()

    @property
    def joined(self) -> bool:
        """Whether it takes part in the group."""
        return self._consumer is not None and not self._left

    # In and out

    async def join(self) -> None:
        """Take part in the group; returns when this consumer has its first share."""
        if self._from_end:
            await self._found()
        self._consumer = driver.create_nothing(
            Consumer(
                group_id=self.group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                partition_assignment_strategy=(Assignor(self._member_state, self._on_assigned),),
                session_timeout_ms=round(self._timeouts.session * 1000),
                heartbeat_interval_ms=round(self._timeouts.heartbeat * 1000),
                rebalance_timeout_ms=round(self._timeouts.session * 1000),
                max_poll_interval_ms=MAX_POLL_INTERVAL_MS,
                max_partition_fetch_bytes=FETCH_BYTES,
                fetch_max_wait_ms=round(FETCH_WAIT_SECONDS * 1000),
                **self._parameters.options(),
            )
        )
        self._consumer.subscribe([self.topic, self._retry], listener=_listener(self))
        async with asyncio.timeout(self._timeouts.session + self._parameters.timeout):
            await self._consumer.start()
            await self._steady.wait()
        if self.broken is not None:
            raise self.broken
        name = f"qkit kafka {self.group}"
        self._tasks = [
            asyncio.create_task(self._commit_by_need(), name=f"{name} commits"),
            asyncio.create_task(self._hand_over(), name=f"{name} hands over"),
            asyncio.create_task(self._watch(), name=f"{name} watch"),
        ]
        for task in self._tasks:
            task.add_done_callback(self.end_with)

    async def _found(self) -> None:
        """Let a new group of a topic begin with what is sent from now on, in every partition.

        Members that join together would each mark its own share, and take what the others have
        not marked yet for partitions that were added later.
        """
        for topic in (self.topic, self._retry):
            ends = await self._cluster.offsets(topic, driver.LATEST)
            partitions = [Partition(topic, partition) for partition in ends]
            if not await self._cluster.committed_of(self.group, partitions):
                with contextlib.suppress(AckDeadlineExceeded):  # its members did so before us
                    await self._cluster.commit(self.group, topic, ends)

    def give_up_idle_partitions(self) -> None:
        """Keep only the partitions of which something is held, until that is settled."""
        if not self._leaving:
            self._leaving = True
            self._idle.set()
            self._pause()
            driver.rejoin(self._consumer)

    async def leave(self) -> None:
        """Commit what is settled and leave; idempotent."""
        consumer = self._consumer
        if consumer is None or self._left or self._ending:
            return
        self._ending = True
        await cancel_and_wait(self._tasks)
        try:
            # A commit in the midst of a rebalance is refused: what is settled would come again.
            if self.trackers:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REBALANCE_WAIT_SECONDS):
                        await self._steady.wait()
                await self._commit()
        finally:
            self._left = True
            self._lose(list(self.trackers))
            if self._flushing is not None:
                self._flushing.cancel()
            await driver.close_consumer(consumer)

    # Reading

    async def poll(self, most: int, seconds: float) -> list[tuple[Partition, list[KafkaRecord]]]:
        """The next records of the channel's own partitions; safe to cancel."""
        if not self._steady.is_set():
            await self._steady.wait()
        found = await self._consumer.getmany(timeout_ms=round(seconds * 1000), max_records=most)
        return [
            (partition, records)
            for partition, records in found.items()
            if partition in self.trackers
        ]

    def skip_to(self, partition: Partition, offset: int) -> None:
        """Read on from this offset."""
        self.trackers[partition].skip_to(offset)
        if partition.topic == self.topic:
            self._consumer.seek(partition, offset)

    def fail(self, error: QueueError) -> None:
        """Nothing can be read or settled any more: somebody must subscribe again."""
        if self.broken is None:
            self.broken = error
        self._lose(list(self.trackers))
        self._steady.set()
        self._changed()

    def end_with(self, task: asyncio.Task[None]) -> None:
        """A task of this subscription ended: if that was an accident, so does the subscription."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(lost(error, self.topic))

    # Committing

    def settled(self, tracker: OffsetTracker) -> None:
        """Something of this partition is done: commit it soon."""
        self._unsaved += 1
        if not tracker.held and (self._leaving or self._wanted):
            self._idle.set()
        if (
            self._batch is None
            or self._unsaved >= self._batch
            or not any(each.held for each in self.trackers.values())
        ):
            self._dirty.set()
        elif self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(BATCH_COMMIT_SECONDS, self._dirty.set)

    async def _commit_by_need(self) -> None:
        while True:
            await self._dirty.wait()
            await self._steady.wait()
            self._dirty.clear()
            done = await self._commit()
            if not done:
                self._dirty.set()  # the next one takes it along
            await asyncio.sleep(COMMIT_INTERVAL_SECONDS if done else COMMIT_RETRY_SECONDS)

    async def _commit(self) -> bool:
        """Commit every mark that moved; whether the coordinator has them."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._unsaved = 0
        news: dict[Partition, CommittedOffset] = {}
        for partition, tracker in self.trackers.items():
            if (unsaved := tracker.unsaved()) is not None:
                news[partition] = unsaved
        if not news or self.broken is not None:
            return True
        try:
            async with asyncio.timeout(min(COMMIT_TIMEOUT_SECONDS, self._parameters.timeout)):
                await self._consumer.commit(
                    {partition: OffsetAndMetadata(*saved) for partition, saved in news.items()}
                )
        except DRIVER_ERRORS as error:
            # What is settled stays so in the trackers; without a commit it would come again only
            # if this consumer died now.
            logger.info("%s: a commit failed and is tried again: %r", self.group, error)
            self._tell_committed(error)
            return False
        self._tell_committed(None)
        for partition, saved in news.items():
            if partition in self.trackers:
                self.trackers[partition].saved = saved
        return True

    # Rebalancing

    def _member_state(self) -> MemberState:
        """What this member tells the group's leader when it joins."""
        busy = frozenset(partition for partition in self.trackers if self._is_busy(partition))
        given = frozenset(self._wanted) - busy
        owned = frozenset(self.trackers) - given
        return MemberState(driver.generation_of(self._consumer), owned, busy, self._leaving)

    def _is_busy(self, partition: Partition) -> bool:
        """Whether another would handle something again if it had this partition now."""
        tracker = self.trackers[partition]
        return tracker.held > 0 or tracker.unsaved() is not None

    def _on_assigned(self, wanted: frozenset[Partition]) -> None:
        now = asyncio.get_running_loop().time()
        self._wanted = {partition: self._wanted.get(partition, now) for partition in wanted}
        if wanted:
            self._idle.set()

    async def revoked(self) -> None:
        """A rebalance begins: nothing is read until it is over."""
        self._steady.clear()
        try:
            self._changed()
            if not self._left:
                await self._commit()
        except Exception as error:  # the driver would log it and go on
            self.fail(lost(error, self.topic))

    async def assigned(self, partitions: Iterable[Partition]) -> None:
        """A rebalance is over: go on where this consumer was, begin where it was not."""
        if self._left or self.broken is not None:
            return
        try:
            await self._take_over(set(partitions))
            self._moved()
        except Exception as error:  # the driver would log it, and nobody would ever be steady
            self.fail(lost(error, self.topic))
            return
        self._steady.set()
        self._dirty.set()
        self._changed()

    async def _take_over(self, partitions: set[Partition]) -> None:
        for topic in (self.topic, self._retry):
            if not await self._cluster.look(topic):
                raise SubscriptionLost(
                    f"the topic {topic!r} was deleted", backend=BACKEND, operation="receive"
                )
        committed = await self._cluster.committed(self.group, (self.topic, self._retry))
        gone = set(self.trackers) - partitions
        moved_on = {
            partition
            for partition in partitions & set(self.trackers)
            if committed.get(partition) != self.trackers[partition].saved
        }
        self._lose([*gone, *moved_on])
        new = partitions - set(self.trackers)
        unknown = new - set(committed)
        starts = await self._starts(unknown, committed) if unknown else {}
        for partition in new:
            saved = committed.get(partition)
            if saved is not None:
                self.trackers[partition] = OffsetTracker(saved.offset, saved.metadata, saved)
            else:
                self.trackers[partition] = OffsetTracker(starts[partition])
        for partition, tracker in self.trackers.items():
            self._consumer.seek(partition, tracker.end)
        self._pause()
        if self._from_end and unknown:
            # From here on the group receives, also if it is away when the next message comes.
            marks = {partition: OffsetAndMetadata(starts[partition], "") for partition in unknown}
            async with asyncio.timeout(self._parameters.timeout):
                await self._consumer.commit(marks)
            for partition in unknown:
                self.trackers[partition].saved = CommittedOffset(starts[partition])

    async def _starts(
        self, partitions: set[Partition], committed: dict[Partition, CommittedOffset]
    ) -> dict[Partition, int]:
        """Where to begin in partitions of which the group knows nothing.

        Partitions that were added later are read from their beginning: the group existed before.
        """
        starts: dict[Partition, int] = {}
        for topic in {partition.topic for partition in partitions}:
            new = self._from_end and not any(partition.topic == topic for partition in committed)
            which = driver.LATEST if new else driver.EARLIEST
            for partition, offset in (await self._cluster.offsets(topic, which)).items():
                starts[Partition(topic, partition)] = offset
        return starts

    def _pause(self) -> None:
        """The driver reads only the channel's own partitions, and none that is to be given up."""
        paused = [
            partition
            for partition in self.trackers
            if partition.topic == self._retry or partition in self._wanted or self._leaving
        ]
        with contextlib.suppress(*DRIVER_ERRORS):  # in the midst of a rebalance it has none
            self._consumer.pause(*paused)

    def _lose(self, partitions: Iterable[Partition]) -> None:
        lost = [
            self.trackers.pop(partition) for partition in partitions if partition in self.trackers
        ]
        for tracker in lost:
            tracker.lost = True
        self._tell_lost(lost)

    # Handing over

    async def _hand_over(self) -> None:
        """Ask for another round as soon as a partition that others should have holds nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await self._idle.wait()
            self._idle.clear()
            await self._steady.wait()
            while self._giving():
                await self._commit()
                busy = [partition for partition in self._giving() if self._is_busy(partition)]
                late = [partition for partition in busy if self._is_late(partition, loop.time())]
                if late:
                    self._let_go(late)
                if len(busy) < len(self._giving()) or late:
                    driver.rejoin(self._consumer)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._idle.wait()
                        self._idle.clear()
                await self._steady.wait()
            await asyncio.sleep(self._timeouts.heartbeat / 2)  # the round is under way by then

    def _giving(self) -> list[Partition]:
        return [
            partition for partition in self.trackers if self._leaving or partition in self._wanted
        ]

    def _is_late(self, partition: Partition, now: float) -> bool:
        since = self._wanted.get(partition)
        return not self._leaving and since is not None and now - since >= self._timeouts.drain

    def _let_go(self, partitions: list[Partition]) -> None:
        """Its messages take too long: they come again to whoever has the partition next."""
        logger.warning(
            "%s: %d messages were not settled within %.0f s of a rebalance; another consumer gets "
            "them as well",
            self.group,
            sum(self.trackers[partition].held for partition in partitions),
            self._timeouts.drain,
        )
        self._lose(partitions)
        self._moved()
        self._changed()

    # Watching

    async def _watch(self) -> None:
        """Notice what the driver keeps to itself: a topic that is gone."""
        while True:
            await asyncio.sleep(TOPIC_CHECK_INTERVAL_SECONDS)
            with contextlib.suppress(QueueError):
                if not await self._cluster.look(self.topic):
                    self.fail(
                        SubscriptionLost(
                            "the topic was deleted",
                            backend=BACKEND,
                            operation="receive",
                            queue=self.topic,
                        )
                    )
                    return


def lost(error: BaseException, topic: str) -> QueueError:
    """Return why a subscription ended: ``ConfigError`` if subscribing again does not help."""
    found = error if isinstance(error, QueueError) else to_queue_error(error, "receive", topic)
    if isinstance(found, SubscriptionLost | ConfigError):
        return found
    return SubscriptionLost(
        f"the subscription broke: {found.message}",
        backend=BACKEND,
        operation="receive",
        queue=topic,
        cause=error,
    )


def _listener(membership: GroupMembership) -> Any:
    """The driver wants a class of its own kind."""

    class Rebalances(Listener):  # type: ignore[misc]  # the driver has no types
        async def on_partitions_revoked(self, revoked: Any) -> None:
            await membership.revoked()

        async def on_partitions_assigned(self, assigned: Any) -> None:
            await membership.assigned(assigned)

    return Rebalances()
