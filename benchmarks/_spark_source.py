"""Data source that encodes every row and discards the message, as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from qkit.handlers.route import Route
from qkit.message import Envelope
from qkit.spark.columns import columns_of
from qkit.spark.options import parse_options
from qkit.spark.sinks import Sink
from qkit.spark.source import QkitDataSource
from qkit.spark.task_sender import TaskSender
from qkit.spark.writer import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["CountingSource"]


class CountingSource(QkitDataSource):
    """Data source ``qkit-count``, which encodes rows and sends nothing."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``DataFrameWriter.format``."""
        return "qkit-count"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return a writer that encodes rows and sends nothing."""
        plan = parse_options(self.options)
        return CountingWriter(plan, columns_of(schema, plan.columns))


class CountingWriter(BatchWriter):
    """Writer that encodes rows and sends nothing."""

    def sink(self, sender: TaskSender, route: Route, staged: str, part: int) -> Sink:
        """Return a sink that discards messages."""
        return DiscardingSink()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: there are no messages to publish."""


class DiscardingSink:
    """Sink that discards messages."""

    sends_are_final = False

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Discard the messages."""

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Discard the dead letters."""

    def finish(self) -> None:
        """Do nothing: no messages were stored."""

    def abort(self) -> None:
        """Do nothing: there are no messages to remove."""
