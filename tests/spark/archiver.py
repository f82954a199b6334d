"""Spark driver that tests kill; it copies a channel to Parquet files or to another channel.

    python -m tests.spark.archiver OPTIONS CHECKPOINT TARGET [all]

OPTIONS are the options of the channel, as JSON. TARGET is a directory, or the options of the other
channel, as JSON. With ``all``, the driver exits after it has copied the available messages;
otherwise it runs until it is killed.
"""

from __future__ import annotations

import json
import sys

from tests.spark.conftest import session


def main(options: dict[str, str], checkpoint: str, target: str, everything: bool) -> None:
    spark = session("local[2,4]")  # four attempts per task, as on a cluster
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
