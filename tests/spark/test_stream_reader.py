"""``readStream``: limits, checkpoints, killed drivers and outages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession

from qkit import Settings, SyncQueueService
from qkit._internal.ids import new_id
from qkit.spark.options import parse_options
from tests.spark.conftest import ROOT
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def settings_of(options: dict[str, str]) -> Settings:
    return parse_options(options).settings


@contextmanager
def channel(options: dict[str, str]) -> Iterator[SyncQueueService]:
    """Start a service on a channel and delete the channel at the end."""
    with SyncQueueService(settings_of(options)) as service:
        yield service
        for name in (options["channel"], service.settings.dead_letter_name(options["channel"])):
            if name in service.queues():
                service.delete(name)


def collected(
    spark: SparkSession, options: dict[str, str], checkpoint: Path
) -> list[list[dict[str, Any]]]:
    """Stream the available messages and return the rows of each batch that is not empty."""
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


def test_a_native_stream_reads_the_log_in_batches_and_continues_from_its_checkpoint(
    spark: SparkSession, native: dict[str, str], tmp_path: Path
) -> None:
    options = {"channel": "orders", **native}
    with channel(options) as service:
        service.send_many("other", range(5))
        service.send_many("orders", range(25), headers={"tenant": "acme"}, key="k")
        # A stream reads every message that was sent, even if it was consumed or purged.
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
        deadline = time.monotonic() + 300
        while service.stats("orders").depth < 6:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert sorted(numbers(collected(spark, options, tmp_path / "a"))) == list(range(25, 31))
        latest = {**options, "starting": "latest"}
        assert collected(spark, latest, tmp_path / "b") == []
        service.send("orders", 31)
        assert numbers(collected(spark, latest, tmp_path / "b")) == [31]


def test_messages_that_spark_has_just_published_are_streamed_and_read(
    spark: SparkSession, native: dict[str, str], tmp_path: Path
) -> None:
    """No engine has opened the directory before Spark writes to it and reads it."""
    options = {"channel": "orders", **native}
    with pytest.raises(Exception, match="no channel 'orders'"):
        collected(spark, options, tmp_path / "early")
    with pytest.raises(Exception, match="no channel 'orders'"):
        spark.read.format("qkit").options(**options).load().count()
    assert not Path(native["path"]).exists()
    for first in (0, 100):
        frame = spark.range(first, first + 100, 1, 2).selectExpr("string(id) as value")
        frame.write.format("qkit").mode("append").options(**options).save()
        found = numbers(collected(spark, options, tmp_path / "checkpoint"))
        assert sorted(found) == list(range(first, first + 100))
    assert spark.read.format("qkit").options(**options).load().count() == 200


def test_a_staged_stream_consumes_in_batches_and_removes_its_stages(
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


def test_messages_that_were_staged_before_the_first_checkpoint_are_not_lost(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    from qkit.spark.staging import StagingArea

    options = {**redis_list(f"spark-{new_id()}"), "stage": str(tmp_path / "stage")}
    with channel(options) as service:
        service.send_many(options["channel"], range(10))
        crashed = StagingArea(parse_options(options))
        assert crashed.latest(crashed.initial(), None) == {"stage": 1}
        assert service.stats(options["channel"]).depth == 0
        crashed.close()
        service.send_many(options["channel"], range(10, 12))
        batches = collected(spark, options, tmp_path / "checkpoint")
        assert sorted(numbers(batches)) == list(range(12))


@pytest.mark.full  # starts two JVMs for each backend
@pytest.mark.parametrize("backend", ["native", "redis", "rabbitmq", "kafka"])
def test_a_killed_driver_loses_no_message(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    options = {"channel": f"spark-{new_id()}", "type": backend, "max_rows": "50"}
    if backend == "native":
        options |= {"path": str(tmp_path / "data")}
    else:
        options |= {"url": request.getfixturevalue(f"{backend}_url")}
    if backend == "redis":
        options |= {"mode": "list"}
    if backend in ("redis", "rabbitmq"):
        options |= {"stage": str(tmp_path / "stage")}
    output = tmp_path / "out"
    arguments = [json.dumps(options), str(tmp_path / "checkpoint"), str(output)]
    with channel(options) as service:
        service.send_many(options["channel"], range(500))
        kill_when(lambda: any(output.glob("*.parquet")), arguments)
        assert len(archived(output)) < 500, "the driver was killed too late, after the whole stream"
        service.send_many(options["channel"], range(500, 600))
        run_to_completion([*arguments, "all"], tmp_path)
        found = archived(output)
        assert set(found) == set(range(600))
        if backend in ("native", "kafka"):
            assert len(found) == 600, "a stream of a log delivered a message twice"


@pytest.mark.full
def test_a_killed_driver_writes_each_row_once_to_native(
    native: dict[str, str], tmp_path: Path
) -> None:
    source, target = ({"channel": name, **native} for name in ("orders", "copies"))
    arguments = [
        json.dumps({**source, "max_rows": "50"}),
        str(tmp_path / "checkpoint"),
        json.dumps(target),
    ]
    with channel(source) as service, channel(target):
        service.send_many("orders", range(500))

        def has_copies() -> bool:
            return "copies" in service.queues() and service.stats("copies").depth > 0

        kill_when(has_copies, arguments)
        run_to_completion([*arguments, "all"], tmp_path)
        deadline = time.monotonic() + 300
        while service.stats("copies").depth < 500:  # bulk files are imported within a second
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = [int(message.body) for message in service.peek("copies", 1_000)]
        assert sorted(found) == list(range(500))
        inbox = Path(native["path"]) / "inbox"
        assert not list(inbox.glob("[!.]*")), "some bulk files were not imported"


def kill_when(condition: Callable[[], bool], arguments: list[str]) -> None:
    """Run a driver until the condition holds, then kill it and its child processes."""
    process = start(arguments)
    try:
        deadline = time.monotonic() + 600
        while not condition():
            assert process.poll() is None, "the driver ended too early"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_to_completion(arguments: list[str], directory: Path) -> None:
    """Run a driver until it has read all messages; show its output if it fails."""
    log = directory / "driver.log"
    with log.open("wb") as output:
        status = start(arguments, output).wait(600)
    assert status == 0, log.read_text(errors="replace")[-8_000:]


def start(
    arguments: list[str], output: BinaryIO | int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a driver without coverage, because a kill would damage the coverage data file."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.archiver", *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def archived(output: Path) -> list[int]:
    """Return the values in the Parquet files that Spark has committed."""
    import pyarrow.parquet

    metadata = output / "_spark_metadata"
    names: set[str] = set()
    for log in metadata.iterdir() if metadata.exists() else ():
        if log.name.isdecimal() or log.name.endswith(".compact"):
            names |= {
                json.loads(line)["path"].rsplit("/", 1)[-1]
                for line in log.read_text().splitlines()[1:]
            }
    tables = [pyarrow.parquet.read_table(output / name) for name in sorted(names)]
    return [int(value) for table in tables for value in table.column("value").to_pylist()]


def test_a_stream_survives_an_outage_of_its_broker(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    direct = redis_list(f"spark-{new_id()}")
    address = urlsplit(direct["url"])
    assert address.port is not None
    received: list[int] = []
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
                lambda frame, number: received.extend(
                    json.loads(row.value) for row in frame.collect()
                )
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(processingTime="200 milliseconds")
            .start()
        )
        try:
            service.send_many(direct["channel"], range(10))
            wait_until(lambda: len(received) >= 10, query)
            proxy.refuse()
            proxy.reset()
            service.send_many(direct["channel"], range(10, 20))
            time.sleep(2)  # some batches run during the outage
            assert query.isActive, query.exception()
            proxy.heal()
            wait_until(lambda: set(received) == set(range(20)), query)
        finally:
            query.stop()


def wait_until(condition: Callable[[], bool], query: Any) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_write_survives_a_short_outage_and_fails_in_a_long_one(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]]
) -> None:
    direct = redis_list(f"spark-{new_id()}")
    address = urlsplit(direct["url"])
    assert address.port is not None
    frame = spark.range(0, 100_000, 1, 2)
    written = threading.Event()
    with Proxy(address.port) as proxy, channel(direct) as service:
        options = {**direct, "url": f"redis://127.0.0.1:{proxy.port}/0"}

        def sent() -> int:
            return sum(connection.sent for connection in proxy.connections)

        def interrupt() -> None:
            while sent() < 1_000_000:  # of about 12 million bytes in total
                time.sleep(0.001)
            proxy.refuse()
            assert not written.is_set()
            time.sleep(1)
            proxy.heal()

        with ThreadPoolExecutor() as threads:
            outage = threads.submit(interrupt)
            frame.write.format("qkit").mode("append").options(**options).save()
            written.set()
            outage.result(60)
        found = spark.read.format("qkit").options(**direct).load().select("value").collect()
        assert {json.loads(row.value)["id"] for row in found} == set(range(100_000))
        proxy.refuse()
        with pytest.raises(Exception, match=r"BackendUnavailable|SendTimeout|CircuitOpen"):
            frame.write.format("qkit").mode("append").options(send_timeout="1", **options).save()
        assert service.stats(direct["channel"]).depth == len(found)
