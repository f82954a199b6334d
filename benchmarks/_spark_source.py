"""The data source without its last step: every row is made a message, which is only counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkit.spark.columns import columns_of
from qkit.spark.options import plan_of
from qkit.spark.source import QkitDataSource
from qkit.spark.writing import BatchWriter

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
        return BatchWriter(plan, columns_of(schema, plan.columns), only_count=True)
