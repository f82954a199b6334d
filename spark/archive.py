"""Archive a channel: every message to Parquet, partitioned by the day it was sent, as a stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
            stream = spark.readStream.format("qkit").options(**chosen).load()
            at = "coalesce(sent_at, current_timestamp())"
            parts = [f"date({at}) as date"]
            if given.by == "hour":
                parts.append(f"hour({at}) as hour")
            writer = (
                stream.selectExpr("*", *parts)
                .writeStream.format("parquet")
                .partitionBy(*[part.rsplit(" ", 1)[-1] for part in parts])
                .option("checkpointLocation", given.checkpoint)
            )
            if given.once:
                writer = writer.trigger(availableNow=True)
            else:
                writer = writer.trigger(processingTime=given.every)
            query = writer.start(given.output)
            while not query.awaitTermination(10):
                _tell(query.lastProgress)
            _tell(query.lastProgress)


def _tell(progress: object) -> None:
    if isinstance(progress, dict):
        print(f"batch {progress['batchId']}: {progress['numInputRows']} messages", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
