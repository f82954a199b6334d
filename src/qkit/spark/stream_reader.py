"""``spark.readStream``: by places in a log where there is one, else by stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from qkit._internal.clock import SystemClock
from qkit._internal.logging import logger
from qkit.backend import Log
from qkit.backends.factory import open_backend
from qkit.errors import BackendUnavailable
from qkit.native.log.reader import LogRange
from qkit.spark import broker_log, native_log, staging
from qkit.spark.broker_log import BrokerLog, Span
from qkit.spark.native_log import NativeLog
from qkit.spark.options import Plan
from qkit.spark.sinks import is_bulk
from qkit.spark.staging import StagingArea

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["StreamReader"]


class ReplayableSource(Protocol):
    """Source of a stream's messages; offsets are plain JSON, and Spark keeps them."""

    def initial(self) -> dict[str, Any]:
        """Where a new stream begins."""
        ...

    def limit_to_available(self) -> None:
        """From now on read only what is available now."""
        ...

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """An end with at most ``limit`` messages before it; ``start`` if there are none."""
        ...

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[object]:
        """What tasks are to read: the same again for the same offsets, until ``commit``."""
        ...

    def commit(self, end: Mapping[str, Any]) -> None:
        """Spark has done with all before ``end``."""
        ...

    def close(self) -> None:
        """Let go of what is held; idempotent."""
        ...


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark calls all but ``read`` in one process of the driver's; ``read`` is in tasks.

    Nothing is connected before the first call, because this travels to tasks too. A broker that
    goes away later is waited for: meanwhile there are no messages. One that cannot be reached in
    the beginning is an error, and so is any outage where Spark wants what is there now: that it
    would miss the rest must not look like the end.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: ReplayableSource | None = None
        self._waits = False
        self._limited_to_available = False
        _source_of(plan)  # refuses now what would fail later

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}

    @property
    def _source(self) -> ReplayableSource:
        if self._found is None:
            self._found = _source_of(self._plan)
        return self._found

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Where a new query begins."""
        return self._source.initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """``max_rows`` of the options."""
        rows = self._plan.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Take what is there now, then end."""
        self._limited_to_available = True
        self._source.limit_to_available()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  Spark's name
        """The end of the next batch."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        try:
            end = self._source.latest(start, most)
        except BackendUnavailable as error:
            if not self._waits:
                raise
            logger.warning("%s: no messages for now: %s", self._plan.channel, error)
            return start
        self._waits = not self._limited_to_available
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """What tasks are to read."""
        if start == end:
            return []
        return [InputPartition(piece) for piece in self._source.ranges(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        value = partition.value
        if isinstance(value, LogRange):
            return native_log.read(self._plan, value)
        if isinstance(value, Span):
            return broker_log.read(self._plan, value)
        return staging.read(value)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has done with all before ``end``."""
        self._source.commit(end)

    def stop(self) -> None:
        """Spark ends the process rather than call this; either lets go of what is held."""
        if self._found is not None:
            self._found.close()


def _source_of(plan: Plan) -> ReplayableSource:
    if plan.consume:
        return StagingArea(plan)
    if is_bulk(plan):
        return NativeLog(plan)
    if isinstance(open_backend(plan.settings, SystemClock()), Log):
        return BrokerLog(plan)
    return StagingArea(plan)
