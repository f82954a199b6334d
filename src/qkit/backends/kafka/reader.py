"""Read ranges of partitions without a group, one call at a time."""

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
    """Reads ranges of partitions, in their order."""

    def __init__(self, parameters: ConnectionParameters) -> None:
        self._parameters = parameters
        self._consumer: Any = None
        self._turn = asyncio.Lock()

    async def read(
        self, ranges: Mapping[Partition, tuple[int, int]], operation: str, most: int | None = None
    ) -> list[KafkaRecord]:
        """The records from the first offset of each range up to, not including, the second.

        ``most`` is how many of each partition are enough.
        """
        wanted = {partition: span for partition, span in ranges.items() if span[0] < span[1]}
        if not wanted:
            return []
        found: list[KafkaRecord] = []
        counts = dict.fromkeys(wanted, 0)
        async with self._looking(operation) as consumer:
            consumer.assign(list(wanted))
            for partition, (first, _) in wanted.items():
                consumer.seek(partition, first)
            while wanted:
                batches = await consumer.getmany(
                    *wanted, timeout_ms=500, max_records=MAX_RECORDS_PER_POLL
                )
                for partition, records in batches.items():
                    for item in records:
                        enough = most is not None and counts[partition] >= most
                        if item.offset >= wanted[partition][1] or enough:
                            break
                        found.append(item)
                        counts[partition] += 1
                for partition in list(wanted):
                    # Not every offset has a record: the position tells how far it has come.
                    position = await consumer.position(partition)
                    if position >= wanted[partition][1] or (
                        most is not None and counts[partition] >= most
                    ):
                        del wanted[partition]
                        consumer.pause(partition)
        return found

    @asynccontextmanager
    async def _looking(self, operation: str) -> AsyncGenerator[Any, None]:
        async with translate_errors(operation), self._turn:
            consumer = self._consumer
            try:
                async with asyncio.timeout(self._parameters.timeout):
                    if consumer is None:
                        consumer = driver.create_nothing(
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
        """Disconnect."""
        async with self._turn:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                await driver.close_consumer(consumer)
