"""Looking into topics without consuming: a reader without a group, one look at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from qkit.backends.kafka import driver
from qkit.backends.kafka.codec import KafkaRecord
from qkit.backends.kafka.connection import Address
from qkit.backends.kafka.driver import Consumer
from qkit.backends.kafka.errors import translated

__all__ = ["Reader"]

Place = Any  # the driver's TopicPartition
ROUND: Final = 1_000


class Reader:
    """Reads ranges of partitions, in their order."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._consumer: Any = None
        self._turn = asyncio.Lock()

    async def read(
        self, ranges: Mapping[Place, tuple[int, int]], operation: str, most: int | None = None
    ) -> list[KafkaRecord]:
        """The records from the first offset of each range up to, not including, the second.

        ``most`` is how many of each partition are enough.
        """
        wanted = {place: span for place, span in ranges.items() if span[0] < span[1]}
        if not wanted:
            return []
        found: list[KafkaRecord] = []
        counts = dict.fromkeys(wanted, 0)
        async with self._looking(operation) as consumer:
            consumer.assign(list(wanted))
            for place, (first, _) in wanted.items():
                consumer.seek(place, first)
            while wanted:
                batches = await consumer.getmany(*wanted, timeout_ms=500, max_records=ROUND)
                for place, records in batches.items():
                    for item in records:
                        enough = most is not None and counts[place] >= most
                        if item.offset >= wanted[place][1] or enough:
                            break
                        found.append(item)
                        counts[place] += 1
                for place in list(wanted):
                    # Not every offset has a record: the position tells how far it has come.
                    position = await consumer.position(place)
                    if position >= wanted[place][1] or (most is not None and counts[place] >= most):
                        del wanted[place]
                        consumer.pause(place)
        return found

    @asynccontextmanager
    async def _looking(self, operation: str) -> AsyncGenerator[Any, None]:
        async with translated(operation), self._turn:
            consumer = self._consumer
            try:
                async with asyncio.timeout(self._address.timeout):
                    if consumer is None:
                        consumer = driver.create_nothing(
                            Consumer(
                                group_id=None,
                                enable_auto_commit=False,
                                auto_offset_reset="earliest",
                                fetch_max_wait_ms=50,
                                **self._address.options(),
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
