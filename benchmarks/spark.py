"""Spark: what sending costs beside encoding, Kafka by the connector and by the data source.

Every ratio is of rates in one repetition, on the same frame and the same session (``local[2]``).
Needs the brokers of ``scripts/brokers urls`` in the environment; without one its figures are
missing. Run it from the root of the repository: ``python -m benchmarks.spark``.
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
    """The jars of Spark's Kafka connector, joined by commas; none where they cannot be had."""
    script = str(ROOT / "scripts" / "spark-jars")
    return subprocess.run([script], capture_output=True, text=True, check=False).stdout.strip()


@cache
def session() -> SparkSession:
    """One for all suites, with Kafka's connector if its jars are there."""
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
    """Rows as they are archived and published every day: a few numbers and short texts."""
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
    """Rows in a second."""
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def save(df: DataFrame, form: str, options: Mapping[str, str]) -> None:
    """By the data source of that name."""
    df.write.format(form).mode("append").options(**options).save()


async def beside_counting(settings: Settings, scale: Scale) -> float:
    """The rate of sending over that of the same writer that only counts.

    Spark is called in the main thread: in another it does not know the session's data sources.
    """
    count = scale.of(300_000, 1_000)
    options = {**as_options(settings), "channel": f"bench-{new_id()}"}
    df = frame(count)
    save(frame(1_000), "qkit-count", options)  # Spark's workers are up from here on
    counting = rate(count, lambda: save(df, "qkit-count", options))
    sending = rate(count, lambda: save(df, "qkit", options))
    if settings.type != "native":
        await delete(settings, options["channel"])
    return sending / counting


async def delete(settings: Settings, channel: str) -> None:
    """Leave nothing behind on a broker."""
    async with QueueService(settings) as service:
        await service.delete(channel)


def url(name: str) -> str:
    """Where a broker is."""
    found = os.environ.get(f"QKIT_TEST_{name.upper()}_URL")
    if not found:
        raise Missing(f"no {name}: start it with scripts/brokers up, and export its address")
    return found


async def _native(scale: Scale) -> Mapping[str, float]:
    settings = Settings(type="native", path=scale.directory / "data")
    return {"native": await beside_counting(settings, scale)}


async def _redis(scale: Scale) -> Mapping[str, float]:
    settings = Settings(type="redis", mode="list", url=url("redis"))
    return {"redis": await beside_counting(settings, scale)}


async def _kafka(scale: Scale) -> Mapping[str, float]:
    settings = Settings(type="kafka", url=url("kafka"))
    if not has_connector(session()):
        raise Missing("the connector's jars are not there: scripts/spark-jars gets them")
    count = scale.of(200_000, 1_000)
    df, channel = frame(count), f"bench-{new_id()}"
    write(frame(1_000), channel, settings)

    def plain() -> None:
        ready = kafka_frame(df, channel)
        ready.write.format("kafka").options(**connector_options(settings)).save()

    connector = rate(count, plain)
    own = rate(count, lambda: write(df, channel, settings))
    source = rate(count, lambda: save(df, "qkit", {**as_options(settings), "channel": channel}))
    await delete(settings, channel)
    return {"kafka.write": own / connector, "kafka.source": source / connector}


async def _memory(scale: Scale) -> Mapping[str, float]:
    few, many = scale.of(50_000, 10_000), scale.of(500_000, 20_000)

    def most(count: int) -> int:
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

    return {"memory": most(many) / most(few)}


SUITES = (
    Suite("native", (Figure("native", "to native, beside only counting", 0.5),), _native),
    Suite("redis", (Figure("redis", "to a Redis list, beside only counting", 0.5),), _redis),
    Suite(
        "kafka",
        (
            Figure("kafka.write", "to Kafka by write(), beside Spark's connector", 0.9),
            Figure("kafka.source", "to Kafka by the data source, beside the connector", 0.2),
        ),
        _kafka,
    ),
    Suite(
        "memory",
        (Figure("memory", "a task's memory for ten times the rows", 1.1, at_most=True),),
        _memory,
    ),
)

if __name__ == "__main__":
    logging.getLogger("qkit").setLevel(logging.CRITICAL)
    sys.exit(_measure.main(SUITES, Path(__file__).with_suffix(".json"), __doc__ or ""))
