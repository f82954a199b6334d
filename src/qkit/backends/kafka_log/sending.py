"""The way out: records in batches through one idempotent producer that is never trusted for ever.

The driver tries a batch again until it arrives, in its place and without repeating it: that is what
idempotence is for. But it has no end to it. A batch that is not confirmed in time is given up here
together with its producer, so that it cannot arrive after its sender was told that it did not.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from qkit.backends.kafka_log import driver
from qkit.backends.kafka_log.cluster import Cluster, not_found
from qkit.backends.kafka_log.connection import (
    BACKEND,
    DRIVER_ERRORS,
    Address,
    error_of,
    translated,
)
from qkit.errors import BackendUnavailable, QueueError, SendTimeout
from qkit.logs import logger

__all__ = ["Outgoing", "Placed", "Sending"]

BATCH_BYTES: Final = 512 << 10
STICKY_BYTES: Final = 16 << 10  # keyless records stay on one partition for so long, as Java's do
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


class _Batch(NamedTuple):
    """Records that the driver has, by their numbers, and its word on them."""

    partition: int
    numbers: list[int]
    future: asyncio.Future[Any]


class Sending:
    """Everything this backend sends; returns once every in-sync replica has it."""

    def __init__(self, address: Address, cluster: Cluster) -> None:
        self._address = address
        self._cluster = cluster
        self._producer: Any = None
        self._making = asyncio.Lock()
        self._on_way: dict[Any, set[asyncio.Future[Any]]] = {}  # by producer
        self._sticky: dict[str, tuple[int, int]] = {}  # partition and bytes sent to it
        self._tasks: set[asyncio.Task[None]] = set()

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
        batches: list[_Batch] = []
        async with translated(operation, topic):
            producer = self._producer or await self._make()
            try:
                await self._hand_over(producer, topic, partitions, records, batches)
                await self._confirmed(producer, topic, batches, operation)
            except DRIVER_ERRORS:  # a producer that refuses a batch refuses all that follow
                await self._retire(producer)
                raise
            finally:
                self._let_go(producer, batches)
        results: list[Placed | QueueError] = [_LOST] * len(records)
        for batch in batches:
            outcome = _outcome(batch, operation, topic)
            for at, number in enumerate(batch.numbers):
                results[number] = (
                    outcome._replace(offset=outcome.offset + at)
                    if isinstance(outcome, Placed)
                    else outcome
                )
            if isinstance(outcome, QueueError):
                self._cluster.forget(topic)
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
        by_partition: dict[int, list[int]] = {}
        for number, record in enumerate(records):
            partition = self._partition(topic, partitions, record)
            by_partition.setdefault(partition, []).append(number)
        waiting = self._on_way.setdefault(producer, set())
        for partition, numbers in by_partition.items():
            for chosen, batch in _packed(producer, records, numbers):
                future = await producer.send_batch(batch, topic, partition=partition)
                waiting.add(future)
                batches.append(_Batch(partition, chosen, future))

    def _let_go(self, producer: Any, batches: list[_Batch]) -> None:
        """Nobody waits here any more; what is not confirmed, because of that, is watched."""
        pending = {batch.future for batch in batches if not batch.future.done()}
        waiting = self._on_way.get(producer)
        if waiting is not None:
            waiting.difference_update({batch.future for batch in batches} - pending)
        if pending:
            self._spawn(self._give_up_later(producer, pending))

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

    async def _confirmed(
        self, producer: Any, topic: str, batches: list[_Batch], operation: str
    ) -> None:
        """Wait for the confirmations; without them the producer is given up."""
        left = self._address.timeout
        futures = [batch.future for batch in batches]
        _, pending = await asyncio.wait(futures, timeout=min(SLOW, left))
        if not pending:
            return
        if not await self._cluster.look(topic):
            await self._retire(producer, flush=FLUSH, doomed=set(futures))
            raise not_found(topic, operation)
        _, pending = await asyncio.wait(futures, timeout=max(0.0, left - SLOW))
        if pending:
            await self._retire(producer)
            raise SendTimeout(
                f"Kafka did not confirm within {left:g} s: the messages may or may not have "
                "arrived",
                backend=BACKEND,
                operation=operation,
                queue=topic,
            )

    async def _give_up_later(self, producer: Any, futures: set[asyncio.Future[Any]]) -> None:
        """Nobody waits for these any more; they must not be tried for ever."""
        _, pending = await asyncio.wait(futures, timeout=self._address.timeout / 2)
        waiting = self._on_way.get(producer)
        if waiting is not None:
            waiting.difference_update(futures)
        if pending:
            await self._retire(producer)

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
                self._on_way[producer] = set()
                self._producer = producer
            return self._producer

    async def _retire(
        self,
        producer: Any,
        *,
        flush: float = 0.0,
        doomed: Iterable[asyncio.Future[Any]] = (),
    ) -> None:
        """Go on with another producer; what this one has not sent by then is never sent."""
        if self._producer is producer:
            self._producer = None
        waiting = self._on_way.pop(producer, None)
        if waiting is None:
            return  # somebody else does it
        others = waiting - set(doomed)
        if flush > 0 and others:
            await asyncio.wait(others, timeout=flush)
        await driver.close_producer(producer, flush=0.0)
        given_up = BackendUnavailable(
            "the connection was given up because Kafka did not confirm in time",
            backend=BACKEND,
            operation="publish",
        )
        for future in waiting:
            if not future.done():
                future.set_exception(given_up)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name="qkit kafka unconfirmed")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for what is on its way, and disconnect."""
        async with self._making:
            producer, self._producer = self._producer, None
        if producer is not None:
            self._on_way.pop(producer, None)
            await driver.close_producer(producer, flush=min(driver.CLOSING, self._address.timeout))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _packed(
    producer: Any, records: Sequence[Outgoing], numbers: list[int]
) -> Iterable[tuple[list[int], Any]]:
    """Batches of at most ``BATCH_BYTES``; a larger record has one for itself."""
    batch, chosen = producer.create_batch(), list[int]()
    for number in numbers:
        key, value, headers, _ = records[number]
        if batch.append(key=key, value=value, timestamp=None, headers=headers) is None:
            batch.close()
            yield chosen, batch
            batch, chosen = producer.create_batch(), []
            batch.append(key=key, value=value, timestamp=None, headers=headers)
        chosen.append(number)
    batch.close()
    yield chosen, batch


def _outcome(batch: _Batch, operation: str, topic: str) -> Placed | QueueError:
    try:
        found = batch.future.result()
    except QueueError as error:
        return error
    except DRIVER_ERRORS as error:
        logger.debug("%s: not sent: %r", topic, error)
        return error_of(error, operation, topic)
    return Placed(batch.partition, found.offset, max(0, found.log_start_offset or 0))


_LOST: Final = BackendUnavailable("not confirmed", backend=BACKEND, operation="publish")
_partition_of: Final = functools.lru_cache(4_096)(driver.partition_of)
