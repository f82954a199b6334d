"""``df.write`` and ``writeStream``: mapping of columns, and guarantees when tasks or jobs fail."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import qkit.spark
from qkit import DeadLetter, Settings, SyncQueueService
from qkit._internal.ids import new_id
from qkit.errors import ConfigError, InvalidName
from qkit.message import Envelope
from qkit.native import Engine
from qkit.native.bulk import published_jobs
from qkit.spark.options import parse_options
from qkit.spark.row_encoder import message_ids
from tests.spark.channels import service_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ORDER = "tests.spark.models:Order"


def save(frame: DataFrame, **options: str) -> None:
    frame.write.format("qkit").mode("append").options(**options).save()


def peek_all(directory: Path, *channels: str) -> list[list[Envelope]]:
    """Import all bulk files and return the messages of each channel."""

    async def main() -> list[list[Envelope]]:
        async with await Engine.open(directory) as engine:
            await engine.import_bulk_files()
            existing = await engine.list()
            return [
                await engine.peek(name, 1_000_000) if name in existing else [] for name in channels
            ]

    return asyncio.run(main())


def staged(directory: Path) -> list[str]:
    inbox = directory / "inbox"
    return sorted(item.name for item in inbox.iterdir()) if inbox.exists() else []


def test_all_columns_form_one_json_body_and_partitions_keep_their_order(
    spark: SparkSession, directory: Path, native: dict[str, str]
) -> None:
    frame = spark.range(0, 1_000, 1, 3).selectExpr(
        "id",
        "named_struct('city', concat('c', id), 'tags', array('a', null)) as place",
        "map('k', id) as counts",
        "cast(null as string) as note",
        "timestamp'2026-01-02 03:04:05' as at",
    )
    save(frame, channel="orders", key="note", **native)
    [found] = peek_all(directory, "orders")
    assert [json.loads(item.body)["id"] for item in found] == list(range(1_000))
    assert json.loads(found[7].body) == {
        "id": 7,
        "place": {"city": "c7", "tags": ["a", None]},
        "counts": {"k": 7},
        "note": None,
        "at": "2026-01-02T03:04:05Z",
    }
    assert found[7].key is None
    assert len({item.id for item in found}) == 1_000
    assert staged(directory) == []


def test_a_value_column_is_the_body_and_other_columns_are_metadata(
    spark: SparkSession, directory: Path, native: dict[str, str]
) -> None:
    text = spark.sql(
        "select '{\"id\": 1}' as value, 'k1' as key, 8 as priority, cast(0.0 as double) as delay,"
        " 86400 as ttl, map('tenant', 'acme') as headers"
    )
    save(text, channel="text", **native)
    binary = spark.sql("select cast('raw' as binary) as value")
    save(binary, channel="bytes", **native)
    save(spark.sql("select named_struct('id', 2) as value"), channel="struct", **native)
    [[one], [two], [three]] = peek_all(directory, "text", "bytes", "struct")
    assert (one.body, one.key, one.priority, one.headers) == (
        b'{"id": 1}', "k1", 8, {"tenant": "acme"},
    )  # fmt: skip
    assert one.expires_at is not None
    assert (two.body, two.headers) == (b"raw", {"content-type": "application/octet-stream"})
    assert (three.body, three.priority) == (b'{"id":2}', 5)


def test_invalid_columns_and_options_are_rejected_on_the_driver(
    spark: SparkSession, native: dict[str, str]
) -> None:
    for frame, options, message in [
        ("select 1 as value", {}, "'value' has the type int"),
        ("select 'a' as value, 1 as other", {}, "unexpected column 'other' next to 'value'"),
        ("select 'a' as value, 'x' as priority", {}, "cast it to int"),
        ("select 1 as id", {"key": "missing"}, "which does not exist"),
        ("select 1 as id", {"path": ""}, "path"),
        ("select 1 as id", {"model": "tests.spark.models:Missing"}, "cannot load model="),
    ]:
        # The driver raises AnalysisException; an error in a task would be another class.
        with pytest.raises(AnalysisException, match="qkit") as raised:
            save(spark.sql(frame), channel="orders", **{**native, **options})
        assert message in str(raised.value)


def test_a_channel_cannot_be_overwritten(
    spark: SparkSession, directory: Path, native: dict[str, str]
) -> None:
    with pytest.raises(AnalysisException, match="mode\\('append'\\)"):
        spark.range(3).write.format("qkit").mode("overwrite").options(
            channel="orders", **native
        ).save()
    assert peek_all(directory, "orders") == [[]]


def test_an_invalid_row_is_shown_and_nothing_is_published(
    spark: SparkSession, directory: Path, native: dict[str, str]
) -> None:
    frame = spark.range(0, 100, 1, 2).selectExpr("id", "double(if(id = 77, -1, id)) as total")
    with pytest.raises(Exception, match="is invalid") as raised:
        save(frame, channel="orders", model=ORDER, **native)
    assert '{"id":77,"total":-1.0}' in str(raised.value)
    assert "row 27 of partition 1" in str(raised.value)
    assert "nothing was published" in str(raised.value)
    assert staged(directory) == []
    assert peek_all(directory, "orders") == [[]]


def test_invalid_rows_can_be_dead_lettered(
    spark: SparkSession, directory: Path, native: dict[str, str], tmp_path: Path
) -> None:
    frame = spark.range(0, 100, 1, 2).selectExpr("id", "double(if(id % 50 = 7, -1, id)) as total")
    report = tmp_path / "report.json"
    save(
        frame,
        channel="orders",
        model=ORDER,
        on_invalid="dead_letter",
        report=str(report),
        **native,
    )
    [good, bad] = peek_all(directory, "orders", "orders_dlq")
    assert len(good) == 98
    letters = [DeadLetter.from_envelope(item) for item in bad]
    assert [json.loads(letter.body)["id"] for letter in letters] == [7, 57]
    assert {letter.reason for letter in letters} == {"Undecodable"}
    assert letters[0].channel == "orders"
    assert "greater than or equal to 0" in (letters[0].error or "")
    assert json.loads(report.read_text()).items() >= {"messages": 98, "dead_letters": 2}.items()


def test_a_retried_task_writes_each_row_once(
    spark: SparkSession, directory: Path, native: dict[str, str], tmp_path: Path
) -> None:
    frame = failing_once(spark, tmp_path / "failed").selectExpr("id")
    save(frame, channel="orders", **native)
    [found] = peek_all(directory, "orders")
    assert (tmp_path / "failed").exists()
    assert sorted(json.loads(item.body)["id"] for item in found) == list(range(20_000))
    assert staged(directory) == []


def failing_once(spark: SparkSession, marker: Path) -> DataFrame:
    """Return 20,000 rows in two tasks; the second task fails once, near its end."""

    def rows(batches: Any) -> Any:
        for batch in batches:
            for start in range(0, batch.num_rows, 100):
                ids = batch.column(0)
                if ids[start].as_py() >= 19_000 and not marker.exists():
                    marker.touch()
                    raise RuntimeError("this task fails once")
                yield batch.slice(start, 100)

    return spark.range(0, 20_000, 1, 2).mapInArrow(rows, "id long")


def test_a_job_id_is_published_once_even_after_an_aborted_run(
    spark: SparkSession, directory: Path, native: dict[str, str], tmp_path: Path
) -> None:
    def rows(batches: Any) -> Any:
        yield from batches
        raise RuntimeError("this task always fails")

    failing = spark.range(0, 500, 1, 2).mapInArrow(rows, "id long")
    with pytest.raises(Exception, match="always fails"):
        save(failing, channel="orders", job_id="load-1", **native)
    assert staged(directory) == []
    for _ in range(2):
        save(spark.range(0, 500, 1, 4), channel="orders", job_id="load-1", **native)
    [found] = peek_all(directory, "orders")
    assert len(found) == 500
    save(spark.range(0, 500, 1, 1), channel="orders", job_id="load-1", **native)
    [found] = peek_all(directory, "orders")
    assert len(found) == 500


def test_a_job_id_is_published_once_per_channel_and_skipped_rows_are_counted(
    spark: SparkSession, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    monkeypatch.chdir(directory.parent)
    settings = Settings(type="native", path=Path(directory.name))  # a relative path
    frame = spark.range(0, 4_000, 1, 2)
    for channel in ("a", "b"):
        written = qkit.spark.write(frame, channel, settings, job_id="J")
        assert (written.messages, written.skipped, written.job) == (4_000, 0, "J")
    again = qkit.spark.write(frame, "b", settings, job_id="J")
    assert (again.messages, again.dead_letters, again.skipped) == (0, 0, 4_000)
    assert [len(found) for found in peek_all(directory, "a", "b")] == [4_000, 4_000]
    again = qkit.spark.write(frame.limit(5), "a", settings, job_id="J")
    assert (again.messages, again.skipped) == (0, 5)


def test_redis_needs_a_mode_and_a_subscriber(spark: SparkSession, redis_url: str) -> None:
    with pytest.warns(DeprecationWarning, match="without a mode"):
        settings = Settings(type="redis", url=redis_url)
    with pytest.raises(ConfigError, match="explicit mode"):
        qkit.spark.write(spark.range(3), "orders", settings)
    options = {"channel": f"spark-{new_id()}", "type": "redis", "url": redis_url}
    with pytest.raises(AnalysisException, match="explicit mode"):
        save(spark.range(3), **options)
    with pytest.raises(Exception, match="3 of 3 messages had no subscriber and are lost"):
        save(spark.range(3), **options, mode="pubsub")
    settings = Settings(type="redis", mode="pubsub", url=redis_url)
    written = qkit.spark.write(spark.range(3), options["channel"], settings, on_unheard="warn")
    assert (written.messages, written.unheard) == (3, 3)


def test_a_stream_of_12_batches_keeps_the_order_of_each_key_and_partition(
    spark: SparkSession, directory: Path, native: dict[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "in"
    for number in range(12):
        rows = [{"id": number * 10 + at, "customer": f"k{at % 3}"} for at in range(10)]
        file = source / f"{number:02}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (1_700_000_000 + number,) * 2)  # Spark reads the oldest file first
    stream = spark.readStream.schema("id long, customer string").option("maxFilesPerTrigger", 1)
    query = (
        stream.json(str(source))
        .writeStream.format("qkit")
        .options(channel="orders", key="customer", **native)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600)
    waiting = staged(directory)
    assert len(waiting) == 12
    assert waiting != published_jobs(directory), "the jobs are imported in the order of their names"
    [found] = peek_all(directory, "orders")
    assert [json.loads(item.body)["id"] for item in found] == list(range(120))
    for key in ("k0", "k1", "k2"):
        numbers = [json.loads(item.body)["id"] for item in found if item.key == key]
        assert numbers == sorted(numbers)
        assert len(numbers) in (36, 48)


def test_a_retried_task_on_a_broker_loses_no_row_and_reuses_its_ids(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    options = redis_list(f"spark-{new_id()}")
    save(failing_once(spark, tmp_path / "failed"), **options)
    found = spark.read.format("qkit").options(**options).load().select("id", "value").collect()
    bodies = [json.loads(row.value)["id"] for row in found]
    assert set(bodies) == set(range(20_000))
    assert len(bodies) > 20_000, "the rows of the first attempt were not sent again"
    assert len({row.id for row in found}) == 20_000, "rows were sent again with other ids"
    settings = parse_options({key: str(value) for key, value in options.items()}).settings
    with SyncQueueService(settings) as service:
        service.delete(options["channel"])


def test_an_invalid_row_on_a_broker_reports_how_many_rows_were_sent(
    spark: SparkSession, redis_list: Callable[[str], dict[str, Any]]
) -> None:
    frame = spark.range(0, 1_200, 1, 1).selectExpr("id", "double(if(id = 1100, -1, 1)) as total")
    options = redis_list(f"spark-{new_id()}")
    with pytest.raises(Exception, match="1100 rows of this partition were sent before it"):
        save(frame, model=ORDER, **options)
    settings = parse_options({key: str(value) for key, value in options.items()}).settings
    with SyncQueueService(settings) as service:
        assert service.stats(options["channel"]).depth >= 1_100
        service.delete(options["channel"])


def test_a_batch_of_a_stream_that_spark_repeats_is_written_once(
    spark: SparkSession, directory: Path, native: dict[str, str], tmp_path: Path
) -> None:
    source, checkpoint = str(tmp_path / "in"), tmp_path / "checkpoint"
    spark.range(0, 300, 1, 1).write.parquet(source)

    def run() -> None:
        stream = spark.readStream.schema("id long").parquet(source)
        query = (
            stream.writeStream.format("qkit")
            .options(channel="orders", **native)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(600)
        assert query.exception() is None

    run()
    # As if the driver had been killed before Spark recorded the commit of the batch.
    for done in (checkpoint / "commits").iterdir():
        done.unlink()
    run()
    [found] = peek_all(directory, "orders")
    assert sorted(json.loads(item.body)["id"] for item in found) == list(range(300))
    assert staged(directory) == []


@pytest.mark.parametrize("options", ["redis", "rabbitmq", "kafka"], indirect=True)
def test_a_batch_of_a_stream_to_a_broker_that_spark_repeats_loses_no_row(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    source, checkpoint = str(tmp_path / "in"), tmp_path / "checkpoint"

    def run(first: int) -> None:
        spark.range(first, first + 200, 1, 2).write.mode("append").parquet(source)
        stream = spark.readStream.schema("id long").parquet(source)
        writer = stream.writeStream.format("qkit").options(**options)
        query = (
            writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        )
        assert query.awaitTermination(600)
        assert query.exception() is None

    run(0)
    # As if the driver had been killed before Spark recorded the commit of the batch.
    for done in (checkpoint / "commits").iterdir():
        done.unlink()
    run(200)
    with service_of(options) as service:
        found = service.peek(options["channel"], 2_000)
    bodies = Counter(json.loads(message.body)["id"] for message in found)
    assert bodies == {number: 2 if number < 200 else 1 for number in range(400)}


def test_a_failed_batch_of_a_stream_leaves_no_files_and_is_written_once_later(
    spark: SparkSession, directory: Path, native: dict[str, str], tmp_path: Path
) -> None:
    source, checkpoint, broken = str(tmp_path / "in"), tmp_path / "checkpoint", tmp_path / "broken"
    spark.range(0, 300, 1, 2).write.parquet(source)
    broken.touch()

    def rows(batches: Any) -> Any:
        for batch in batches:
            yield batch
            if broken.exists() and batch.column(0)[0].as_py() >= 150:  # only in the second task
                raise RuntimeError("this task always fails")

    def start() -> StreamingQuery:
        stream = spark.readStream.schema("id long").parquet(source).mapInArrow(rows, "id long")
        writer = stream.writeStream.format("qkit").options(channel="orders", **native)
        return (
            writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        )

    with pytest.raises(StreamingQueryException, match="always fails"):
        start().awaitTermination(600)
    assert staged(directory) == []
    assert peek_all(directory, "orders") == [[]]
    broken.unlink()
    assert start().awaitTermination(600)
    [found] = peek_all(directory, "orders")
    assert sorted(json.loads(item.body)["id"] for item in found) == list(range(300))


def test_ids_have_the_usual_form_and_differ_between_jobs_and_partitions() -> None:
    found = [next(message_ids(job, part, 1e9)) for job in ("a", "b") for part in (0, 1, 0xFFFFF)]
    assert len(set(found)) == 6
    assert all(len(id) == 32 and id[12] == "7" for id in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'channel' is missing"),
        ({"chanel": "orders"}, "found 'chanel'"),
        ({"channel": "orders", "colour": "red"}, "colour"),
        ({"channel": "orders", "retry.max_attempts": "none"}, "max_attempts"),
        ({"channel": "orders", "on_invalid": "drop"}, "fail or dead_letter"),
        ({"channel": "orders", "model": "Order"}, "package.module:Class"),
        ({"channel": "orders", "max_rows": "0"}, "at least 1"),
        ({"channel": "orders", "broadcast": "perhaps"}, "true or false"),
        ({"channel": "orders", "retention": "long"}, "number of seconds"),
        ({"channel": "no/name"}, "no/name"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(options: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigError, InvalidName)) as raised:
        parse_options(options)
    assert message in str(raised.value)


def test_options_override_the_settings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "qkit.toml"
    file.write_text('type = "native"\npath = "data"\n[retry]\nmax_attempts = 7\n')
    plan = parse_options({"channel": "orders", "config": str(file), "retry.jitter": "0.05"})
    assert plan.settings.retry.max_attempts == 7
    assert plan.settings.retry.jitter == 0.05
    assert plan.settings.path == Path("data").resolve()
    assert isinstance(plan.settings, Settings)
