"""A consumer's place in its group: which partitions it has, and what it commits of them.

The driver's rebalance takes all partitions away, rewinds those that stay, and deals them out again.
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
from qkit.backends.kafka.assignor import Assignor, Claim
from qkit.backends.kafka.cluster import Cluster
from qkit.backends.kafka.codec import KafkaRecord
from qkit.backends.kafka.connection import BACKEND, DRIVER_ERRORS, Address, error_of
from qkit.backends.kafka.driver import Consumer, Listener, OffsetAndMetadata, TopicPartition
from qkit.backends.kafka.offsets import Saved, Tracker
from qkit.errors import AckDeadlineExceeded, ConfigError, QueueError, SubscriptionLost

__all__ = ["Membership", "Place", "Timing", "lost"]

Place = Any  # the driver's TopicPartition

COMMIT_EVERY: Final = 0.05
COMMIT_AGAIN: Final = 0.5
COMMIT_WITHIN: Final = 5.0
PATIENCE: Final = 2.0  # with a rebalance that is under way when this consumer leaves
BATCH_WITHIN: Final = 1.0  # an incomplete batch is committed after so long
FETCH_BYTES: Final = 512 << 10  # of a partition; more would only wait in memory
FETCH_WAIT: Final = 0.25
WATCH_EVERY: Final = 2.0
FOREVER: Final = (1 << 31) - 1


class Timing:
    """How long a silent consumer keeps its partitions, and how soon it hears of a change."""

    def __init__(self, session: float = 45.0, heartbeat: float = 1.0) -> None:
        self.session = session
        self.heartbeat = min(heartbeat, session / 3)
        # A partition that another should have is drained for so long, then let go as it is.
        self.drain = min(10.0, session * 0.4)


class Membership:
    """Joined to a group from ``join`` to ``leave``.

    ``moved`` is called after every rebalance, before anything is read, ``lost`` when partitions
    went to others, and ``changed`` whenever there may be news for whoever waits. ``committed`` is
    called after every commit, with the error of one that failed.
    """

    def __init__(
        self,
        address: Address,
        cluster: Cluster,
        *,
        group: str,
        topic: str,
        retry: str,
        from_end: bool,
        timing: Timing,
        batch: int | None,
        moved: Callable[[], None],
        lost: Callable[[list[Tracker]], None],
        changed: Callable[[], None],
        committed: Callable[[Exception | None], None],
    ) -> None:
        self._address = address
        self._cluster = cluster
        self.group = group
        self.topic = topic
        self._retry = retry
        self._from_end = from_end  # a new group of a topic begins with what is sent from now on
        self._timing = timing
        self._batch = batch
        self._moved = moved
        self._tell_lost = lost
        self._changed = changed
        self._tell_committed = committed
        self.trackers: dict[Place, Tracker] = {}
        self.broken: QueueError | None = None
        self._consumer: Any = None
        self._leaving = False
        self._ending = False
        self._left = False
        self._wanted: dict[Place, float] = {}  # since when another should have it
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
                partition_assignment_strategy=(Assignor(self._claim, self._deal),),
                session_timeout_ms=round(self._timing.session * 1000),
                heartbeat_interval_ms=round(self._timing.heartbeat * 1000),
                rebalance_timeout_ms=round(self._timing.session * 1000),
                max_poll_interval_ms=FOREVER,  # a paused channel is no dead consumer
                max_partition_fetch_bytes=FETCH_BYTES,
                fetch_max_wait_ms=round(FETCH_WAIT * 1000),
                **self._address.options(),
            )
        )
        self._consumer.subscribe([self.topic, self._retry], listener=_listener(self))
        async with asyncio.timeout(self._timing.session + self._address.timeout):
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
            places = [TopicPartition(topic, partition) for partition in ends]
            if not await self._cluster.committed_of(self.group, places):
                with contextlib.suppress(AckDeadlineExceeded):  # its members did so before us
                    await self._cluster.commit(self.group, topic, ends)

    def resign(self) -> None:
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
                    async with asyncio.timeout(PATIENCE):
                        await self._steady.wait()
                await self._commit()
        finally:
            self._left = True
            self._lose(list(self.trackers))
            if self._flushing is not None:
                self._flushing.cancel()
            await driver.close_consumer(consumer)

    # Reading

    async def poll(self, most: int, seconds: float) -> list[tuple[Place, list[KafkaRecord]]]:
        """The next records of the channel's own partitions; safe to cancel."""
        if not self._steady.is_set():
            await self._steady.wait()
        found = await self._consumer.getmany(timeout_ms=round(seconds * 1000), max_records=most)
        return [(place, records) for place, records in found.items() if place in self.trackers]

    def skip_to(self, place: Place, offset: int) -> None:
        """Read on from this offset."""
        self.trackers[place].skip_to(offset)
        if place.topic == self.topic:
            self._consumer.seek(place, offset)

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

    def settled(self, tracker: Tracker) -> None:
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
            self._flushing = loop.call_later(BATCH_WITHIN, self._dirty.set)

    async def _commit_by_need(self) -> None:
        while True:
            await self._dirty.wait()
            await self._steady.wait()
            self._dirty.clear()
            done = await self._commit()
            if not done:
                self._dirty.set()  # the next one takes it along
            await asyncio.sleep(COMMIT_EVERY if done else COMMIT_AGAIN)

    async def _commit(self) -> bool:
        """Commit every mark that moved; whether the coordinator has them."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._unsaved = 0
        news: dict[Place, Saved] = {}
        for place, tracker in self.trackers.items():
            if (unsaved := tracker.unsaved()) is not None:
                news[place] = unsaved
        if not news or self.broken is not None:
            return True
        try:
            async with asyncio.timeout(min(COMMIT_WITHIN, self._address.timeout)):
                await self._consumer.commit(
                    {place: OffsetAndMetadata(*saved) for place, saved in news.items()}
                )
        except DRIVER_ERRORS as error:
            # What is settled stays so in the trackers; without a commit it would come again only
            # if this consumer died now.
            logger.info("%s: a commit failed and is tried again: %r", self.group, error)
            self._tell_committed(error)
            return False
        self._tell_committed(None)
        for place, saved in news.items():
            if place in self.trackers:
                self.trackers[place].saved = saved
        return True

    # Rebalancing

    def _claim(self) -> Claim:
        """What this member tells the group's leader when it joins."""
        busy = frozenset(place for place in self.trackers if self._is_busy(place))
        given = frozenset(self._wanted) - busy
        owned = frozenset(self.trackers) - given
        return Claim(driver.generation_of(self._consumer), owned, busy, self._leaving)

    def _is_busy(self, place: Place) -> bool:
        """Whether another would handle something again if it had this partition now."""
        tracker = self.trackers[place]
        return tracker.held > 0 or tracker.unsaved() is not None

    def _deal(self, wanted: frozenset[Place]) -> None:
        now = asyncio.get_running_loop().time()
        self._wanted = {place: self._wanted.get(place, now) for place in wanted}
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

    async def assigned(self, places: Iterable[Place]) -> None:
        """A rebalance is over: go on where this consumer was, begin where it was not."""
        if self._left or self.broken is not None:
            return
        try:
            await self._take_over(set(places))
            self._moved()
        except Exception as error:  # the driver would log it, and nobody would ever be steady
            self.fail(lost(error, self.topic))
            return
        self._steady.set()
        self._dirty.set()
        self._changed()

    async def _take_over(self, places: set[Place]) -> None:
        for topic in (self.topic, self._retry):
            if not await self._cluster.look(topic):
                raise SubscriptionLost(
                    f"the topic {topic!r} was deleted", backend=BACKEND, operation="receive"
                )
        committed = await self._cluster.committed(self.group, (self.topic, self._retry))
        gone = set(self.trackers) - places
        moved_on = {
            place
            for place in places & set(self.trackers)
            if committed.get(place) != self.trackers[place].saved
        }
        self._lose([*gone, *moved_on])
        new = places - set(self.trackers)
        unknown = new - set(committed)
        starts = await self._starts(unknown, committed) if unknown else {}
        for place in new:
            saved = committed.get(place)
            if saved is not None:
                self.trackers[place] = Tracker(saved.offset, saved.metadata, saved)
            else:
                self.trackers[place] = Tracker(starts[place])
        for place, tracker in self.trackers.items():
            self._consumer.seek(place, tracker.end)
        self._pause()
        if self._from_end and unknown:
            # From here on the group receives, also if it is away when the next message comes.
            marks = {place: OffsetAndMetadata(starts[place], "") for place in unknown}
            async with asyncio.timeout(self._address.timeout):
                await self._consumer.commit(marks)
            for place in unknown:
                self.trackers[place].saved = Saved(starts[place])

    async def _starts(self, places: set[Place], committed: dict[Place, Saved]) -> dict[Place, int]:
        """Where to begin in partitions of which the group knows nothing.

        Partitions that were added later are read from their beginning: the group existed before.
        """
        starts: dict[Place, int] = {}
        for topic in {place.topic for place in places}:
            new = self._from_end and not any(place.topic == topic for place in committed)
            which = driver.LATEST if new else driver.EARLIEST
            for partition, offset in (await self._cluster.offsets(topic, which)).items():
                starts[TopicPartition(topic, partition)] = offset
        return starts

    def _pause(self) -> None:
        """The driver reads only the channel's own partitions, and none that is to be given up."""
        paused = [
            place
            for place in self.trackers
            if place.topic == self._retry or place in self._wanted or self._leaving
        ]
        with contextlib.suppress(*DRIVER_ERRORS):  # in the midst of a rebalance it has none
            self._consumer.pause(*paused)

    def _lose(self, places: Iterable[Place]) -> None:
        lost = [self.trackers.pop(place) for place in places if place in self.trackers]
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
                busy = [place for place in self._giving() if self._is_busy(place)]
                late = [place for place in busy if self._is_late(place, loop.time())]
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
            await asyncio.sleep(self._timing.heartbeat / 2)  # the round is under way by then

    def _giving(self) -> list[Place]:
        return [place for place in self.trackers if self._leaving or place in self._wanted]

    def _is_late(self, place: Place, now: float) -> bool:
        since = self._wanted.get(place)
        return not self._leaving and since is not None and now - since >= self._timing.drain

    def _let_go(self, places: list[Place]) -> None:
        """Its messages take too long: they come again to whoever has the partition next."""
        logger.warning(
            "%s: %d messages were not settled within %.0f s of a rebalance; another consumer gets "
            "them as well",
            self.group,
            sum(self.trackers[place].held for place in places),
            self._timing.drain,
        )
        self._lose(places)
        self._moved()
        self._changed()

    # Watching

    async def _watch(self) -> None:
        """Notice what the driver keeps to itself: a topic that is gone."""
        while True:
            await asyncio.sleep(WATCH_EVERY)
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
    found = error if isinstance(error, QueueError) else error_of(error, "receive", topic)
    if isinstance(found, SubscriptionLost | ConfigError):
        return found
    return SubscriptionLost(
        f"the subscription broke: {found.message}",
        backend=BACKEND,
        operation="receive",
        queue=topic,
        cause=error,
    )


def _listener(membership: Membership) -> Any:
    """The driver wants a class of its own kind."""

    class Rebalances(Listener):  # type: ignore[misc]  # the driver has no types
        async def on_partitions_revoked(self, revoked: Any) -> None:
            await membership.revoked()

        async def on_partitions_assigned(self, assigned: Any) -> None:
            await membership.assigned(assigned)

    return Rebalances()
