"""The reader of the waiting room, with a driver that answers as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from qkit._internal.clock import SystemClock
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.fetched_message import FetchedMessage
from qkit.backends.kafka.offsets import OffsetTracker
from qkit.backends.kafka.retry_topic import RetryTopicConsumer
from tests.support.waiting import eventually

TIER = Partition("q.retry", 0)


class Record(NamedTuple):
    offset: int
    topic: str = "q.retry"
    partition: int = 0
    timestamp: int = 0
    key: bytes | None = None
    value: bytes = b"{}"
    headers: tuple[tuple[str, bytes], ...] = ()


class Consumer:
    """Finds what it is told, once; ``found`` is called when the answer is on its way."""

    def __init__(self, records: list[Record], found: Callable[[], None]) -> None:
        self._records = records
        self._found = found
        self.seeks: list[int] = []
        self.polls = 0

    def assign(self, partitions: Any) -> None: ...

    def seek(self, partition: Any, offset: int) -> None:
        self.seeks.append(offset)

    def paused(self) -> set[Any]:
        return set()

    async def getmany(self, **options: Any) -> dict[Any, list[Record]]:
        self.polls += 1
        if self.polls > 1:
            await asyncio.Event().wait()
        asyncio.get_running_loop().call_soon(self._found)
        return {TIER: self._records}


def reader(ready: Callable[[FetchedMessage], None]) -> RetryTopicConsumer:
    nobody: Any = None
    return RetryTopicConsumer(
        ConnectionParameters("127.0.0.1:1"),
        nobody,
        topic="q.retry",
        group=None,
        clock=SystemClock(),
        ready=ready,
        settled=lambda tracker: None,
        ended=lambda task: None,
    )


async def test_what_was_read_before_a_tier_came_back_is_not_taken_for_what_is_read_now() -> None:
    """Otherwise all that lies between the two would be committed and never delivered."""
    ready: list[FetchedMessage] = []
    delays = reader(ready.append)
    before, after = OffsetTracker(40), OffsetTracker(40)
    for offset in range(40, 50):
        before.read(offset)

    def rebalance() -> None:
        before.lost = True
        delays.assign({TIER: after})

    consumer = Consumer([Record(50, timestamp=round(time.time() * 1000))], rebalance)
    delays._consumer = consumer
    delays.assign({TIER: before})
    running = asyncio.create_task(delays._run())
    try:
        await eventually(lambda: consumer.polls == 2)
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert consumer.seeks == [50, 40], "it begins again where the group is"
    assert (ready, after.end, after.snapshot().offset) == ([], 40, 40)
