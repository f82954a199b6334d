"""Archive a channel: every message to Parquet, partitioned by the day it was sent, as a stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from qkit.spark.job import add_channel, options_of, parser, session, told
from qkit.spark.options import plan_of

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
    options.add_argument("--by", choices=["day", "hour"], default="day", help="the partitions")
    options.add_argument("--max-rows", type=int, default=100_000, help="messages of a batch")
    options.add_argument("--every", default="10 seconds", help="how often a batch begins")
    options.add_argument("--once", action="store_true", help="what is there now, then end")
    given = options.parse_args(arguments)
    chosen = {"max_rows": str(given.max_rows)} | options_of(given)
    if given.stage:
        chosen["stage"] = given.stage
    with told():
        plan_of(chosen)
        with session(f"archive {given.channel}") as spark:
            every = None if given.once else given.every
            query = start(
                spark,
                chosen,
                given.output,
                given.checkpoint,
                hourly=given.by == "hour",
                every=every,
            )
            while not query.awaitTermination(10):
                _tell(query.lastProgress)
            _tell(query.lastProgress)


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


def _tell(progress: object) -> None:
    if isinstance(progress, dict):
        print(f"batch {progress['batchId']}: {progress['numInputRows']} messages", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
