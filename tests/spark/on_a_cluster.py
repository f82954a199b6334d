"""A driver whose executors are processes of their own: ``python -m tests.spark.on_a_cluster …``.

Writes to native and to Redis, reads back and streams, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys

from tests.spark.conftest import session


def main(native: dict[str, str], redis: dict[str, str], directory: str) -> dict[str, int]:
    spark = session("local-cluster[2,1,1024]", **{"spark.executor.memory": "512m"})
    frame = spark.range(0, 1_000, 1, 4).selectExpr("id", "double(id) as total")
    found: dict[str, int] = {}
    for name, options in {"native": native, "redis": redis}.items():
        frame.write.format("qkit").mode("append").options(
            **options, model="tests.spark.models:Order"
        ).save()
        read = spark.read.format("qkit").options(**options).load()
        found[f"{name} read"] = read.select("value").distinct().count()
    for name, options in {"native": native, "redis": redis}.items():
        stream = spark.readStream.format("qkit").options(
            **options, stage=f"{directory}/stage-{name}", max_rows="400"
        )
        query = (
            stream.load()
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{directory}/checkpoint-{name}")
            .trigger(availableNow=True)
            .start(f"{directory}/archive-{name}")
        )
        query.awaitTermination()
        found[f"{name} streamed"] = spark.read.parquet(f"{directory}/archive-{name}").count()
    spark.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])))
