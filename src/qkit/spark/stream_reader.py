"""Reader for ``spark.readStream``: by log position, or by staging files if there is no log."""

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
    """Source of a stream's messages. Its offsets are JSON, which Spark stores in the checkpoint."""

    def initial(self) -> dict[str, Any]:
        """Return the offset at which a new stream starts."""
        ...

    def limit_to_available(self) -> None:
        """Limit the stream to the messages that are available now."""
        ...

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """Return the end of the next batch of at most ``limit`` messages; ``start`` if empty."""
        ...

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[object]:
        """Return the ranges that tasks read; the result is the same until ``commit``."""
        ...

    def commit(self, end: Mapping[str, Any]) -> None:
        """Release the messages up to ``end``, which Spark no longer needs."""
        ...

    def close(self) -> None:
        """Release connections and locks; idempotent."""
        ...


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for ``spark.readStream``.

    Spark calls ``read`` in tasks, and all other methods in one process on the driver. The reader
    is pickled to the tasks, so it connects on first use.

    An outage during a stream is treated as "no messages", and the stream continues when the
    broker is back. An outage at the start is an error. So is any outage with the trigger
    ``availableNow``, because the stream would look complete although messages are missing.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open_source: ReplayableSource | None = None
        self._tolerates_outages = False
        self._limited_to_available = False
        _source_of(plan)  # validates the plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_source": None}

    @property
    def _source(self) -> ReplayableSource:
        if self._open_source is None:
            self._open_source = _source_of(self._plan)
        return self._open_source

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Return the offset at which a new query starts."""
        return self._source.initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Return the maximum size of a batch, from the option ``max_rows``."""
        rows = self._plan.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Limit this query to the messages that are available now."""
        self._limited_to_available = True
        self._source.limit_to_available()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Return the end of the next batch; ``start`` if there are no messages."""
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        try:
            end = self._source.latest(start, max_rows)
        except BackendUnavailable as error:
            if not self._tolerates_outages:
                raise
            logger.warning("%s: broker unavailable, no new messages: %s", self._plan.channel, error)
            return start
        self._tolerates_outages = not self._limited_to_available
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the partitions of a batch, one for each task."""
        if start == end:
            return []
        return [InputPartition(value) for value in self._source.ranges(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one partition; runs in a task."""
        value = partition.value
        if isinstance(value, LogRange):
            return native_log.read(self._plan, value)
        if isinstance(value, Span):
            return broker_log.read(self._plan, value)
        return staging.read(value)

    def commit(self, end: dict[str, Any]) -> None:
        """Release the messages up to ``end``, which Spark no longer needs."""
        self._source.commit(end)

    def stop(self) -> None:
        """Release connections and locks.

        Spark usually terminates the process without calling this, which releases them too.
        """
        if self._open_source is not None:
            self._open_source.close()


def _source_of(plan: Plan) -> ReplayableSource:
    if plan.consume:
        return StagingArea(plan)
    if is_bulk(plan):
        return NativeLog(plan)
    if isinstance(open_backend(plan.settings, SystemClock()), Log):
        return BrokerLog(plan)
    return StagingArea(plan)
