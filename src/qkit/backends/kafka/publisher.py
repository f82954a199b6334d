"""Publisher with one idempotent producer, which is replaced if a batch is not confirmed in time.

The driver retries a batch until it is confirmed, without duplicates and in order, but without a
time limit. Closing the producer of a late batch ends these retries, so the batch is not sent again
after the sender has received an error.
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
STICKY_BYTES: Final = 16 << 10  # then records without a key go to another partition
CHECK_INTERVAL_SECONDS: Final = 0.25
SLOW_SEND_SECONDS: Final = 0.5  # after this time, check whether the topic still exists
FLUSH_TIMEOUT_SECONDS: Final = 1.0  # for the other batches of a producer that is replaced


class OutgoingRecord(NamedTuple):
    """Record to send; if ``partition`` is ``None``, the publisher chooses one."""

    key: bytes | None
    value: bytes
    headers: list[tuple[str, bytes]]
    partition: int | None = None


class RecordMetadata(NamedTuple):
    """Partition and last offset of a confirmed batch, and the first offset of that partition."""

    partition: int
    offset: int
    log_start: int


class _Batch:
    """Records of one partition, up to ``BATCH_BYTES``, that are sent and confirmed together.

    Args:
        target: Partition to send to.
        builder: The driver's batch builder.
        since: Event loop time at which the send began, in seconds.
    """

    __slots__ = ("answer", "builder", "first", "indexes", "since", "target")

    answer: asyncio.Future[Any]  # result of the first record; set when the batch is sent

    def __init__(self, target: Partition, builder: Any, since: float) -> None:
        self.target = target
        self.builder = builder
        self.since = since
        self.first: Any = None  # the driver's metadata of the first record
        self.indexes: list[int] = []  # indexes of the records in the arguments of ``send``

    def add(self, index: int, record: OutgoingRecord) -> bool:
        """Add a record; return false if the batch is full.

        A record that is larger than ``BATCH_BYTES`` is accepted if it is the first.
        """
        key, value, headers, _ = record
        metadata = self.builder.append(key=key, value=value, timestamp=None, headers=headers)
        if metadata is None:
            return False
        self.indexes.append(index)
        if self.first is None:
            self.first = metadata
        return True


class Publisher:
    """Publisher of all records of this backend, which every in-sync replica confirms.

    Args:
        parameters: Connection parameters; ``timeout`` limits the wait for a confirmation.
        cluster: Client for looking up topics.
    """

    def __init__(self, parameters: ConnectionParameters, cluster: Cluster) -> None:
        self._parameters = parameters
        self._cluster = cluster
        self._shared = Reopened[Any](  # the current producer
            self._make,
            lambda producer: producer not in self._in_flight,
            self._close,
            backend=BACKEND,
        )
        # Unconfirmed batches by producer.
        self._in_flight: dict[Any, dict[asyncio.Future[Any], _Batch]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._sticky: dict[str, tuple[int, int]] = {}  # topic: partition, bytes sent to it

    def enable(self) -> None:
        """Allow ``send`` to connect."""
        self._shared.open()

    async def send(
        self, topic: str, records: Sequence[OutgoingRecord], operation: str = "publish"
    ) -> list[RecordMetadata | QueueError]:
        """Send records to a topic; return the metadata or the error of each record's batch.

        Safe to cancel. Records that were already passed to the driver may still be written.

        Raises:
            QueueNotFound: The topic does not exist.
            QueueError: The producer failed or could not be created.
            LifecycleError: The cluster was connected in another event loop.
        """
        if not records:
            return []
        if self._cluster.loop is not asyncio.get_running_loop():
            self._cluster.check_loop(operation)
        partitions = await self._cluster.partitions(topic, operation)
        results: list[RecordMetadata | QueueError] = [_NOT_CONFIRMED] * len(records)
        batches: list[_Batch] = []
        producer = self._shared.value
        try:
            if producer is None:
                producer = await self._shared.get()
            await self._send_batches(producer, topic, partitions, records, batches)
            for batch in batches:
                outcome = await _outcome(batch, operation)
                if isinstance(outcome, QueueError):
                    self._cluster.invalidate(topic)
                for index in batch.indexes:
                    results[index] = outcome
        except DRIVER_ERRORS as error:  # a producer that rejects a batch also rejects later ones
            _discard_answers(batches)
            await self._retire(producer)
            raise to_queue_error(error, operation, topic) from error
        except asyncio.CancelledError:
            _discard_answers(batches)
            raise
        if driver.has_ended(producer):
            await self._retire(producer)
        return results

    async def _send_batches(
        self,
        producer: Any,
        topic: str,
        partitions: int,
        records: Sequence[OutgoingRecord],
        batches: list[_Batch],
    ) -> None:
        """Group records into batches by partition, send them, and append them to ``batches``."""
        since = asyncio.get_running_loop().time()
        open_batches: dict[int, _Batch] = {}
        for index, record in enumerate(records):
            partition = record.partition
            if partition is None or partition >= partitions:
                partition = self.choose_partition(topic, partitions, record.key, len(record.value))
            batch = open_batches.get(partition)
            if batch is not None and batch.add(index, record):
                continue
            if batch is not None:  # full
                await self._send_batch(producer, batch, batches)
            target = Partition(topic, partition)
            batch = open_batches[partition] = _Batch(target, producer.create_batch(), since)
            batch.add(index, record)
        for batch in open_batches.values():
            await self._send_batch(producer, batch, batches)

    async def _send_batch(self, producer: Any, batch: _Batch, batches: list[_Batch]) -> None:
        batch.builder.close()
        future, batch.answer = await driver.send_batch(
            producer, batch.builder, batch.first, batch.target
        )
        batches.append(batch)
        in_flight = self._in_flight.get(producer)
        if in_flight is None:  # the producer was retired meanwhile
            _fail(future, batch, _not_confirmed_in_time())
            return
        # ``_watch`` checks the batch until it is confirmed, even if ``send`` is cancelled.
        in_flight[future] = batch
        future.add_done_callback(in_flight.pop)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="qkit kafka unconfirmed")

    def choose_partition(self, topic: str, partitions: int, key: bytes | None, size: int) -> int:
        """Choose the partition of a record.

        Args:
            topic: Name of the topic.
            partitions: Number of partitions of the topic.
            key: Key of the record. Records without a key change partition every 16 KiB.
            size: Size of the record's value in bytes.
        """
        if key is not None:
            return _partition_of(key, partitions)
        partition, sent = self._sticky.get(topic, (0, STICKY_BYTES))
        if sent >= STICKY_BYTES or partition >= partitions:
            partition, sent = (partition + 1) % partitions, 0
        self._sticky[topic] = partition, sent + size
        return partition

    # Unconfirmed batches

    async def _watch(self) -> None:
        """Check unconfirmed batches at intervals until none remains."""
        try:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            while any(self._in_flight.values()):
                for producer, in_flight in list(self._in_flight.items()):
                    await self._check_in_flight(producer, list(in_flight.items()))
                await asyncio.sleep(CHECK_INTERVAL_SECONDS)
        finally:
            self._watching = None

    async def _check_in_flight(
        self, producer: Any, in_flight: list[tuple[asyncio.Future[Any], _Batch]]
    ) -> None:
        """Retire the producer if a batch is late or its topic was deleted."""
        now = asyncio.get_running_loop().time()
        late = {
            future for future, batch in in_flight if now - batch.since >= self._parameters.timeout
        }
        if late:
            await self._retire(producer, failed=late, error=_not_confirmed_in_time())
            return
        slow = {
            batch.target.topic for _, batch in in_flight if now - batch.since >= SLOW_SEND_SECONDS
        }
        for topic in slow:
            with contextlib.suppress(QueueError):
                if not await self._cluster.count_partitions(topic):
                    # The driver would wait until the topic exists again, and then send the batch.
                    failed = {future for future, batch in in_flight if batch.target.topic == topic}
                    await self._retire(producer, failed=failed, error=not_found(topic, "publish"))
                    return

    # The producer

    async def _make(self) -> Any:
        producer = driver.disable_topic_creation(
            driver.Producer(
                enable_idempotence=True,
                acks="all",
                linger_ms=0,
                max_batch_size=BATCH_BYTES,
                max_request_size=1 << 30,  # high, because codec and topic limit the size
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
        failed: Collection[asyncio.Future[Any]] | None = None,
        error: QueueError | None = None,
    ) -> None:
        """Close a producer, so that the next send opens another; unconfirmed batches fail.

        Args:
            producer: Producer to close.
            failed: Futures of the batches that fail with ``error``. The other batches have
                ``FLUSH_TIMEOUT_SECONDS`` to be confirmed. By default all batches fail immediately.
            error: Error for ``failed``; ``SendTimeout`` by default and for the other batches.
        """
        self._shared.forget(producer)
        in_flight = self._in_flight.pop(producer, None)
        if in_flight is None:
            return  # another call is already closing it
        if failed is not None and (others := set(in_flight) - set(failed)):
            await asyncio.wait(others, timeout=FLUSH_TIMEOUT_SECONDS)
        pending = [item for item in in_flight.items() if not item[0].done()]
        await driver.close_producer(producer, flush=0.0)
        for future, batch in pending:
            has_failed = failed is None or future in failed
            _fail(future, batch, error if error and has_failed else _not_confirmed_in_time())

    async def aclose(self) -> None:
        """Wait a limited time for unconfirmed batches, then disconnect."""
        await self._shared.aclose()
        if self._watching is not None:
            await cancel_and_wait([self._watching])


async def _outcome(batch: _Batch, operation: str) -> RecordMetadata | QueueError:
    """Wait for a batch to be confirmed or fail; return its metadata or its error."""
    topic, partition = batch.target
    try:
        found = await batch.answer
    except QueueError as error:
        return error
    except DRIVER_ERRORS as error:
        logger.debug("%s: could not send a batch: %r", topic, error)
        return to_queue_error(error, operation, topic)
    last_offset = found.offset + len(batch.indexes) - 1
    return RecordMetadata(partition, last_offset, max(0, found.log_start_offset or 0))


def _discard_answers(batches: list[_Batch]) -> None:
    """Discard the results of batches; ``_watch`` still checks the batches themselves."""
    for batch in batches:
        if not batch.answer.cancel() and not batch.answer.cancelled():
            batch.answer.exception()  # mark it as retrieved, or asyncio logs it


def _fail(future: asyncio.Future[Any], batch: _Batch, error: QueueError) -> None:
    for pending in (future, batch.answer):
        if not pending.done():
            pending.set_exception(copy.copy(error))
    future.exception()  # mark it as retrieved, because ``send`` awaits only the other future


def _not_confirmed_in_time() -> SendTimeout:
    return SendTimeout(
        "Kafka did not confirm the messages in time; they may or may not have been written",
        backend=BACKEND,
        operation="publish",
    )


_NOT_CONFIRMED: Final = BackendUnavailable(
    "the message was not confirmed", backend=BACKEND, operation="publish"
)
_partition_of: Final = functools.lru_cache(4_096)(driver.partition_of)
