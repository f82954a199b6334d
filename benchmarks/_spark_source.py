"""The data source without its last step: every row is made a message, which is only counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from qkit.handlers.route import Route
from qkit.message import Envelope
from qkit.spark.columns import columns_of
from qkit.spark.options import plan_of
from qkit.spark.sinks import Sink
from qkit.spark.source import QkitDataSource
from qkit.spark.task_sender import TaskSender
from qkit.spark.writer import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["CountingSource"]


class CountingSource(QkitDataSource):
    """What all ratios are measured against."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "qkit-count"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Encodes and counts."""
        plan = plan_of(self.options)
        return CountingWriter(plan, columns_of(schema, plan.columns))


class CountingWriter(BatchWriter):
    """Makes messages of rows as its parent does, and sends none."""

    def sink(self, sender: TaskSender, route: Route, staged: str, part: int) -> Sink:
        """One that forgets."""
        return Forgetting()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """There is nothing to publish."""


class Forgetting:
    """Takes messages and forgets them."""

    lasting = False

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Nothing."""

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def abort(self) -> None:
        """Nothing."""
