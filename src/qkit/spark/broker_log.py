"""Stream source for a broker with a log: reads by offset, without a consumer group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qkit._internal.clock import SystemClock
from qkit._internal.loop_thread import LoopThread
from qkit.backend import Log
from qkit.backends.factory import open_backend
from qkit.errors import QueueNotFound, StorageError
from qkit.message import Envelope
from qkit.spark import rows
from qkit.spark.existing import exists
from qkit.spark.options import Plan

if TYPE_CHECKING:
    import pyarrow as pa

    from qkit.backend import Backend

__all__ = ["BrokerLog", "Span", "read"]

OFFSETS_PER_TASK: Final = 50_000
OFFSETS_PER_READ: Final = 5_000

Offsets = dict[str, int]  # keys: partition numbers, as strings because the checkpoint is JSON


class Span(NamedTuple):
    """Range of offsets of one partition, for one task; ``last`` is exclusive."""

    partition: int
    first: int
    last: int


class BrokerLog:
    """Source whose Spark offsets are the offsets of the broker's partitions.

    The broker's retention limits how far back a stream can start.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop: LoopThread | None = None
        self._stop: Offsets | None = None  # set by ``limit_to_available``

    def initial(self) -> dict[str, Any]:
        """Return the first or the end offset of each partition, according to ``starting``."""
        index = 0 if self._plan.starting == "earliest" else 1
        bounds = self._bounds()
        return {"offsets": {str(partition): span[index] for partition, span in bounds.items()}}

    def limit_to_available(self) -> None:
        """Limit the stream to the messages that are available now."""
        self._stop = {str(partition): span[1] for partition, span in self._bounds().items()}

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """Return the end of the next batch: at most ``limit`` offsets over all partitions.

        Raises:
            StorageError: The log no longer contains the offsets of ``start``.
        """
        offsets: Offsets = dict(start["offsets"])
        bounds = self._bounds()
        for partition, (first, end) in bounds.items():
            offset = offsets.setdefault(str(partition), first)
            if offset < first:
                raise self._storage_error(
                    f"partition {partition} starts at offset {first}, but this stream is at offset "
                    f"{offset}: the broker deleted the messages between them. Start again with a "
                    "new checkpoint, and increase the retention of the topic"
                )
            if offset > end:
                raise self._storage_error(
                    f"partition {partition} ends at offset {end}, but this stream is at offset "
                    f"{offset}: the topic was deleted and recreated. Start again with a new "
                    "checkpoint"
                )
        ends = {str(partition): end for partition, (_, end) in bounds.items()}
        if self._stop is not None:
            ends = {
                partition: min(end, self._stop.get(partition, 0)) for partition, end in ends.items()
            }
        available = {partition: max(0, end - offsets[partition]) for partition, end in ends.items()}
        for name, count in _shares(available, limit).items():
            offsets[name] += count
        return {"offsets": offsets}

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[Span]:
        """Return the ranges between two offsets, split for tasks."""
        begins: Offsets = start["offsets"]
        found: list[Span] = []
        for partition, last in sorted(end["offsets"].items()):
            begin = begins.get(partition)
            if begin is None:  # the partition was added after ``start``
                begin = self._bounds()[int(partition)][0]
            found += [
                Span(int(partition), first, min(first + OFFSETS_PER_TASK, last))
                for first in range(begin, last, OFFSETS_PER_TASK)
            ]
        return found

    def commit(self, end: Mapping[str, Any]) -> None:
        """Do nothing: the broker's retention decides what is deleted."""

    def close(self) -> None:
        """Stop the event-loop thread; no connection stays open between calls."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _storage_error(self, text: str) -> StorageError:
        return StorageError(text, operation="read", queue=self._plan.channel)

    def _bounds(self) -> dict[int, tuple[int, int]]:
        if self._loop is None:
            self._loop = LoopThread("qkit-spark")
        return self._loop.call(self._fetch_bounds)

    async def _fetch_bounds(self) -> dict[int, tuple[int, int]]:
        backend = _backend_of(self._plan)
        await backend.start()
        try:
            assert isinstance(backend, Log)
            return await backend.bounds(self._plan.queue)
        except QueueNotFound:
            if await exists(backend, self._plan):
                raise
            return {}  # there is no dead-letter topic yet; its partitions are found later
        finally:
            await backend.aclose()


def read(plan: Plan, span: Span) -> Iterator[pa.RecordBatch]:
    """Read the rows of one range; runs in a task.

    The log contains a retried message once per attempt; only the first copy is returned.
    """
    return rows.batches(_messages(plan, span), plan)


def _messages(plan: Plan, span: Span) -> Iterator[Envelope]:
    with asyncio.Runner() as runner:
        backend = _backend_of(plan)
        assert isinstance(backend, Log)
        runner.run(backend.start())
        try:
            for first in range(span.first, span.last, OFFSETS_PER_READ):
                last = min(first + OFFSETS_PER_READ, span.last)
                found = runner.run(backend.read_range(plan.queue, span.partition, first, last))
                for _, envelope in found:
                    if plan.dead_letters or envelope.attempt == 1:
                        yield envelope
        finally:
            runner.run(backend.aclose())


def _backend_of(plan: Plan) -> Backend:
    return open_backend(plan.settings, SystemClock())


def _shares(available: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Divide ``limit`` offsets among the partitions; unused shares go to the others.

    >>> _shares({"0": 2, "1": 90, "2": 90}, 20)
    {'0': 2, '1': 9, '2': 9}
    """
    if limit is None or sum(available.values()) <= limit:
        return dict(available)
    shares: dict[str, int] = {}
    remaining = limit
    for index, partition in enumerate(sorted(available, key=available.__getitem__)):
        shares[partition] = min(available[partition], remaining // (len(available) - index))
        remaining -= shares[partition]
    return shares
