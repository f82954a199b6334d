"""The data source that Spark knows as ``qkit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from qkit.errors import ConfigError
from qkit.spark.batch_reader import BatchReader
from qkit.spark.columns import columns_of
from qkit.spark.options import plan_of
from qkit.spark.rows import check_schema, schema_of
from qkit.spark.stream_reader import StreamReader
from qkit.spark.writer import BatchWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["QkitDataSource"]


class QkitDataSource(DataSource):
    """``spark.read``, ``readStream``, ``df.write`` and ``writeStream`` with ``format("qkit")``."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "qkit"

    def schema(self) -> StructType:
        """The columns of what is read."""
        return schema_of(plan_of(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        """For ``spark.read``."""
        plan = plan_of(self.options)
        check_schema(schema, plan)
        return BatchReader(plan)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  Spark's name
        """For ``spark.readStream``."""
        plan = plan_of(self.options)
        check_schema(schema, plan)
        return StreamReader(plan)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For ``df.write``."""
        if overwrite:
            raise ConfigError("a channel cannot be overwritten: write with mode('append')")
        plan = plan_of(self.options)
        return BatchWriter(plan, columns_of(schema, plan.columns))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  Spark's name
        """For ``df.writeStream``."""
        plan = plan_of(self.options)
        return StreamWriter(plan, columns_of(schema, plan.columns), self.options)
