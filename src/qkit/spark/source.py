"""Data source that Spark registers as ``qkit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from qkit.errors import ConfigError
from qkit.spark.batch_reader import BatchReader
from qkit.spark.columns import columns_of
from qkit.spark.options import parse_options
from qkit.spark.rows import check_schema, schema_of
from qkit.spark.stream_reader import StreamReader
from qkit.spark.writer import BatchWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["QkitDataSource"]


class QkitDataSource(DataSource):
    """Data source behind ``format("qkit")``, for reads and writes, batch and streaming.

    ``qkit.spark.register`` makes it available to a session. Spark creates the instances and
    calls the methods; the options are checked there, on the driver, before any task starts.

    Args:
        options: The options of the read or write: ``channel``, qkit settings by name, and the
            options of the format.

    Example:
        >>> spark.dataSource.register(QkitDataSource)  # doctest: +SKIP
        >>> options = {"channel": "orders", "type": "native", "path": directory}  # doctest: +SKIP
        >>> frame = spark.range(3)  # doctest: +SKIP
        >>> frame.write.format("qkit").mode("append").options(**options).save()  # doctest: +SKIP
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format.

        Returns:
            ``"qkit"``, the argument of ``format``.

        Example:
            >>> QkitDataSource.name()
            'qkit'
        """
        return "qkit"

    def schema(self) -> StructType:
        """Return the columns of a read.

        Returns:
            The columns of messages, or of dead letters if the option ``dead_letters`` is true.

        Raises:
            ConfigError: An option is missing, unknown or invalid.

        Example:
            >>> source = QkitDataSource({"channel": "orders", "type": "native", "path": "data"})
            >>> source.schema().fieldNames()[:4]
            ['id', 'value', 'headers', 'key']
        """
        return schema_of(parse_options(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader for ``spark.read``.

        Args:
            schema: The columns that Spark expects, from the user's ``.schema(…)`` or ``schema()``.

        Returns:
            A reader that peeks at the messages and consumes none.

        Raises:
            ConfigError: An option is invalid, or ``schema`` differs from the columns of the format.

        Example:
            >>> source = QkitDataSource({"channel": "orders", "type": "native", "path": "data"})
            >>> reader = source.reader(source.schema())
            >>> type(reader).__name__
            'BatchReader'
        """
        plan = parse_options(self.options)
        check_schema(schema, plan)
        return BatchReader(plan)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  Spark's name
        """Return the reader for ``spark.readStream``.

        Args:
            schema: The columns that Spark expects, from the user's ``.schema(…)`` or ``schema()``.

        Returns:
            A reader that follows the log of the channel, or consumes into staging files if
            the backend keeps no log.

        Raises:
            ConfigError: An option is invalid, or ``schema`` differs from the columns of the format.

        Example:
            >>> source = QkitDataSource({"channel": "orders", "type": "native", "path": "data"})
            >>> reader = source.streamReader(source.schema())
            >>> type(reader).__name__
            'StreamReader'
        """
        plan = parse_options(self.options)
        check_schema(schema, plan)
        return StreamReader(plan)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return the writer for ``df.write``.

        Args:
            schema: The columns of the DataFrame.
            overwrite: Whether the mode is ``overwrite``, which is rejected.

        Returns:
            A writer that Spark sends to the tasks.

        Raises:
            ConfigError: The mode is ``overwrite``, or an option or a column is invalid.

        Example:
            >>> source = QkitDataSource({"channel": "orders", "type": "native", "path": "data"})
            >>> source.writer(source.schema(), overwrite=True)
            Traceback (most recent call last):
            qkit.errors.ConfigError: a channel cannot be overwritten: write with mode('append')
        """
        if overwrite:
            raise ConfigError("a channel cannot be overwritten: write with mode('append')")
        plan = parse_options(self.options)
        return BatchWriter(plan, columns_of(schema, plan.columns))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  Spark's name
        """Return the writer for ``df.writeStream``.

        Args:
            schema: The columns of the DataFrame.
            overwrite: Whether the output mode is ``complete``; ignored, as batches are appended.

        Returns:
            A writer that Spark sends to the tasks of each batch.

        Raises:
            ConfigError: An option or a column is invalid.

        Example:
            >>> from pyspark.sql.types import StructType
            >>> source = QkitDataSource({"channel": "orders", "type": "native", "path": "data"})
            >>> source.streamWriter(StructType(), overwrite=False)
            Traceback (most recent call last):
            qkit.errors.ConfigError: the DataFrame has no columns: a message needs a body
        """
        plan = parse_options(self.options)
        return StreamWriter(plan, columns_of(schema, plan.columns), self.options)
