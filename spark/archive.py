"""Archive a channel: every message to Parquet, partitioned by the day it was sent, as a stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from qkit.spark.job import add_channel, count, options_of, parser, report_errors, session
from qkit.spark.options import absolute, plan_of

EXAMPLE = (
    "spark-submit spark/archive.py --channel orders --config qkit.toml --output archive/orders "
    "--checkpoint archive/.orders"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    add_channel(options)
    options.add_argument("--output", required=True, help="directory of the Parquet files")
    options.add_argument("--checkpoint", required=True, help="where Spark notes how far it is")
    options.add_argument(
        "--stage", help="needed on RabbitMQ and Redis: messages lie here meanwhile"
    )
    options.add_argument(
        "--by", choices=["day", "hour"], default="day", help="the partitions (day)"
    )
    options.add_argument(
        "--max-rows",
        type=count,
        default=100_000,
        metavar="COUNT",
        help="messages of a batch (100000)",
    )
    options.add_argument(
        "--every",
        default="10 seconds",
        metavar="TIME",
        help="how often a batch begins (10 seconds)",
    )
    options.add_argument("--once", action="store_true", help="what is there now, then end")
    given = options.parse_args(arguments)
    chosen = options_of(given, stage=given.stage, max_rows=str(given.max_rows))
    with report_errors():
        chosen = absolute(chosen, plan_of(chosen))
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
    """The stream, a batch ``every`` so often; without that, what is there now."""
    stream = spark.readStream.format("qkit").options(**options).load()
    at = "coalesce(sent_at, current_timestamp())"
    parts = {"date": f"date({at}) as date"} | ({"hour": f"hour({at}) as hour"} if hourly else {})
    writer = (
        stream.selectExpr("*", *parts.values())
        .writeStream.format("parquet")
        .partitionBy(*parts)
        .option("checkpointLocation", checkpoint)
    )
    if every is None:
        return writer.trigger(availableNow=True).start(output)
    return writer.trigger(processingTime=every).start(output)


def follow(query: StreamingQuery) -> int:
    """Tell of each batch until the stream ends; how many messages there were."""
    total, batch, over = 0, -1, False
    while not over:
        over = bool(query.awaitTermination(5))
        for progress in query.recentProgress:
            if progress["batchId"] > batch and progress["numInputRows"]:
                batch, rows = progress["batchId"], progress["numInputRows"]
                total += rows
                print(f"batch {batch}: {rows} messages", flush=True)
    return total


if __name__ == "__main__":
    main(sys.argv[1:])
