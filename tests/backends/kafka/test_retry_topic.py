"""Consumer of the retry topic, with a fake driver."""

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
    """Driver consumer that returns the records once and then calls ``found``."""

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


def retry_consumer(on_due: Callable[[FetchedMessage], None]) -> RetryTopicConsumer:
    unused_publisher: Any = None
    return RetryTopicConsumer(
        ConnectionParameters("127.0.0.1:1"),
        unused_publisher,
        topic="q.retry",
        ordered_topic=None,
        group=None,
        clock=SystemClock(),
        on_due=on_due,
        on_settled=lambda tracker: None,
        on_task_done=lambda task: None,
    )


async def test_records_polled_before_a_tier_was_reassigned_are_ignored() -> None:
    """Otherwise offsets 40 to 49 would be committed without being delivered."""
    due: list[FetchedMessage] = []
    subject = retry_consumer(due.append)
    before, after = OffsetTracker(40), OffsetTracker(40)
    for offset in range(40, 50):
        before.read(offset)

    def rebalance() -> None:
        before.lost = True
        subject.assign({TIER: after})

    consumer = Consumer([Record(50, timestamp=round(time.time() * 1000))], rebalance)
    subject._consumer = consumer
    subject.assign({TIER: before})
    running = asyncio.create_task(subject._run())
    try:
        await eventually(lambda: consumer.polls == 2)
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert consumer.seeks == [50, 40], "must continue at the committed offset"
    assert (due, after.end, after.snapshot().offset) == ([], 40, 40)
