"""A stream of a native channel by places in the log: it consumes nothing and can be replayed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from qkit._internal.ids import new_id
from qkit._internal.loop_thread import LoopThread
from qkit.errors import StorageError
from qkit.message import Envelope
from qkit.native.bulk import published_jobs
from qkit.native.log.reader import LogPosition, LogRange, LogReader, read_range
from qkit.native.log.record import Publish
from qkit.native.log.retention import is_retained, retain
from qkit.spark import rows
from qkit.spark.existing import check_directory, exists_in_log, import_waiting
from qkit.spark.options import Plan
from qkit.spark.sinks import native_path

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NativeLog"]

REFRESH_SECONDS: Final = 60.0  # between two renewals of what is kept for a reader


class NativeLog:
    """Offsets of Spark's are places in the log; the reader's name is in them, so in the checkpoint.

    What it has yet to read is kept for it (``retention`` seconds after it was last seen): the
    first place that Spark may ask for again moves on with ``commit``.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._path = Path(native_path(plan))
        self._follower = LogReader(self._path, plan.queue)
        self._kept: tuple[int, float] | None = None  # the segment, and when that was said
        self._seen: tuple[dict[str, Any], LogPosition, frozenset[int]] | None = None
        self._last: LogPosition | None = None  # for who asks for what is there now, and no more

    def initial(self) -> dict[str, Any]:
        """Where a new stream begins; from here on nothing is taken away from it.

        Raises ``QueueNotFound`` if the channel does not exist.
        """
        self._import()
        exists_in_log(self._plan)
        name = f"spark-{new_id()}"
        self._keep(name, 0, new=True)
        start, queues = LogPosition(), frozenset[int]()
        if self._plan.starting == "latest":
            chosen = self._follower.plan(start, queues)
            start, queues = chosen.end, chosen.queues
        return _offset(name, start, queues)

    def limit_to_available(self) -> None:
        """From now on read only what is available now."""
        self._import()
        self._last = self._follower.plan(LogPosition(), frozenset()).end

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """An end for the next batch, or ``start`` if there is nothing new.

        Where only other channels wrote, the place is remembered here and not moved on, for each
        move is a batch; but a segment that is behind is let go.
        """
        if self._last is None:
            self._import()
        self._keep(str(start["reader"]), _place(start).segment)
        if self._seen is None or self._seen[0] != start:
            self._seen = dict(start), _place(start), _queues(start)
        _, place, queues = self._seen
        chosen = self._follower.plan(place, queues, limit, stop=self._last)
        if chosen.messages == 0 and chosen.end.segment == _place(start).segment:
            self._seen = dict(start), chosen.end, chosen.queues
            return dict(start)
        return _offset(str(start["reader"]), chosen.end, chosen.queues)

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[LogRange]:
        """What tasks are to read."""
        self._keep(str(start["reader"]), _place(start).segment)
        return self._follower.plan(_place(start), _queues(start), stop=_place(end)).ranges

    def commit(self, end: Mapping[str, Any]) -> None:
        """What lies before is not asked for again."""
        self._keep(str(end["reader"]), _place(end).segment)

    def close(self) -> None:
        """Nothing is held."""

    def _import(self) -> None:
        """What was committed in bulk before now is in the log when this returns."""
        check_directory(self._plan)
        if published_jobs(self._path):
            with LoopThread("qkit-spark") as loop:
                loop.call(lambda: import_waiting(self._plan))

    def _keep(self, name: str, segment: int, *, new: bool = False) -> None:
        now = time.time()
        if (
            self._kept is not None
            and self._kept[0] == segment
            and now < self._kept[1] + REFRESH_SECONDS
        ):
            return
        if self._kept is None and not new and not is_retained(self._path, name):
            raise StorageError(
                "this stream was away for longer than its retention, and the log was not kept for "
                "it: begin anew with another checkpoint, and set option('retention', seconds)",
                backend="native",
                operation="read",
                queue=self._plan.channel,
            )
        retain(self._path, name, segment, until=now + self._plan.retention)
        self._kept = segment, now


def read(plan: Plan, piece: LogRange) -> Iterator[pa.RecordBatch]:
    """In a task: the rows of a piece."""
    found = (_envelope(message) for message in read_range(native_path(plan), piece))
    return rows.batches(found, plan)


def _envelope(message: Publish) -> Envelope:
    return Envelope(
        message.id,
        message.body,
        message.headers or {},
        message.key,
        message.priority,
        message.due or None,
        message.expires or None,
        message.attempt,
    )


def _offset(reader: str, place: LogPosition, queues: frozenset[int]) -> dict[str, Any]:
    known = ",".join(map(str, sorted(queues)))
    return {"reader": reader, "segment": place.segment, "offset": place.offset, "queues": known}


def _place(offset: Mapping[str, Any]) -> LogPosition:
    return LogPosition(int(offset["segment"]), int(offset["offset"]))


def _queues(offset: Mapping[str, Any]) -> frozenset[int]:
    known = cast("str", offset["queues"])
    return frozenset(int(number) for number in known.split(",") if number)
