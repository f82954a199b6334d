"""Driver with executors in separate processes: ``python -m tests.spark.on_a_cluster …``.

It writes to a native directory and to Redis while one worker is killed, reads the messages as a
batch and as a stream, and prints the counts as JSON. It also writes to a relative native path,
which executors must not resolve against their own working directories.
"""

from __future__ import annotations

import json
import sys

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from tests.spark.conftest import session


def main(native: dict[str, str], redis: dict[str, str], directory: str) -> dict[str, list[int]]:
    spark = session("local-cluster[2,1,1024]", **{"spark.executor.memory": "512m"})
    found: dict[str, list[int]] = {}
    for name, options in {"native": native, "redis": redis}.items():
        frame = spark.range(0, 1_000, 1, 4).withColumn("mark", lit(f"{directory}/mark-{name}"))
        frame.write.format("qkit").mode("append").options(
            **options, model="tests.spark.models:Deadly"
        ).save()
        found[f"{name} read"] = counts(spark.read.format("qkit").options(**options).load())
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
        found[f"{name} streamed"] = counts(spark.read.parquet(f"{directory}/archive-{name}"))
    found["relative read"] = relative(spark, {"type": "native", "path": "relative/data"})
    spark.stop()
    return found


def relative(spark: SparkSession, options: dict[str, str]) -> list[int]:
    """Write to a relative path and return the numbers of dead letters and messages."""
    frame = spark.range(0, 105, 1, 4).selectExpr("id", "double(if(id < 5, -1, 1)) as total")
    frame.write.format("qkit").mode("append").options(
        **options, channel="orders", model="tests.spark.models:Order", on_invalid="dead_letter"
    ).save()
    reader = spark.read.format("qkit").options(**options, channel="orders")
    numbers = [reader.option("dead_letters", flag).load().count() for flag in ("true", "false")]
    with pytest.raises(Exception, match="no channel 'missing'"):
        spark.read.format("qkit").options(**options, channel="missing").load().count()
    return numbers


def counts(frame: DataFrame) -> list[int]:
    """Return the numbers of messages and of distinct messages."""
    return list(frame.selectExpr("count(value)", "count(distinct value)").collect()[0])


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])))
