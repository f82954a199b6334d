"""The way out: records in batches through one idempotent producer that is never trusted for ever.

The driver tries a batch again until it arrives, in its place and without repeating it: that is what
idempotence is for. But it has no end to it. A batch that is not confirmed in time is given up here
together with its producer, so that it cannot arrive after its sender was told that it did not.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from qkit._internal.logging import logger
from qkit._internal.tasks import cancel_and_wait
from qkit.backends.kafka import driver
from qkit.backends.kafka.cluster import Cluster, not_found
from qkit.backends.kafka.connection import BACKEND, DRIVER_ERRORS, Address, error_of
from qkit.errors import BackendUnavailable, QueueError, SendTimeout

__all__ = ["Outgoing", "Placed", "Sending"]

BATCH_BYTES: Final = 512 << 10
STICKY_BYTES: Final = 16 << 10  # keyless records stay on one partition for so long, as Java's do
LOOK_EVERY: Final = 0.25
SLOW: Final = 0.5  # a send that takes longer may be to a topic that somebody deleted
FLUSH: Final = 1.0


class Outgoing(NamedTuple):
    """A record on its way to a topic; ``partition`` is none where its key decides."""

    key: bytes | None
    value: bytes
    headers: list[tuple[str, bytes]]
    partition: int | None = None


class Placed(NamedTuple):
    """Where a record went, and where the log of that partition begins."""

    partition: int
    offset: int
    log_start: int


class _Pack:
    """A batch of the driver's that is being filled, up to ``BATCH_BYTES``."""

    __slots__ = ("batch", "first", "numbers")

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.first: Any = None
        self.numbers: list[int] = []

    def add(self, number: int, record: Outgoing) -> bool:
        """Whether there was room; a record that is larger than a batch has one for itself."""
        key, value, headers, _ = record
        placed = self.batch.append(key=key, value=value, timestamp=None, headers=headers)
        if placed is None:
            return False
        self.numbers.append(number)
        if self.first is None:
            self.first = placed
        return True


class _Batch(NamedTuple):
    """Records that the driver has, by their numbers, and its word on them."""

    partition: int
    numbers: list[int]
    answer: asyncio.Future[Any]


class _Flight(NamedTuple):
    """A batch on its way: where to, since when, and for whom."""

    topic: str
    since: float
    answer: asyncio.Future[Any]


class Sending:
    """Everything this backend sends; returns once every in-sync replica has it."""

    def __init__(self, address: Address, cluster: Cluster) -> None:
        self._address = address
        self._cluster = cluster
        self._producer: Any = None
        self._making = asyncio.Lock()
        self._on_way: dict[Any, dict[asyncio.Future[Any], _Flight]] = {}  # by producer
        self._watching: asyncio.Task[None] | None = None
        self._sticky: dict[str, tuple[int, int]] = {}  # partition and bytes sent to it

    async def send(
        self, topic: str, records: Sequence[Outgoing], operation: str = "publish"
    ) -> list[Placed | QueueError]:
        """Where each record is now, or why it is not there.

        Raises ``QueueNotFound`` when the topic does not exist. Safe to cancel: what was on its way
        may arrive soon, and after a while it cannot any more.
        """
        if not records:
            return []
        partitions = await self._cluster.partitions(topic, operation)
        results: list[Placed | QueueError] = [_LOST] * len(records)
        batches: list[_Batch] = []
        producer = self._producer
        try:
            if producer is None:
                producer = await self._make()
            await self._hand_over(producer, topic, partitions, records, batches)
            for batch in batches:
                outcome = await _outcome(batch, operation, topic)
                if isinstance(outcome, QueueError):
                    self._cluster.forget(topic)
                    for number in batch.numbers:
                        results[number] = outcome
                else:
                    partition, offset, log_start = outcome
                    for at, number in enumerate(batch.numbers):
                        results[number] = Placed(partition, offset + at, log_start)
        except DRIVER_ERRORS as error:  # a producer that refuses a batch refuses all that follow
            _turn_away(batches)
            await self._retire(producer)
            raise error_of(error, operation, topic) from error
        except asyncio.CancelledError:
            _turn_away(batches)
            raise
        if driver.has_ended(producer):
            await self._retire(producer)
        return results

    async def _hand_over(
        self,
        producer: Any,
        topic: str,
        partitions: int,
        records: Sequence[Outgoing],
        batches: list[_Batch],
    ) -> None:
        """Give the records to the driver in batches by partition; adds each to ``batches``."""
        since = asyncio.get_running_loop().time()
        packs: dict[int, _Pack] = {}
        for number, record in enumerate(records):
            partition = self._partition(topic, partitions, record)
            pack = packs.get(partition)
            if pack is not None and pack.add(number, record):
                continue
            if pack is not None:  # full
                batches.append(await self._launch(producer, topic, partition, pack, since))
            pack = packs[partition] = _Pack(producer.create_batch())
            pack.add(number, record)
        for partition, pack in packs.items():
            batches.append(await self._launch(producer, topic, partition, pack, since))

    async def _launch(
        self, producer: Any, topic: str, partition: int, pack: _Pack, since: float
    ) -> _Batch:
        pack.batch.close()
        future, answer = await driver.send_batch(producer, pack.batch, pack.first, topic, partition)
        flight = _Flight(topic, since, answer)
        flights = self._on_way.get(producer)
        if flights is None:  # it was given up in between
            _give_up(future, flight, _given_up())
        else:  # a sender that goes away leaves its batch under watch
            flights[future] = flight
            future.add_done_callback(flights.pop)
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch(), name="qkit kafka unconfirmed")
        return _Batch(partition, pack.numbers, answer)

    def _partition(self, topic: str, partitions: int, record: Outgoing) -> int:
        if record.partition is not None:
            return record.partition
        if record.key is not None:
            return _partition_of(record.key, partitions)
        partition, sent = self._sticky.get(topic, (0, STICKY_BYTES))
        if sent >= STICKY_BYTES or partition >= partitions:
            partition, sent = (partition + 1) % partitions, 0
        self._sticky[topic] = partition, sent + len(record.value)
        return partition

    # What is not confirmed

    async def _watch(self) -> None:
        """Look after what is on its way, while there is any for long."""
        try:
            await asyncio.sleep(LOOK_EVERY)
            while any(self._on_way.values()):
                for producer, flights in list(self._on_way.items()):
                    await self._look_after(producer, list(flights.items()))
                await asyncio.sleep(LOOK_EVERY)
        finally:
            self._watching = None

    async def _look_after(
        self, producer: Any, flights: list[tuple[asyncio.Future[Any], _Flight]]
    ) -> None:
        now = asyncio.get_running_loop().time()
        if any(now - flight.since >= self._address.timeout for _, flight in flights):
            await self._retire(producer, error=_given_up())
            return
        slow = {flight.topic for _, flight in flights if now - flight.since >= SLOW}
        for topic in slow:
            with contextlib.suppress(QueueError):
                if not await self._cluster.look(topic):
                    # The driver would wait for somebody to make the topic again, and then send.
                    doomed = {future for future, flight in flights if flight.topic == topic}
                    await self._retire(producer, spare=doomed, error=not_found(topic, "publish"))
                    return

    # The producer

    async def _make(self) -> Any:
        async with self._making:
            if self._producer is None:
                producer = driver.create_nothing(
                    driver.Producer(
                        enable_idempotence=True,
                        acks="all",
                        linger_ms=0,
                        max_batch_size=BATCH_BYTES,
                        max_request_size=1 << 30,  # the codec and the topic have their limits
                        **self._address.options(),
                    )
                )
                try:
                    async with asyncio.timeout(self._address.timeout):
                        await producer.start()
                except BaseException:
                    await driver.close_producer(producer, flush=0.0)
                    raise
                self._on_way[producer] = {}
                self._producer = producer
            return self._producer

    async def _retire(
        self,
        producer: Any,
        *,
        error: QueueError | None = None,
        spare: Collection[asyncio.Future[Any]] | None = None,
    ) -> None:
        """Go on with another producer; what this one has not sent by then is never sent.

        With ``spare`` only those are given up at once; the others have a moment to be confirmed.
        """
        if self._producer is producer:
            self._producer = None
        flights = self._on_way.pop(producer, None)
        if flights is None:
            return  # somebody else does it
        others: set[asyncio.Future[Any]] = set()
        if spare is not None:
            others = set(flights) - set(spare)
        if others:
            await asyncio.wait(others, timeout=FLUSH)
        pending = [item for item in flights.items() if not item[0].done()]
        await driver.close_producer(producer, flush=0.0)
        for future, flight in pending:
            mine = spare is None or future in spare
            _give_up(future, flight, error if error and mine else _given_up())

    async def aclose(self) -> None:
        """Wait for what is on its way, and disconnect."""
        async with self._making:
            producer, self._producer = self._producer, None
        if producer is not None:
            self._on_way.pop(producer, None)
            await driver.close_producer(producer, flush=min(driver.CLOSING, self._address.timeout))
        if self._watching is not None:
            await cancel_and_wait([self._watching])


async def _outcome(batch: _Batch, operation: str, topic: str) -> Placed | QueueError:
    """Where the first record of a batch is, or why it is not there."""
    try:
        found = await batch.answer
    except QueueError as error:
        return error
    except DRIVER_ERRORS as error:
        logger.debug("%s: not sent: %r", topic, error)
        return error_of(error, operation, topic)
    return Placed(batch.partition, found.offset, max(0, found.log_start_offset or 0))


def _turn_away(batches: list[_Batch]) -> None:
    """Nobody waits for the answers any more; the batches stay under watch."""
    for batch in batches:
        if not batch.answer.cancel() and not batch.answer.cancelled():
            batch.answer.exception()  # else asyncio would complain that nobody looked


def _give_up(future: asyncio.Future[Any], flight: _Flight, error: QueueError) -> None:
    for waited in (future, flight.answer):
        if not waited.done():
            waited.set_exception(copy.copy(error))
    future.exception()  # the answer is for whoever waits, this one for nobody


def _given_up() -> SendTimeout:
    return SendTimeout(
        "Kafka did not confirm in time: the messages may or may not have arrived",
        backend=BACKEND,
        operation="publish",
    )


_LOST: Final = BackendUnavailable("not confirmed", backend=BACKEND, operation="publish")
_partition_of: Final = functools.lru_cache(4_096)(driver.partition_of)
