"""The data source that Spark knows as ``qkit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from qkit.spark.columns import columns_of
from qkit.spark.options import plan_of
from qkit.spark.writing import BatchWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["QkitDataSource"]


class QkitDataSource(DataSource):
    """``spark.read``, ``readStream``, ``df.write`` and ``writeStream`` with ``format("qkit")``."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "qkit"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For ``df.write``."""
        return BatchWriter(plan_of(self.options), columns_of(schema, plan_of(self.options).columns))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  Spark's name
        """For ``df.writeStream``."""
        plan = plan_of(self.options)
        return StreamWriter(plan, columns_of(schema, plan.columns))
