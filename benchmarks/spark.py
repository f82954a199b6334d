"""Benchmarks of Spark: sending against encoding alone, and qkit against Spark's Kafka connector.

Each ratio compares two rates of one repetition, with the same DataFrame and session (``local[2]``).
Export the URLs that ``scripts/brokers urls`` prints; the figures of a broker without a URL are
missing. Run from the root of the repository: ``python -m benchmarks.spark``.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks import _measure
from benchmarks._measure import Figure, Missing, Scale, Suite
from benchmarks._spark_source import CountingSource
from qkit import QueueService, Settings
from qkit._internal.ids import new_id
from qkit.spark import register, write
from qkit.spark.kafka_connector import connector_options, has_connector, kafka_frame
from qkit.spark.publish import as_options

ROOT = Path(__file__).parent.parent


def connector() -> str:
    """Return the paths of the Kafka connector's jars, separated by commas; empty if unavailable."""
    script = str(ROOT / "scripts" / "spark-jars")
    return subprocess.run([script], capture_output=True, text=True, check=False).stdout.strip()


@cache
def session() -> SparkSession:
    """Return the session that all suites share, with the Kafka connector if it is available."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    builder = SparkSession.builder.master("local[2]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.jars": connector(),
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.dataSource.register(CountingSource)
    return spark


def frame(count: int) -> DataFrame:
    """Return ``count`` typical rows of numbers and short strings."""
    return (
        session()
        .range(0, count, 1, 2)
        .selectExpr(
            "id",
            "concat('customer-', id % 1000) as customer",
            "element_at(array('order', 'refund', 'visit'), int(id % 3) + 1) as kind",
            "double(id % 1000) as total",
        )
    )


def rate(count: int, work: Callable[[], object]) -> float:
    """Run ``work``, which writes ``count`` rows, and return the rows per second."""
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def save(df: DataFrame, source: str, options: Mapping[str, str]) -> None:
    """Write the rows with a data source."""
    df.write.format(source).mode("append").options(**options).save()


async def relative_to_counting(settings: Settings, scale: Scale) -> float:
    """Return the rate of sending rows relative to the rate of only encoding them.

    Call it in the main thread: other threads lack the session's data sources.
    """
    count = scale.of(300_000, 1_000)
    options = {**as_options(settings), "channel": f"bench-{new_id()}"}
    df = frame(count)
    save(frame(1_000), "qkit-count", options)  # starts Spark's Python workers
    counting = rate(count, lambda: save(df, "qkit-count", options))
    sending = rate(count, lambda: save(df, "qkit", options))
    if settings.type != "native":
        await delete(settings, options["channel"])
    return sending / counting


async def delete(settings: Settings, channel: str) -> None:
    """Delete the channel of a benchmark."""
    async with QueueService(settings) as service:
        await service.delete(channel)


def url(name: str) -> str:
    """Return the URL of a broker; raise ``Missing`` if it is not set."""
    found = os.environ.get(f"QKIT_TEST_{name.upper()}_URL")
    if not found:
        raise Missing(f"no URL of {name}: start it with scripts/brokers up and export its URL")
    return found


async def _native(scale: Scale) -> Mapping[str, float]:
    settings = Settings(type="native", path=scale.directory / "data")
    return {"native": await relative_to_counting(settings, scale)}


async def _redis(scale: Scale) -> Mapping[str, float]:
    settings = Settings(type="redis", mode="list", url=url("redis"))
    return {"redis": await relative_to_counting(settings, scale)}


async def _kafka(scale: Scale) -> Mapping[str, float]:
    settings = Settings(type="kafka", url=url("kafka"))
    if not has_connector(session()):
        raise Missing("the Kafka connector is missing: download it with scripts/spark-jars")
    count = scale.of(200_000, 1_000)
    df, channel = frame(count), f"bench-{new_id()}"
    write(frame(1_000), channel, settings)

    def write_with_connector() -> None:
        ready = kafka_frame(df, channel)
        ready.write.format("kafka").options(**connector_options(settings)).save()

    connector = rate(count, write_with_connector)
    own = rate(count, lambda: write(df, channel, settings))
    source = rate(count, lambda: save(df, "qkit", {**as_options(settings), "channel": channel}))
    await delete(settings, channel)
    return {"kafka.write": own / connector, "kafka.source": source / connector}


async def _memory(scale: Scale) -> Mapping[str, float]:
    few, many = scale.of(50_000, 10_000), scale.of(500_000, 20_000)

    def peak_bytes(count: int) -> int:
        directory = scale.directory / f"memory-{count}"
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks._spark_memory", str(count), str(directory)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        shutil.rmtree(directory)
        return int(output)

    return {"memory": peak_bytes(many) / peak_bytes(few)}


SUITES = (
    Suite("native", (Figure("native", "write to native / encode only", 0.5),), _native),
    Suite("redis", (Figure("redis", "write to a Redis list / encode only", 0.5),), _redis),
    Suite(
        "kafka",
        (
            Figure("kafka.write", "write() to Kafka / Spark's connector", 0.9),
            Figure("kafka.source", "data source to Kafka / Spark's connector", 0.2),
        ),
        _kafka,
    ),
    Suite(
        "memory",
        (Figure("memory", "peak memory of a task, 500,000 / 50,000 rows", 1.1, at_most=True),),
        _memory,
    ),
)

if __name__ == "__main__":
    logging.getLogger("qkit").setLevel(logging.CRITICAL)
    sys.exit(_measure.main(SUITES, Path(__file__).with_suffix(".json"), __doc__ or ""))
