"""``spark.read``: what a channel, or its dead letters, hold now, without consuming it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qkit.backend import Admin
from qkit.clock import SystemClock
from qkit.errors import ConfigError, QueueNotFound, Unsupported
from qkit.message import Envelope
from qkit.native.inbox import bulks
from qkit.opening import open_backend
from qkit.spark import rows
from qkit.spark.options import Plan
from qkit.spark.sinks import is_bulk, native_path

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Snapshot"]

MOST: Final = 1_000_000
PATIENCE: Final = 60.0  # seconds for the engine to take in bulk files; it looks every second


class Snapshot(DataSourceReader):
    """One task looks: brokers show their messages from the front, to one who asks."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        if is_bulk(plan):
            native_path(plan)

    def partitions(self) -> Sequence[InputPartition]:
        """A single one."""
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: look and tell."""
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
        await backend.start()
        try:
            if is_bulk(plan):
                await _taken_in(Path(native_path(plan)))
            found = await backend.peek(plan.queue, plan.limit or MOST + 1)
        except QueueNotFound:
            if not plan.dead_letters:
                raise
            return []  # it is made with the first dead letter
        finally:
            await backend.aclose()
        if plan.limit is None and len(found) > MOST:
            raise ConfigError(
                f"it holds more than {MOST:,} messages: set option('limit', …), or read a stream",
                backend=backend.name,
                operation="peek",
                queue=plan.channel,
            )
        return found


async def _taken_in(path: Path) -> None:
    """Wait until what was published in bulk before now is in its queues."""
    before = set(bulks(path))
    with suppress(TimeoutError):  # one that is damaged stays; it is no reason to see nothing
        async with asyncio.timeout(PATIENCE):
            while before & set(bulks(path)):  # noqa: ASYNC110  another process takes them in
                await asyncio.sleep(0.05)
