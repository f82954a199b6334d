"""Archive a channel: stream every message to Parquet files, by day or hour of sending."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from qkit.spark.job import add_channel, count, options_of, parser, report_errors, session
from qkit.spark.options import parse_options, with_absolute_paths

EXAMPLE = (
    "spark-submit spark/archive.py --channel orders --config qkit.toml --output archive/orders "
    "--checkpoint archive/.orders"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    add_channel(options)
    options.add_argument("--output", required=True, help="directory for the Parquet files")
    options.add_argument("--checkpoint", required=True, help="directory for Spark's checkpoint")
    options.add_argument(
        "--stage", help="directory for messages in progress; required for RabbitMQ and Redis"
    )
    options.add_argument(
        "--by", choices=["day", "hour"], default="day", help="partition size (default: day)"
    )
    options.add_argument(
        "--max-rows",
        type=count,
        default=100_000,
        metavar="COUNT",
        help="maximum number of messages per batch (default: 100000)",
    )
    options.add_argument(
        "--every",
        default="10 seconds",
        metavar="TIME",
        help="interval between batches (default: 10 seconds)",
    )
    options.add_argument(
        "--once", action="store_true", help="archive the available messages, then exit"
    )
    given = options.parse_args(arguments)
    chosen = options_of(given, stage=given.stage, max_rows=str(given.max_rows))
    with report_errors():
        chosen = with_absolute_paths(chosen, parse_options(chosen))
        with session(f"archive {given.channel}") as spark:
            query = start(
                spark,
                chosen,
                given.output,
                given.checkpoint,
                hourly=given.by == "hour",
                every=None if given.once else given.every,
            )
            total = follow(query)
    print(f"{total} messages of {given.channel} archived in {given.output}")


def start(
    spark: SparkSession,
    options: dict[str, str],
    output: str,
    checkpoint: str,
    *,
    hourly: bool = False,
    every: str | None = None,
) -> StreamingQuery:
    """Start the stream.

    Args:
        spark: The Spark session.
        options: Options for ``format("qkit")``.
        output: Directory for the Parquet files.
        checkpoint: Directory for Spark's checkpoint.
        hourly: Whether to partition by day and hour instead of by day. Default: false.
        every: Interval between batches, such as ``"10 seconds"``. By default, the stream ends after
            the messages that are available now.
    """
    stream = spark.readStream.format("qkit").options(**options).load()
    time = "coalesce(sent_at, current_timestamp())"
    partitions = {"date": f"date({time}) as date"}
    if hourly:
        partitions["hour"] = f"hour({time}) as hour"
    writer = (
        stream.selectExpr("*", *partitions.values())
        .writeStream.format("parquet")
        .partitionBy(*partitions)
        .option("checkpointLocation", checkpoint)
    )
    if every is None:
        return writer.trigger(availableNow=True).start(output)
    return writer.trigger(processingTime=every).start(output)


def follow(query: StreamingQuery) -> int:
    """Print each batch until the stream ends; return the number of messages."""
    total, batch, ended = 0, -1, False
    while not ended:
        ended = bool(query.awaitTermination(5))
        for progress in query.recentProgress:
            if progress["batchId"] > batch and progress["numInputRows"]:
                batch, rows = progress["batchId"], progress["numInputRows"]
                total += rows
                print(f"batch {batch}: {rows} messages", flush=True)
    return total


if __name__ == "__main__":
    main(sys.argv[1:])
