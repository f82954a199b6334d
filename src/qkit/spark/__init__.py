"""Spark data source for every backend, and helpers for Spark's own Kafka connector.

Lines marked ``+SKIP`` in the examples of this package need a Spark session. ``doctest`` skips
them, and the tests of this package run them with a session named ``spark``.

Example:
    >>> import qkit.spark
    >>> qkit.spark.register(spark)  # doctest: +SKIP
    >>> options = {"channel": "orders", "type": "native", "path": directory}  # doctest: +SKIP
    >>> df = spark.range(3)  # doctest: +SKIP
    >>> df.write.format("qkit").mode("append").options(**options).save()  # doctest: +SKIP
    >>> spark.read.format("qkit").options(**options).load().count()  # doctest: +SKIP
    3
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from qkit.spark.kafka_connector import from_kafka_frame, kafka_frame
    from qkit.spark.publish import Written, write
    from qkit.spark.source import QkitDataSource
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] not in {"pyspark", "pyarrow", "pandas"}:
        raise
    raise ModuleNotFoundError(
        f"qkit.spark needs {_error.name}: install the extra 'spark', see docs/install.md",
        name=_error.name,
    ) from _error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QkitDataSource", "Written", "from_kafka_frame", "kafka_frame", "register", "write"]


def register(spark: SparkSession) -> None:
    """Register the format ``"qkit"`` with a Spark session.

    Args:
        spark: The session whose ``read``, ``readStream``, ``write`` and ``writeStream`` then
            accept ``format("qkit")``.

    Example:
        >>> qkit.spark.register(spark)  # doctest: +SKIP
    """
    spark.dataSource.register(QkitDataSource)
