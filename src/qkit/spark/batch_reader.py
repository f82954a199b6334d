"""Reader for ``spark.read``: a snapshot of a channel or its dead letters; it consumes nothing."""

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
    """Reader that peeks in one task, because a broker can peek only at the front of a queue."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        if is_bulk(plan):
            native_path(plan)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a single partition with the id of the driver's native directory, if any."""
        return [InputPartition(self._directory_id() if is_bulk(self._plan) else None)]

    def _directory_id(self) -> bytes:
        path = check_directory(self._plan)
        directory_id = log_id(path)
        if directory_id is None:  # there are bulk files, but no engine has opened the directory
            with LoopThread("qkit-spark") as loop:
                loop.call(lambda: import_waiting(self._plan))
            directory_id = log_id(path)
        assert directory_id is not None
        return directory_id

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Peek at the messages and return their rows; runs in a task.

        Raises:
            StorageError: This executor and the driver see different native directories.
            Unsupported: The backend stores no messages.
            QueueNotFound: The channel does not exist.
            ConfigError: There are too many messages to read without a ``limit``.
        """
        if is_bulk(self._plan) and log_id(native_path(self._plan)) != partition.value:
            raise not_shared(native_path(self._plan))
        return rows.batches(asyncio.run(self._peek()), self._plan)

    async def _peek(self) -> list[Envelope]:
        plan = self._plan
        backend = open_backend(plan.settings, SystemClock())
        if not isinstance(backend, Admin) or not backend.capabilities.peek:
            raise Unsupported(
                f"{backend.name} stores no messages to peek at: read the channel as a stream",
                backend=backend.name,
                operation="peek",
                queue=plan.channel,
            )
        try:
            await start_for_reading(backend, plan)
            if not await exists(backend, plan):
                return []
            envelopes = await backend.peek(plan.queue, plan.limit or MAX_ROWS + 1)
        finally:
            await backend.aclose()
        if plan.limit is None and len(envelopes) > MAX_ROWS:
            raise ConfigError(
                f"the channel has more than {MAX_ROWS:,} messages: set option('limit', …), or "
                "read it as a stream",
                backend=backend.name,
                operation="peek",
                queue=plan.channel,
            )
        return envelopes
