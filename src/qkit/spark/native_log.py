"""Stream source for a native channel: reads by log position and consumes nothing."""

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
from qkit.spark.existing import check_directory, check_exists_in_log, import_waiting
from qkit.spark.options import Plan
from qkit.spark.sinks import native_path

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NativeLog"]

REFRESH_SECONDS: Final = 60.0  # interval at which the retention of the log is renewed


class NativeLog:
    """Source whose Spark offsets are positions in the log of a native directory.

    The offsets contain the name of the reader, so the checkpoint stores it too. The engine keeps
    the segments that the reader still needs, from the last committed position on, until
    ``retention`` seconds after its last activity.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._path = Path(native_path(plan))
        self._reader = LogReader(self._path, plan.queue)
        self._retained: tuple[int, float] | None = None  # first segment, and time of renewal
        self._scanned: tuple[dict[str, Any], LogPosition, frozenset[int]] | None = None
        self._stop: LogPosition | None = None  # set by ``limit_to_available``

    def initial(self) -> dict[str, Any]:
        """Return the position at which a new stream starts, and retain the log for it.

        Raises:
            QueueNotFound: The channel does not exist.
        """
        self._import()
        check_exists_in_log(self._plan)
        name = f"spark-{new_id()}"
        self._retain(name, 0, new=True)
        start, queues = LogPosition(), frozenset[int]()
        if self._plan.starting == "latest":
            selection = self._reader.plan(start, queues)
            start, queues = selection.end, selection.queues
        return _offset(name, start, queues)

    def limit_to_available(self) -> None:
        """Limit the stream to the messages that are available now."""
        self._import()
        self._stop = self._reader.plan(LogPosition(), frozenset()).end

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """Return the end of the next batch, or ``start`` if there are no new messages.

        Every new end offset starts a Spark batch. If only other channels have new records, the
        scanned position is therefore kept in memory, and the end advances only when the scan
        reaches a new segment, so that older segments can be compacted.
        """
        if self._stop is None:
            self._import()
        self._retain(str(start["reader"]), _position(start).segment)
        if self._scanned is None or self._scanned[0] != start:
            self._scanned = dict(start), _position(start), _queues(start)
        _, position, queues = self._scanned
        selection = self._reader.plan(position, queues, limit, stop=self._stop)
        if selection.messages == 0 and selection.end.segment == _position(start).segment:
            self._scanned = dict(start), selection.end, selection.queues
            return dict(start)
        return _offset(str(start["reader"]), selection.end, selection.queues)

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[LogRange]:
        """Return the ranges of the log for tasks to read."""
        self._retain(str(start["reader"]), _position(start).segment)
        return self._reader.plan(_position(start), _queues(start), stop=_position(end)).ranges

    def commit(self, end: Mapping[str, Any]) -> None:
        """Stop retaining the segments before ``end``."""
        self._retain(str(end["reader"]), _position(end).segment)

    def close(self) -> None:
        """Do nothing: there are no connections or locks."""

    def _import(self) -> None:
        """Wait until the bulk files that are already committed are in the log."""
        check_directory(self._plan)
        if published_jobs(self._path):
            with LoopThread("qkit-spark") as loop:
                loop.call(lambda: import_waiting(self._plan))

    def _retain(self, name: str, segment: int, *, new: bool = False) -> None:
        now = time.time()
        if (
            self._retained is not None
            and self._retained[0] == segment
            and now < self._retained[1] + REFRESH_SECONDS
        ):
            return
        if self._retained is None and not new and not is_retained(self._path, name):
            raise StorageError(
                "this stream was inactive for longer than its retention, so the log was not "
                "retained: start again with a new checkpoint, and increase "
                "option('retention', seconds)",
                backend="native",
                operation="read",
                queue=self._plan.channel,
            )
        retain(self._path, name, segment, until=now + self._plan.retention)
        self._retained = segment, now


def read(plan: Plan, part: LogRange) -> Iterator[pa.RecordBatch]:
    """Read the rows of one range of the log; runs in a task."""
    found = (_envelope(message) for message in read_range(native_path(plan), part))
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


def _offset(reader: str, position: LogPosition, queues: frozenset[int]) -> dict[str, Any]:
    numbers = ",".join(map(str, sorted(queues)))
    return {
        "reader": reader,
        "segment": position.segment,
        "offset": position.offset,
        "queues": numbers,
    }


def _position(offset: Mapping[str, Any]) -> LogPosition:
    return LogPosition(int(offset["segment"]), int(offset["offset"]))


def _queues(offset: Mapping[str, Any]) -> frozenset[int]:
    numbers = cast("str", offset["queues"])
    return frozenset(int(number) for number in numbers.split(",") if number)
