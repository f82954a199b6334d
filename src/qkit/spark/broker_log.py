"""A stream of a broker that keeps a log: by offsets, without a consumer group."""

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

Offsets = dict[str, int]  # by partition, as Spark's checkpoint keeps them


class Span(NamedTuple):
    """A range of one partition, for one task."""

    partition: int
    first: int
    last: int


class BrokerLog:
    """Offsets of Spark's are those of the partitions; the broker's retention bounds a replay."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop: LoopThread | None = None
        self._last: Offsets | None = None  # for who asks for what is there now, and no more

    def initial(self) -> dict[str, Any]:
        """The first or the next offset of each partition, as ``starting`` says."""
        at = 0 if self._plan.starting == "earliest" else 1
        return {"offsets": {str(place): span[at] for place, span in self._bounds().items()}}

    def limit_to_available(self) -> None:
        """From now on read only what is available now."""
        self._last = {str(place): span[1] for place, span in self._bounds().items()}

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """An end with at most ``limit`` offsets before it, the same share of each partition."""
        offsets: Offsets = dict(start["offsets"])
        bounds = self._bounds()
        for place, (first, after) in bounds.items():
            at = offsets.setdefault(str(place), first)
            if at < first:
                raise self._gone(
                    f"partition {place} begins at {first}, and this stream is at {at}: the broker "
                    "deleted what lies between. Begin anew with another checkpoint, and raise the "
                    "topic's retention"
                )
            if at > after:
                raise self._gone(
                    f"partition {place} ends at {after}, and this stream is at {at}: the topic was "
                    "deleted and made again. Begin anew with another checkpoint"
                )
        ends = {str(place): after for place, (_, after) in bounds.items()}
        if self._last is not None:
            ends = {place: min(after, self._last.get(place, 0)) for place, after in ends.items()}
        waiting = {place: max(0, end - offsets[place]) for place, end in ends.items()}
        for name, share in _shares(waiting, limit).items():
            offsets[name] += share
        return {"offsets": offsets}

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[Span]:
        """The ranges between, in parts for tasks."""
        begins: Offsets = start["offsets"]
        found: list[Span] = []
        for place, last in sorted(end["offsets"].items()):
            begin = begins.get(place)
            if begin is None:  # a partition that was added since
                begin = self._bounds()[int(place)][0]
            found += [
                Span(int(place), first, min(first + OFFSETS_PER_TASK, last))
                for first in range(begin, last, OFFSETS_PER_TASK)
            ]
        return found

    def commit(self, end: Mapping[str, Any]) -> None:
        """The broker keeps what it keeps."""

    def close(self) -> None:
        """End the thread; connections are opened for each look."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _gone(self, text: str) -> StorageError:
        return StorageError(text, operation="read", queue=self._plan.channel)

    def _bounds(self) -> dict[int, tuple[int, int]]:
        if self._loop is None:
            self._loop = LoopThread("qkit-spark")
        return self._loop.call(self._ask)

    async def _ask(self) -> dict[int, tuple[int, int]]:
        backend = _opened(self._plan)
        await backend.start()
        try:
            assert isinstance(backend, Log)
            return await backend.bounds(self._plan.queue)
        except QueueNotFound:
            if await exists(backend, self._plan):
                raise
            return {}  # no dead letter yet: the partitions are found when they are there
        finally:
            await backend.aclose()


def read(plan: Plan, span: Span) -> Iterator[pa.RecordBatch]:
    """In a task: the rows of a range.

    A message that was given back and delivered again is in the log again; only the first is a row.
    """
    return rows.batches(_messages(plan, span), plan)


def _messages(plan: Plan, span: Span) -> Iterator[Envelope]:
    with asyncio.Runner() as runner:
        backend = _opened(plan)
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


def _opened(plan: Plan) -> Backend:
    return open_backend(plan.settings, SystemClock())


def _shares(waiting: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """How many offsets of each partition, ``limit`` in all; those with few give to the others.

    >>> _shares({"0": 2, "1": 90, "2": 90}, 20)
    {'0': 2, '1': 9, '2': 9}
    """
    if limit is None or sum(waiting.values()) <= limit:
        return dict(waiting)
    shares: dict[str, int] = {}
    left = limit
    for at, place in enumerate(sorted(waiting, key=waiting.__getitem__)):
        shares[place] = min(waiting[place], left // (len(waiting) - at))
        left -= shares[place]
    return shares
