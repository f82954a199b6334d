"""Publishing: records in batches through one idempotent producer, replaced when unconfirmed.

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
from qkit.backends.common.reopened import Reopened
from qkit.backends.kafka import driver
from qkit.backends.kafka.cluster import Cluster, not_found
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.errors import BACKEND, DRIVER_ERRORS, to_queue_error
from qkit.errors import BackendUnavailable, QueueError, SendTimeout

__all__ = ["OutgoingRecord", "Publisher", "RecordMetadata"]

BATCH_BYTES: Final = 512 << 10
STICKY_BYTES: Final = 16 << 10  # keyless records stay on one partition for so long, as Java's do
CHECK_INTERVAL_SECONDS: Final = 0.25
SLOW_SEND_SECONDS: Final = 0.5  # a send that takes longer may be to a topic that somebody deleted
FLUSH_TIMEOUT_SECONDS: Final = 1.0


class OutgoingRecord(NamedTuple):
    """A record on its way to a topic; ``partition`` is none where its key decides."""

    key: bytes | None
    value: bytes
    headers: list[tuple[str, bytes]]
    partition: int | None = None


class RecordMetadata(NamedTuple):
    """Partition and offset of a confirmed record, and the first offset of that partition."""

    partition: int
    offset: int
    log_start: int


class _Batch:
    """Records of one partition, up to ``BATCH_BYTES``, from the first one to the confirmation."""

    __slots__ = ("answer", "builder", "first", "numbers", "since", "target")

    answer: asyncio.Future[Any]  # of the driver to the sender, once the batch was handed over

    def __init__(self, target: Partition, builder: Any, since: float) -> None:
        self.target = target
        self.builder = builder  # the driver's
        self.since = since
        self.first: Any = None  # the driver's metadata of the first record
        self.numbers: list[int] = []  # of the records, among those of the sender

    def add(self, number: int, record: OutgoingRecord) -> bool:
        """Whether there was room; a record that is larger than a batch has one for itself."""
        key, value, headers, _ = record
        metadata = self.builder.append(key=key, value=value, timestamp=None, headers=headers)
        if metadata is None:
            return False
        self.numbers.append(number)
        if self.first is None:
            self.first = metadata
        return True


class Publisher:
    """Sends every record of this backend; returns once every in-sync replica has it."""

    def __init__(self, parameters: ConnectionParameters, cluster: Cluster) -> None:
        self._parameters = parameters
        self._cluster = cluster
        self._shared = Reopened[Any](  # the producer; it is lost once it was retired
            self._make,
            lambda producer: producer not in self._in_flight,
            self._close,
            backend=BACKEND,
        )
        self._in_flight: dict[Any, dict[asyncio.Future[Any], _Batch]] = {}  # by producer
        self._watching: asyncio.Task[None] | None = None
        self._sticky: dict[str, tuple[int, int]] = {}  # partition and bytes sent to it

    def enable(self) -> None:
        """Allow callers to send."""
        self._shared.open()

    async def send(
        self, topic: str, records: Sequence[OutgoingRecord], operation: str = "publish"
    ) -> list[RecordMetadata | QueueError]:
        """Where each record is now, or why it is not there.

        Raises ``QueueNotFound`` when the topic does not exist. Safe to cancel: what was on its way
        may arrive soon, and after a while it cannot any more.
        """
        if not records:
            return []
        partitions = await self._cluster.partitions(topic, operation)
        results: list[RecordMetadata | QueueError] = [_NOT_CONFIRMED] * len(records)
        batches: list[_Batch] = []
        producer = self._shared.value
        try:
            if producer is None:
                producer = await self._shared.get()
            await self._hand_over(producer, topic, partitions, records, batches)
            for batch in batches:
                outcome = await _outcome(batch, operation)
                if isinstance(outcome, QueueError):
                    self._cluster.forget(topic)
                    for number in batch.numbers:
                        results[number] = outcome
                else:
                    partition, offset, log_start = outcome
                    for at, number in enumerate(batch.numbers):
                        results[number] = RecordMetadata(partition, offset + at, log_start)
        except DRIVER_ERRORS as error:  # a producer that refuses a batch refuses all that follow
            _turn_away(batches)
            await self._retire(producer)
            raise to_queue_error(error, operation, topic) from error
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
        records: Sequence[OutgoingRecord],
        batches: list[_Batch],
    ) -> None:
        """Give the records to the driver in batches by partition; adds each to ``batches``."""
        since = asyncio.get_running_loop().time()
        filling: dict[int, _Batch] = {}
        for number, record in enumerate(records):
            partition = record.partition
            if partition is None or partition >= partitions:
                partition = self.choose_partition(topic, partitions, record.key, len(record.value))
            batch = filling.get(partition)
            if batch is not None and batch.add(number, record):
                continue
            if batch is not None:  # full
                await self._launch(producer, batch, batches)
            target = Partition(topic, partition)
            batch = filling[partition] = _Batch(target, producer.create_batch(), since)
            batch.add(number, record)
        for batch in filling.values():
            await self._launch(producer, batch, batches)

    async def _launch(self, producer: Any, batch: _Batch, batches: list[_Batch]) -> None:
        batch.builder.close()
        future, batch.answer = await driver.send_batch(
            producer, batch.builder, batch.first, batch.target
        )
        batches.append(batch)
        in_flight = self._in_flight.get(producer)
        if in_flight is None:  # it was given up in between
            _give_up(future, batch, _given_up())
            return
        in_flight[future] = batch  # a sender that goes away leaves its batch under watch
        future.add_done_callback(in_flight.pop)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="qkit kafka unconfirmed")

    def choose_partition(self, topic: str, partitions: int, key: bytes | None, size: int) -> int:
        """Choose the partition of a record.

        Args:
            topic: The topic.
            partitions: How many it has.
            key: Key of the record. Records without one stay on a partition for some kilobytes.
            size: Bytes of the record's value.
        """
        if key is not None:
            return _partition_of(key, partitions)
        partition, sent = self._sticky.get(topic, (0, STICKY_BYTES))
        if sent >= STICKY_BYTES or partition >= partitions:
            partition, sent = (partition + 1) % partitions, 0
        self._sticky[topic] = partition, sent + size
        return partition

    # What is not confirmed

    async def _watch(self) -> None:
        """Look after what is on its way, while there is any for long."""
        try:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            while any(self._in_flight.values()):
                for producer, in_flight in list(self._in_flight.items()):
                    await self._look_after(producer, list(in_flight.items()))
                await asyncio.sleep(CHECK_INTERVAL_SECONDS)
        finally:
            self._watching = None

    async def _look_after(
        self, producer: Any, in_flight: list[tuple[asyncio.Future[Any], _Batch]]
    ) -> None:
        now = asyncio.get_running_loop().time()
        late = {
            future for future, batch in in_flight if now - batch.since >= self._parameters.timeout
        }
        if late:
            await self._retire(producer, doomed=late, error=_given_up())
            return
        slow = {
            batch.target.topic for _, batch in in_flight if now - batch.since >= SLOW_SEND_SECONDS
        }
        for topic in slow:
            with contextlib.suppress(QueueError):
                if not await self._cluster.look(topic):
                    # The driver would wait for somebody to make the topic again, and then send.
                    doomed = {future for future, batch in in_flight if batch.target.topic == topic}
                    await self._retire(producer, doomed=doomed, error=not_found(topic, "publish"))
                    return

    # The producer

    async def _make(self) -> Any:
        producer = driver.create_nothing(
            driver.Producer(
                enable_idempotence=True,
                acks="all",
                linger_ms=0,
                max_batch_size=BATCH_BYTES,
                max_request_size=1 << 30,  # the codec and the topic have their limits
                **self._parameters.options(),
            )
        )
        try:
            async with asyncio.timeout(self._parameters.timeout):
                await producer.start()
        except BaseException:
            await driver.close_producer(producer, flush=0.0)
            raise
        self._in_flight[producer] = {}
        return producer

    async def _close(self, producer: Any) -> None:
        self._in_flight.pop(producer, None)
        await driver.close_producer(
            producer, flush=min(driver.CLOSE_TIMEOUT_SECONDS, self._parameters.timeout)
        )

    async def _retire(
        self,
        producer: Any,
        *,
        doomed: Collection[asyncio.Future[Any]] | None = None,
        error: QueueError | None = None,
    ) -> None:
        """Go on with another producer; what this one has not sent by then is never sent.

        Args:
            producer: The producer to give up.
            doomed: Batches that cannot be confirmed; the others have a moment to be. By default
                all are given up at once.
            error: What the senders of ``doomed`` get.
        """
        self._shared.forget(producer)
        in_flight = self._in_flight.pop(producer, None)
        if in_flight is None:
            return  # another caller does it
        if doomed is not None and (others := set(in_flight) - set(doomed)):
            await asyncio.wait(others, timeout=FLUSH_TIMEOUT_SECONDS)
        pending = [item for item in in_flight.items() if not item[0].done()]
        await driver.close_producer(producer, flush=0.0)
        for future, batch in pending:
            mine = doomed is None or future in doomed
            _give_up(future, batch, error if error and mine else _given_up())

    async def aclose(self) -> None:
        """Wait for what is on its way, and disconnect."""
        await self._shared.aclose()
        if self._watching is not None:
            await cancel_and_wait([self._watching])


async def _outcome(batch: _Batch, operation: str) -> RecordMetadata | QueueError:
    """Where the first record of a batch is, or why it is not there."""
    topic, partition = batch.target
    try:
        found = await batch.answer
    except QueueError as error:
        return error
    except DRIVER_ERRORS as error:
        logger.debug("%s: not sent: %r", topic, error)
        return to_queue_error(error, operation, topic)
    return RecordMetadata(partition, found.offset, max(0, found.log_start_offset or 0))


def _turn_away(batches: list[_Batch]) -> None:
    """Nobody waits for the answers any more; the batches stay under watch."""
    for batch in batches:
        if not batch.answer.cancel() and not batch.answer.cancelled():
            batch.answer.exception()  # else asyncio would complain that nobody looked


def _give_up(future: asyncio.Future[Any], batch: _Batch, error: QueueError) -> None:
    for waited in (future, batch.answer):
        if not waited.done():
            waited.set_exception(copy.copy(error))
    future.exception()  # the answer is for whoever waits, this one for nobody


def _given_up() -> SendTimeout:
    return SendTimeout(
        "Kafka did not confirm in time: the messages may or may not have arrived",
        backend=BACKEND,
        operation="publish",
    )


_NOT_CONFIRMED: Final = BackendUnavailable("not confirmed", backend=BACKEND, operation="publish")
_partition_of: Final = functools.lru_cache(4_096)(driver.partition_of)
