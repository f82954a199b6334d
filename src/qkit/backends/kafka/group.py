"""Membership of a consumer in its group, and the partitions assigned to the consumer.

At a rebalance, the driver revokes all partitions, assigns all of them again, and reads each from
its committed offset. Here a partition that stays with this consumer is read from its current
position. That is safe only if the last commit of the partition is the one that this consumer made:
then no other consumer has had the partition in the meantime.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
from qkit.backends.common.errors import subscription_broke
from qkit.backends.kafka import driver
from qkit.backends.kafka.assignor import Assignor, MemberState
from qkit.backends.kafka.cluster import Cluster
from qkit.backends.kafka.codec import KafkaRecord
from qkit.backends.kafka.committer import OffsetCommitter
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Consumer, Listener, OffsetAndMetadata, Partition
from qkit.backends.kafka.errors import BACKEND, DRIVER_ERRORS, to_queue_error
from qkit.backends.kafka.offsets import CommittedOffset, OffsetTracker
from qkit.errors import AckDeadlineExceeded, ConfigError, QueueError, SubscriptionLost

__all__ = ["GroupMembership", "GroupTimeouts", "subscription_error"]


COMMIT_TIMEOUT_SECONDS: Final = 5.0
REBALANCE_WAIT_SECONDS: Final = 2.0  # when leaving, wait this long for a rebalance to end
FETCH_BYTES: Final = 512 << 10  # per partition; larger fetches only use more memory
FETCH_WAIT_SECONDS: Final = 0.25
TOPIC_CHECK_INTERVAL_SECONDS: Final = 2.0
MAX_POLL_INTERVAL_MS: Final = (1 << 31) - 1  # no limit, because a paused consumer does not poll


class GroupTimeouts:
    """Timeouts of a group member, in seconds.

    Args:
        session: Time without a heartbeat after which a consumer loses its partitions; 45 by
            default.
        heartbeat: Time between heartbeats, 1 by default; limited to a third of ``session``. A
            member learns of a rebalance from the response to a heartbeat.
    """

    def __init__(self, session: float = 45.0, heartbeat: float = 1.0) -> None:
        self.session = session
        self.heartbeat: float = min(heartbeat, session / 3)
        #: Time to settle the messages of a partition that must be given up.
        self.drain: float = min(10.0, session * 0.4)


class GroupMembership:
    """Membership in a consumer group, from ``join`` to ``leave``.

    Args:
        parameters: Connection parameters.
        cluster: Client for topics, offsets and commits.
        group: Id of the consumer group.
        topic: Topic of the channel.
        retry: Retry topic of the channel.
        from_end: Whether a new group starts at the end of each partition, not at the beginning.
        timeouts: Timeouts of the group member.
        batch: Settled messages per commit; ``None`` commits as soon as possible.
        on_rebalanced: Called after every rebalance, before any message is read.
        on_lost: Called with the trackers of partitions that this consumer has lost.
        on_change: Called when a waiting ``receive`` must check the state again.
        on_commit: Called after every commit, with its error or ``None``.
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
        on_rebalanced: Callable[[], None],
        on_lost: Callable[[list[OffsetTracker]], None],
        on_change: Callable[[], None],
        on_commit: Callable[[Exception | None], None],
    ) -> None:
        self._parameters = parameters
        self._cluster = cluster
        self.group = group
        self.topic = topic
        self._retry = retry
        self._from_end = from_end
        self._timeouts = timeouts
        self._on_rebalanced = on_rebalanced
        self._on_lost = on_lost
        self._on_change = on_change
        #: Trackers of the assigned partitions.
        self.trackers: dict[Partition, OffsetTracker] = {}
        #: The error that ended this membership; ``None`` if there was none.
        self.broken: QueueError | None = None
        self._consumer: Any = None
        self._leaving = False  # giving up partitions, but still settling messages
        self._closing = False
        self._left = False
        self._warned_idle = False
        self._wanted: dict[Partition, float] = {}  # partition to give up: time of the request
        self._stable = asyncio.Event()  # set while no rebalance is in progress
        self._idle = asyncio.Event()  # set when a partition may be ready to be given up
        self._tasks: list[asyncio.Task[None]] = []
        self._committer = OffsetCommitter(
            group,
            self.trackers,
            self._stable,
            batch_size=batch,
            commit=self._commit,
            on_commit=on_commit,
        )

    @property
    def stable(self) -> bool:
        """Whether no rebalance is in progress."""
        return self._stable.is_set()

    @property
    def joined(self) -> bool:
        """Whether this consumer has joined the group and not left it."""
        return self._consumer is not None and not self._left

    # Joining and leaving

    async def join(self) -> None:
        """Join the group; return when this consumer has its first assignment.

        Raises:
            QueueError: The first assignment failed.
            TimeoutError: This consumer did not get an assignment in time.
        """
        if self._from_end:
            await self._initialize_group()
        self._consumer = driver.disable_topic_creation(
            Consumer(
                group_id=self.group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                partition_assignment_strategy=(Assignor(self._member_state, self._on_wanted),),
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
            await self._stable.wait()
        if self.broken is not None:
            raise self.broken
        name = f"qkit kafka {self.group}"
        self._tasks = [
            asyncio.create_task(self._committer.run(), name=f"{name} commit"),
            asyncio.create_task(self._hand_over(), name=f"{name} hand-over"),
            asyncio.create_task(self._watch_topic(), name=f"{name} topic check"),
        ]
        for task in self._tasks:
            task.add_done_callback(self.on_task_done)

    async def _initialize_group(self) -> None:
        """Commit the end of every partition for a new group of a topic.

        The group then receives only messages that are sent from now on. If each member committed
        only its own partitions, another member could take a partition that has no commit yet for
        one that was added later, and read it from its beginning.
        """
        for topic in (self.topic, self._retry):
            ends = await self._cluster.offsets(topic, driver.LATEST)
            partitions = [Partition(topic, partition) for partition in ends]
            if not await self._cluster.committed_of(self.group, partitions):
                with contextlib.suppress(AckDeadlineExceeded):  # the group has members by now
                    await self._cluster.commit(self.group, topic, ends)

    def hand_over_idle_partitions(self) -> None:
        """Start to give up all partitions, each as soon as its deliveries are settled."""
        if not self._leaving:
            self._leaving = True
            self._idle.set()
            self._pause()
            driver.rejoin(self._consumer)

    async def leave(self) -> None:
        """Commit the settled messages and leave the group; idempotent."""
        consumer = self._consumer
        if consumer is None or self._left or self._closing:
            return
        self._closing = True
        await cancel_and_wait(self._tasks)
        try:
            # Kafka rejects a commit during a rebalance, and settled messages would be redelivered.
            if self.trackers:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REBALANCE_WAIT_SECONDS):
                        await self._stable.wait()
                await self._committer.commit()
        finally:
            self._left = True
            self._lose(list(self.trackers))
            self._committer.close()
            await driver.close_consumer(consumer)

    # Reading

    async def poll(self, limit: int, seconds: float) -> list[tuple[Partition, list[KafkaRecord]]]:
        """Return up to ``limit`` records of the channel's topic; safe to cancel.

        Wait for the end of a rebalance first, then up to ``seconds`` for records.
        """
        if not self._stable.is_set():
            await self._stable.wait()
        found = await self._consumer.getmany(timeout_ms=round(seconds * 1000), max_records=limit)
        return [
            (partition, records)
            for partition, records in found.items()
            if partition in self.trackers
        ]

    def skip_to(self, partition: Partition, offset: int) -> None:
        """Continue reading a partition at ``offset``; treat skipped messages as settled."""
        self.trackers[partition].skip_to(offset)
        if partition.topic == self.topic:
            self._consumer.seek(partition, offset)

    def fail(self, error: QueueError) -> None:
        """End this membership with an error; no message can be read or settled afterwards."""
        if self.broken is None:
            self.broken = error
        self._committer.close()
        self._lose(list(self.trackers))
        self._stable.set()
        self._on_change()

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """End this membership if a background task has failed; a done callback of the task."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(subscription_error(error, self.topic))

    # Settling

    def settled(self, tracker: OffsetTracker) -> None:
        """Schedule a commit, because messages of a partition were settled or skipped."""
        if not tracker.held and (self._leaving or self._wanted):
            self._idle.set()
        self._committer.settled()

    async def _commit(self, offsets: dict[Partition, CommittedOffset]) -> None:
        async with asyncio.timeout(min(COMMIT_TIMEOUT_SECONDS, self._parameters.timeout)):
            await self._consumer.commit(_driver_offsets(offsets))

    # Rebalancing

    def _member_state(self) -> MemberState:
        """Return the state that this member reports to the group's leader."""
        busy = frozenset(partition for partition in self.trackers if self._is_busy(partition))
        handed_over = frozenset(self._wanted) - busy
        owned = frozenset(self.trackers) - handed_over
        return MemberState(driver.generation_of(self._consumer), owned, busy, self._leaving)

    def _is_busy(self, partition: Partition) -> bool:
        """Return whether a message would be handled twice if the partition moved now."""
        tracker = self.trackers[partition]
        return tracker.held > 0 or tracker.unsaved() is not None

    def _on_wanted(self, wanted: frozenset[Partition]) -> None:
        now = asyncio.get_running_loop().time()
        self._wanted = {partition: self._wanted.get(partition, now) for partition in wanted}
        if wanted:
            self._idle.set()

    async def revoked(self) -> None:
        """Stop reading and commit; the driver calls this at the start of a rebalance."""
        self._stable.clear()
        try:
            self._on_change()
            if not self._left:
                await self._committer.commit()
        except Exception as error:  # the driver would only log the error
            self.fail(subscription_error(error, self.topic))

    async def assigned(self, partitions: Iterable[Partition]) -> None:
        """Continue with the assigned partitions; the driver calls this after a rebalance."""
        if self._left or self.broken is not None:
            return
        try:
            await self._take_over(set(partitions))
            self._on_rebalanced()
        except Exception as error:  # the driver would only log it, and reading would not resume
            self.fail(subscription_error(error, self.topic))
            return
        self._stable.set()
        self._committer.request()
        self._on_change()

    async def _take_over(self, partitions: set[Partition]) -> None:
        """Drop trackers of lost partitions, create trackers of new ones, and set all positions."""
        for topic in (self.topic, self._retry):
            if not await self._cluster.count_partitions(topic):
                raise SubscriptionLost(
                    f"the topic {topic!r} was deleted", backend=BACKEND, operation="receive"
                )
        committed = await self._cluster.committed(self.group, (self.topic, self._retry))
        revoked = set(self.trackers) - partitions
        committed_by_others = {
            partition
            for partition in partitions & set(self.trackers)
            if committed.get(partition) != self.trackers[partition].saved
        }
        self._lose([*revoked, *committed_by_others])
        new = partitions - set(self.trackers)
        uncommitted = new - set(committed)
        starts = await self._starts(uncommitted, committed) if uncommitted else {}
        for partition in new:
            saved = committed.get(partition)
            if saved is not None:
                self.trackers[partition] = OffsetTracker(saved.offset, saved.metadata, saved)
            else:
                self.trackers[partition] = OffsetTracker(starts[partition])
        for partition, tracker in self.trackers.items():
            self._consumer.seek(partition, tracker.end)
        self._pause()
        if self._from_end and uncommitted:
            # Commit the start, so that messages sent while the group has no members are not missed.
            marks = {partition: CommittedOffset(starts[partition]) for partition in uncommitted}
            async with asyncio.timeout(self._parameters.timeout):
                await self._consumer.commit(_driver_offsets(marks))
            for partition, mark in marks.items():
                self.trackers[partition].saved = mark

    async def _starts(
        self, partitions: set[Partition], committed: dict[Partition, CommittedOffset]
    ) -> dict[Partition, int]:
        """Return the offset at which to start reading, for partitions without a commit.

        A partition that was added to a topic after the group was created is read from its
        beginning.
        """
        starts: dict[Partition, int] = {}
        for topic in {partition.topic for partition in partitions}:
            new = self._from_end and not any(partition.topic == topic for partition in committed)
            which = driver.LATEST if new else driver.EARLIEST
            for partition, offset in (await self._cluster.offsets(topic, which)).items():
                starts[Partition(topic, partition)] = offset
        return starts

    def _pause(self) -> None:
        """Pause the partitions of the retry topic and those that must be given up."""
        paused = [
            partition
            for partition in self.trackers
            if partition.topic == self._retry or partition in self._wanted or self._leaving
        ]
        with contextlib.suppress(*DRIVER_ERRORS):  # during a rebalance no partition is assigned
            self._consumer.pause(*paused)

    def _lose(self, partitions: Iterable[Partition]) -> None:
        lost = [
            self.trackers.pop(partition) for partition in partitions if partition in self.trackers
        ]
        for tracker in lost:
            tracker.lost = True
        self._on_lost(lost)

    # Giving up partitions

    async def _hand_over(self) -> None:
        """Request a rebalance as soon as a partition that must be given up is idle."""
        loop = asyncio.get_running_loop()
        while True:
            await self._idle.wait()
            self._idle.clear()
            await self._stable.wait()
            while self._outgoing():
                await self._committer.commit()
                busy = [partition for partition in self._outgoing() if self._is_busy(partition)]
                late = [partition for partition in busy if self._is_late(partition, loop.time())]
                if late:
                    self._abandon(late)
                if len(busy) < len(self._outgoing()) or late:
                    driver.rejoin(self._consumer)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._idle.wait()
                        self._idle.clear()
                await self._stable.wait()
            await asyncio.sleep(self._timeouts.heartbeat / 2)  # let the rebalance start

    def _outgoing(self) -> list[Partition]:
        """Return the assigned partitions that must be given up."""
        return [
            partition for partition in self.trackers if self._leaving or partition in self._wanted
        ]

    def _is_late(self, partition: Partition, now: float) -> bool:
        since = self._wanted.get(partition)
        return not self._leaving and since is not None and now - since >= self._timeouts.drain

    def _abandon(self, partitions: list[Partition]) -> None:
        """Give up partitions with unsettled messages, which another consumer will receive."""
        logger.warning(
            "%s: %d messages were not settled within %.0f s after a rebalance and will be "
            "redelivered to another consumer",
            self.group,
            sum(self.trackers[partition].held for partition in partitions),
            self._timeouts.drain,
        )
        self._lose(partitions)
        self._on_rebalanced()
        self._on_change()

    # Topic check

    async def _watch_topic(self) -> None:
        """End this membership when the topic is deleted, which the driver does not report.

        Also warn once if this consumer has no partition of the topic at two successive checks.
        """
        idle_checks = 0
        while True:
            await asyncio.sleep(TOPIC_CHECK_INTERVAL_SECONDS)
            idle = not any(partition.topic == self.topic for partition in self.trackers)
            idle_checks = idle_checks + 1 if idle and self.stable and not self._leaving else 0
            with contextlib.suppress(QueueError):
                partitions = await self._cluster.count_partitions(self.topic)
                if idle_checks >= 2 and partitions and not self._warned_idle:
                    await self._warn_idle(partitions)
                if not partitions:
                    self.fail(
                        SubscriptionLost(
                            "the topic was deleted",
                            backend=BACKEND,
                            operation="receive",
                            queue=self.topic,
                        )
                    )
                    return

    async def _warn_idle(self, partitions: int) -> None:
        """Warn that this consumer receives no messages, if there are too few partitions."""
        members = await self._cluster.members(self.group)
        if members <= partitions:
            return
        self._warned_idle = True
        logger.warning(
            "%s: this consumer receives no messages: the topic has %d partitions for %d consumers "
            "of the group %s, and each partition has one consumer. Add partitions "
            "(kafka-topics.sh --alter --topic %s --partitions %d), set 'partitions' for new "
            "topics, or start fewer workers with a higher concurrency",
            self.topic,
            partitions,
            members,
            self.group,
            self.topic,
            members,
        )


def subscription_error(error: BaseException, topic: str) -> QueueError:
    """Convert an error to the one that ends the subscription.

    The result is a ``ConfigError`` if subscribing again cannot help, otherwise a
    ``SubscriptionLost``.
    """
    found = error if isinstance(error, QueueError) else to_queue_error(error, "receive", topic)
    if isinstance(found, SubscriptionLost | ConfigError):
        return found
    return subscription_broke(BACKEND, topic, found.message, error)


def _listener(membership: GroupMembership) -> Any:
    """Return a rebalance listener for the driver, which requires a subclass of its own class."""

    class RebalanceListener(Listener):  # type: ignore[misc]  # the driver has no types
        async def on_partitions_revoked(self, revoked: Any) -> None:
            await membership.revoked()

        async def on_partitions_assigned(self, assigned: Any) -> None:
            await membership.assigned(assigned)

    return RebalanceListener()


def _driver_offsets(offsets: Mapping[Partition, CommittedOffset]) -> dict[Partition, Any]:
    return {partition: OffsetAndMetadata(*commit) for partition, commit in offsets.items()}
