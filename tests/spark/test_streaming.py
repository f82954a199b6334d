"""``readStream``: limits, replays, a killed driver, a broker that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession

from qkit import Settings, SyncQueueService
from qkit.message import new_id
from qkit.spark.options import plan_of
from tests.spark.conftest import ROOT
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def settings_of(options: dict[str, str]) -> Settings:
    return plan_of(options).settings


@contextmanager
def channel(options: dict[str, str]) -> Iterator[SyncQueueService]:
    """A service on the channel, which is gone afterwards."""
    with SyncQueueService(settings_of(options)) as service:
        yield service
        for name in (options["channel"], service.settings.dead_letter_name(options["channel"])):
            if name in service.queues():
                service.delete(name)


def collected(
    spark: SparkSession, options: dict[str, str], checkpoint: Path
) -> list[list[dict[str, Any]]]:
    """The batches of what is there now."""
    batches: list[list[dict[str, Any]]] = []

    def take(frame: Any, number: int) -> None:
        batches.append([row.asDict() for row in frame.collect()])

    query = (
        spark.readStream.format("qkit")
        .options(**options)
        .load()
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600)
    assert query.exception() is None
    return [batch for batch in batches if batch]


def numbers(batches: list[list[dict[str, Any]]]) -> list[int]:
    return [json.loads(row["value"]) for batch in batches for row in batch]


def test_a_native_stream_watches_the_log_in_batches_and_goes_on_where_it_was(
    spark: SparkSession, native: dict[str, str], tmp_path: Path
) -> None:
    options = {"channel": "orders", **native}
    with channel(options) as service:
        service.send_many("other", range(5))
        service.send_many("orders", range(25), headers={"tenant": "acme"}, key="k")
        # As if consumed: a stream watches what was sent, whatever became of it.
        service.purge("orders")
        first = collected(spark, {**options, "max_rows": "10"}, tmp_path / "a")
        assert [len(batch) for batch in first] == [10, 10, 5]
        assert numbers(first) == list(range(25))
        row = first[0][0]
        assert (row["headers"], row["key"], row["attempt"]) == ({"tenant": "acme"}, "k", 1)
        assert row["sent_at"] is not None
        spark.range(25, 30, 1, 2).selectExpr("string(id) as value").write.format("qkit").mode(
            "append"
        ).options(**options).save()
        service.send("orders", 30)
        deadline = time.monotonic() + 30
        while service.stats("orders").depth < 6:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert sorted(numbers(collected(spark, options, tmp_path / "a"))) == list(range(25, 31))
        latest = {**options, "starting": "latest"}
        assert collected(spark, latest, tmp_path / "b") == []
        service.send("orders", 31)
        assert numbers(collected(spark, latest, tmp_path / "b")) == [31]


def test_a_staged_stream_consumes_in_batches_and_leaves_no_stage_behind(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    stage = tmp_path / "stage"
    options = {**redis_list(f"spark-{new_id()}"), "stage": str(stage), "max_rows": "40"}
    with channel(options) as service:
        service.send_many(options["channel"], range(100))
        batches = collected(spark, options, tmp_path / "checkpoint")
        assert [len(batch) for batch in batches] == [40, 40, 20]
        assert numbers(batches) == list(range(100))
        assert service.stats(options["channel"]).depth == 0
        assert list(stage.iterdir()) == []


def test_what_was_staged_and_acknowledged_before_spark_knew_is_not_lost(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    from qkit.spark.stage import Stage

    options = {**redis_list(f"spark-{new_id()}"), "stage": str(tmp_path / "stage")}
    with channel(options) as service:
        service.send_many(options["channel"], range(10))
        crashed = Stage(plan_of(options))
        assert crashed.latest(crashed.initial(), None) == {"stage": 1}
        assert service.stats(options["channel"]).depth == 0
        crashed.close()
        service.send_many(options["channel"], range(10, 12))
        batches = collected(spark, options, tmp_path / "checkpoint")
        assert sorted(numbers(batches)) == list(range(12))


@pytest.mark.parametrize("where", ["native", "redis"])
def test_a_killed_driver_loses_nothing(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if where == "native":
        options = {"channel": "orders", **request.getfixturevalue("native"), "max_rows": "50"}
    else:
        options = request.getfixturevalue("redis_list")(f"spark-{new_id()}")
        options |= {"stage": str(tmp_path / "stage"), "max_rows": "50"}
    output = tmp_path / "out"
    arguments = [json.dumps(options), str(output), str(tmp_path / "checkpoint")]
    with channel(options) as service:
        service.send_many(options["channel"], range(500))
        process = start(arguments)
        try:
            deadline = time.monotonic() + 600
            while not list(output.glob("*.parquet")):  # in the middle of its stream
                assert process.poll() is None, "the driver ended"
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        service.send_many(options["channel"], range(500, 600))
        again = start([*arguments, "all"])
        assert again.wait(600) == 0
        found = archived(output)
        assert set(found) == set(range(600))
        if where == "native":
            assert len(found) == 600, "by places in the log it is exactly once"


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.archiver", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def archived(output: Path) -> list[int]:
    """What Spark's own list of files says is there."""
    import pyarrow.parquet

    metadata = output / "_spark_metadata"
    names: set[str] = set()
    for log in metadata.iterdir():
        if log.name.isdecimal() or log.name.endswith(".compact"):
            names |= {
                json.loads(line)["path"].rsplit("/", 1)[-1]
                for line in log.read_text().splitlines()[1:]
            }
    tables = [pyarrow.parquet.read_table(output / name) for name in sorted(names)]
    return [int(value) for table in tables for value in table.column("value").to_pylist()]


def test_a_stream_outlives_its_broker(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    direct = redis_list(f"spark-{new_id()}")
    address = urlsplit(direct["url"])
    assert address.port is not None
    taken: list[int] = []
    with Proxy(address.port) as proxy, channel(direct) as service:
        options = {
            **direct,
            "url": f"redis://127.0.0.1:{proxy.port}/0",
            "stage": str(tmp_path / "stage"),
        }
        query = (
            spark.readStream.format("qkit")
            .options(**options)
            .load()
            .writeStream.foreachBatch(
                lambda frame, number: taken.extend(json.loads(row.value) for row in frame.collect())
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(processingTime="200 milliseconds")
            .start()
        )
        try:
            service.send_many(direct["channel"], range(10))
            until(lambda: len(taken) >= 10, query)
            proxy.refuse()
            proxy.reset()
            service.send_many(direct["channel"], range(10, 20))
            time.sleep(2)  # some batches find no broker
            assert query.isActive, query.exception()
            proxy.heal()
            until(lambda: set(taken) == set(range(20)), query)
        finally:
            query.stop()


def until(condition: Callable[[], bool], query: Any) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_write_outlives_a_short_outage_and_fails_by_a_long_one(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]]
) -> None:
    import threading

    direct = redis_list(f"spark-{new_id()}")
    address = urlsplit(direct["url"])
    assert address.port is not None
    frame = spark.range(0, 20_000, 1, 2)
    with Proxy(address.port) as proxy, channel(direct) as service:
        options = {**direct, "url": f"redis://127.0.0.1:{proxy.port}/0"}

        def interrupt() -> None:
            while not proxy.open_connections:
                time.sleep(0.001)
            proxy.refuse()
            proxy.reset()
            time.sleep(1)
            proxy.heal()

        outage = threading.Thread(target=interrupt)
        outage.start()
        frame.write.format("qkit").mode("append").options(**options).save()
        outage.join()
        found = spark.read.format("qkit").options(**direct).load().select("value").collect()
        assert {json.loads(row.value)["id"] for row in found} == set(range(20_000))
        proxy.refuse()
        with pytest.raises(Exception, match=r"BackendUnavailable|SendTimeout|CircuitOpen"):
            frame.write.format("qkit").mode("append").options(send_timeout="1", **options).save()
        assert service.stats(direct["channel"]).depth == len(found)
