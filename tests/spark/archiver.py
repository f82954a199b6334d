"""A driver that tests kill: archives a channel until it is told to stop, or has all there is.

python -m tests.spark.archiver OPTIONS-AS-JSON OUTPUT CHECKPOINT [all]
"""

from __future__ import annotations

import json
import sys

from tests.spark.conftest import session


def main(options: dict[str, str], output: str, checkpoint: str, everything: bool) -> None:
    spark = session("local[2]")
    stream = spark.readStream.format("qkit").options(**options).load()
    writer = (
        stream.selectExpr("cast(value as string) as value")
        .writeStream.format("parquet")
        .option("checkpointLocation", checkpoint)
    )
    trigger = {"availableNow": True} if everything else {"processingTime": "100 milliseconds"}
    query = writer.trigger(**trigger).start(output)
    query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:] == ["all"])
