"""A driver that tests kill: takes a channel to Parquet, or to another channel.

python -m tests.spark.archiver OPTIONS CHECKPOINT TARGET [all]

OPTIONS are those of the channel, TARGET is a directory or the options of the other channel; both
options are JSON. With "all" it ends when it has all that is there; else it goes on until killed.
"""

from __future__ import annotations

import json
import sys

from tests.spark.conftest import session


def main(options: dict[str, str], checkpoint: str, target: str, everything: bool) -> None:
    spark = session("local[2,4]")  # a task is tried four times, as on a cluster
    stream = spark.readStream.format("qkit").options(**options).load()
    writer = stream.selectExpr("cast(value as string) as value").writeStream.option(
        "checkpointLocation", checkpoint
    )
    if target.startswith("{"):
        writer = writer.format("qkit").options(**json.loads(target))
    else:
        writer = writer.format("parquet").option("path", target)
    trigger = {"availableNow": True} if everything else {"processingTime": "100 milliseconds"}
    query = writer.trigger(**trigger).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:] == ["all"])
