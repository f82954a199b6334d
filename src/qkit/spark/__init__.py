"""qkit on Spark: a data source for every backend, and Kafka's own connector in qkit's format.

>>> import qkit.spark                                                       # doctest: +SKIP
>>> qkit.spark.register(spark)                                              # doctest: +SKIP
>>> settings = {"channel": "orders", "type": "native", "path": "data"}
>>> df.write.format("qkit").mode("append").options(**settings).save()       # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from qkit.spark.kafka_connector import from_kafka_frame, kafka_frame
    from qkit.spark.publish import Written, write
    from qkit.spark.source import QkitDataSource
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in {"pyspark", "pyarrow", "pandas"}:
        raise
    raise ModuleNotFoundError(
        f"qkit.spark needs {error.name}: install the extra 'spark', see docs/install.md",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QkitDataSource", "Written", "from_kafka_frame", "kafka_frame", "register", "write"]


def register(spark: SparkSession) -> None:
    """Make ``format("qkit")`` known to a session."""
    spark.dataSource.register(QkitDataSource)
