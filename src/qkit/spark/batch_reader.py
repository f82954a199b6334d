"""``spark.read``: what a channel, or its dead letters, hold now, without consuming it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qkit._internal.clock import SystemClock
from qkit._internal.loop_thread import LoopThread
from qkit.backend import Admin
from qkit.backends.factory import open_backend
from qkit.errors import ConfigError, Unsupported
from qkit.message import Envelope
from qkit.native.log.reader import log_id, not_shared
from qkit.spark import rows
from qkit.spark.existing import check_directory, exists, import_waiting, start_for_reading
from qkit.spark.options import Plan
from qkit.spark.sinks import is_bulk, native_path

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchReader"]

MAX_ROWS: Final = 1_000_000


class BatchReader(DataSourceReader):
    """Reads in one task: brokers show their messages from the front, to one client."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        if is_bulk(plan):
            native_path(plan)

    def partitions(self) -> Sequence[InputPartition]:
        """A single one; its value tells the task which native directory the driver sees."""
        return [InputPartition(self._directory() if is_bulk(self._plan) else None)]

    def _directory(self) -> bytes:
        path = check_directory(self._plan)
        known = log_id(path)
        if known is None:  # it has bulk files, and no engine was ever there
            with LoopThread("qkit-spark") as loop:
                loop.call(lambda: import_waiting(self._plan))
            known = log_id(path)
        assert known is not None
        return known

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: peek at the messages and return their rows."""
        if is_bulk(self._plan) and log_id(native_path(self._plan)) != partition.value:
            raise not_shared(native_path(self._plan))
        return rows.batches(asyncio.run(self._peek()), self._plan)

    async def _peek(self) -> list[Envelope]:
        plan = self._plan
        backend = open_backend(plan.settings, SystemClock())
        if not isinstance(backend, Admin) or not backend.capabilities.peek:
            raise Unsupported(
                f"{backend.name} keeps no messages that could be looked at: read it as a stream",
                backend=backend.name,
                operation="peek",
                queue=plan.channel,
            )
        try:
            await start_for_reading(backend, plan)
            if not await exists(backend, plan):
                return []
            found = await backend.peek(plan.queue, plan.limit or MAX_ROWS + 1)
        finally:
            await backend.aclose()
        if plan.limit is None and len(found) > MAX_ROWS:
            raise ConfigError(
                f"it holds more than {MAX_ROWS:,} messages: set option('limit', …), or read a "
                "stream",
                backend=backend.name,
                operation="peek",
                queue=plan.channel,
            )
        return found
