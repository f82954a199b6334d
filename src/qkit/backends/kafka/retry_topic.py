"""What waits for its time in a channel's retry topic: read ahead, delivered or sent on when due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
from qkit.backend import Delivery
from qkit.backends.kafka import codec, driver
from qkit.backends.kafka.codec import Facts, KafkaRecord, Origin
from qkit.backends.kafka.connection import DRIVER_ERRORS, Address
from qkit.backends.kafka.driver import Consumer
from qkit.backends.kafka.group import Place
from qkit.backends.kafka.offsets import Tracker
from qkit.backends.kafka.publisher import Outgoing, Placed, Sending
from qkit.backends.kafka.retry_tiers import Waiting, hop_at, tier_of
from qkit.errors import QueueError
from qkit.message import GROUP, Envelope

__all__ = ["Delays", "Item", "delayed"]

READ_AHEAD: Final = 1_000  # records of a tier that wait in memory; the others wait in the log
PARK: Final = 5.0
AGAIN: Final = 1.0  # seconds until a hop that failed is tried again


class Item:
    """A message that was read: where it lies, what it is, and whether somebody works on it."""

    __slots__ = ("_facts", "envelope", "held", "offset", "place", "tracker")

    def __init__(
        self, tracker: Tracker, place: Place, offset: int, envelope: Envelope, facts: Facts
    ) -> None:
        self.tracker = tracker
        self.place = place
        self.offset = offset
        self.envelope = envelope
        self.held: Delivery | None = None  # the delivery that somebody works on
        self._facts = facts

    @property
    def facts(self) -> Facts:
        """What its record says; where it lies is where it came from, unless it was sent on."""
        if self._facts.origin is None:
            topic, partition = self.place
            return self._facts._replace(origin=Origin(topic, partition, self.offset))
        return self._facts

    @property
    def pending(self) -> bool:
        """Whether it is this consumer's to deliver: not settled, purged, or gone to another."""
        tracker = self.tracker
        return not tracker.lost and tracker.pending.get(self.offset) is self


def delayed(
    envelope: Envelope, deliveries: int, due: float | None, now: float, facts: Facts
) -> Outgoing:
    """A record for the retry topic, in the tier where it waits next."""
    tier = tier_of(due - now) if due is not None else 0
    key, value, headers = codec.encode(
        envelope, deliveries=deliveries, facts=facts._replace(not_before=due)
    )
    return Outgoing(key, value, headers, tier)


class Delays:
    """Reads the tiers that this consumer has, and gives ``ready`` what is due.

    The group decides who has which tier, and keeps what is settled of it; reading is done by a
    consumer without a group, so that idle tiers never hold up the channel itself.
    """

    def __init__(
        self,
        address: Address,
        sending: Sending,
        *,
        topic: str,
        group: str | None,
        clock: Clock,
        ready: Callable[[Item], None],
        settled: Callable[[Tracker], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._address = address
        self._sending = sending
        self._topic = topic
        self._group = group  # none: a queue has one
        self._clock = clock
        self._ready = ready
        self._settled = settled
        self._ended = ended
        self._consumer: Any = None
        self._trackers: dict[Place, Tracker] = {}
        self._waiting: Waiting[Item] = Waiting()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect; reads once tiers are assigned."""
        self._consumer = driver.create_nothing(
            Consumer(
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                **self._address.options(),
            )
        )
        async with asyncio.timeout(self._address.timeout):
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

    def assign(self, trackers: Mapping[Place, Tracker]) -> None:
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
                await asyncio.sleep(AGAIN)

    def _seek(self) -> None:
        self._consumer.assign(list(self._trackers))
        for place, tracker in self._trackers.items():
            self._consumer.seek(place, tracker.end)

    async def _poll(self) -> list[tuple[Tracker, Sequence[KafkaRecord]]]:
        """Records, or nothing when something is due or was assigned; no record is lost by that."""
        trackers = self._trackers  # what is found belongs to those who asked, not to their heirs
        due = self._waiting.next_at
        seconds = PARK if due is None else min(PARK, max(0.0, due - self._clock.time()))
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
        return [(trackers[place], records) for place, records in found.items() if place in trackers]

    def _hold_back(self) -> None:
        """Read a tier on only while little of it waits here."""
        for place, tracker in self._trackers.items():
            full = len(tracker.pending) >= READ_AHEAD
            paused = place in self._consumer.paused()
            if full and not paused:
                self._consumer.pause(place)
            elif paused and len(tracker.pending) < READ_AHEAD // 2:
                self._consumer.resume(place)

    def _read(self, tracker: Tracker, found: KafkaRecord) -> None:
        if found.offset < tracker.end or tracker.lost:
            return
        if tracker.is_settled(found.offset):
            tracker.skip_to(found.offset + 1)
            return
        envelope, facts = codec.decode(found)
        if facts.removed is not None or (
            self._group is not None and not codec.for_group(envelope, self._group)
        ):
            tracker.skip_to(found.offset + 1)
            return
        place = found.topic, found.partition
        item = Item(tracker, place, found.offset, envelope, facts)
        tracker.read(found.offset, item)
        now = self._clock.time()
        if facts.not_before is None or facts.not_before <= now:
            self._ready(item)
        else:
            leaves = hop_at(found.partition, found.timestamp / 1000, facts.not_before)
            self._waiting.add(leaves, item)

    async def _let_go(self) -> None:
        """Deliver what is due; what has only sat out its tier hops to a lower one."""
        now = self._clock.time()
        hops: list[Item] = []
        for item in self._waiting.pop_due(now):
            if not item.pending:
                continue  # it was purged, or whoever has the tier now reads it again
            if item.facts.not_before is None or item.facts.not_before <= now:
                self._ready(item)
            else:
                hops.append(item)
        if hops:
            await self._hop(hops, now)

    async def _hop(self, items: list[Item], now: float) -> None:
        records = [self._next_stop(item, now) for item in items]
        try:
            results = await self._sending.send(self._topic, records, "release")
        except QueueError as error:
            results = [error] * len(items)
        for item, result in zip(items, results, strict=True):
            if isinstance(result, Placed):
                item.tracker.settle(item.offset)
                self._settled(item.tracker)
            else:
                self._waiting.add(now + AGAIN, item)

    def _next_stop(self, item: Item, now: float) -> Outgoing:
        if self._group is not None:  # every group of a topic sends its own copy on
            item.envelope.headers[GROUP] = self._group
        envelope = item.envelope
        return delayed(envelope, envelope.attempt - 1, item.facts.not_before, now, item.facts)
