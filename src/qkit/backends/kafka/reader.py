"""Reader of offset ranges, without a consumer group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from qkit.backends.kafka import driver
from qkit.backends.kafka.codec import KafkaRecord
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Consumer, Partition
from qkit.backends.kafka.errors import translate_errors

__all__ = ["PartitionReader"]

MAX_RECORDS_PER_POLL: Final = 1_000


class PartitionReader:
    """Reader of offset ranges of partitions; concurrent reads run one after another."""

    def __init__(self, parameters: ConnectionParameters) -> None:
        self._parameters = parameters
        self._consumer: Any = None
        self._lock = asyncio.Lock()

    async def read(
        self, ranges: Mapping[Partition, tuple[int, int]], operation: str, limit: int | None = None
    ) -> list[KafkaRecord]:
        """Return the records of offset ranges, in order within each partition.

        Args:
            ranges: For each partition, the first offset and the offset after the last.
            operation: Name of the operation, for errors.
            limit: Maximum number of records per partition; no limit by default.
        """
        wanted = {partition: span for partition, span in ranges.items() if span[0] < span[1]}
        if not wanted:
            return []
        found: list[KafkaRecord] = []
        counts = dict.fromkeys(wanted, 0)
        async with self._open_consumer(operation) as consumer:
            consumer.assign(list(wanted))
            for partition, (first, _) in wanted.items():
                consumer.seek(partition, first)
            while wanted:
                batches = await consumer.getmany(
                    *wanted, timeout_ms=500, max_records=MAX_RECORDS_PER_POLL
                )
                for partition, records in batches.items():
                    for item in records:
                        full = limit is not None and counts[partition] >= limit
                        if item.offset >= wanted[partition][1] or full:
                            break
                        found.append(item)
                        counts[partition] += 1
                for partition in list(wanted):
                    # Check the position, because the last offsets of a range may have no record.
                    position = await consumer.position(partition)
                    if position >= wanted[partition][1] or (
                        limit is not None and counts[partition] >= limit
                    ):
                        del wanted[partition]
                        consumer.pause(partition)
        return found

    @asynccontextmanager
    async def _open_consumer(self, operation: str) -> AsyncGenerator[Any, None]:
        """Yield the shared consumer; create it if necessary, and close it after an error."""
        with translate_errors(operation):
            async with self._lock:
                consumer = self._consumer
                try:
                    async with asyncio.timeout(self._parameters.timeout):
                        if consumer is None:
                            consumer = driver.disable_topic_creation(
                                Consumer(
                                    group_id=None,
                                    enable_auto_commit=False,
                                    auto_offset_reset="earliest",
                                    fetch_max_wait_ms=50,
                                    **self._parameters.options(),
                                )
                            )
                            await consumer.start()
                        yield consumer
                    self._consumer = consumer
                except BaseException:
                    self._consumer = None
                    if consumer is not None:
                        await driver.close_consumer(consumer)
                    raise

    async def aclose(self) -> None:
        """Disconnect, after a read in progress has ended."""
        async with self._lock:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                await driver.close_consumer(consumer)
