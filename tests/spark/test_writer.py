"""Batch writers without a Spark session: rows become messages and dead letters."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark.sql.types import StructType

from qkit import SyncQueueService
from qkit._internal.ids import new_id
from qkit.errors import (
    ConfigError,
    InvalidBody,
    QueueError,
    QueueNotFound,
    StorageError,
)
from qkit.native import Engine
from qkit.native.config import QueueConfig
from qkit.spark import native_log
from qkit.spark.columns import Columns, columns_of
from qkit.spark.native_log import NativeLog
from qkit.spark.options import parse_options
from qkit.spark.row_encoder import message_ids
from qkit.spark.writer import BatchWriter, TaskResult
from tests.spark.channels import BROKERS, service_of
from tests.spark.conftest import ROOT


@contextmanager
def subscriber(url: str, channel: str) -> Iterator[None]:
    with redis.from_url(url) as client, client.pubsub() as pubsub:
        pubsub.subscribe(channel)
        assert pubsub.get_message(timeout=60) is not None
        yield


class TestWriter:
    @pytest.mark.parametrize(
        ("more", "dead_letter"),
        [
            ({}, "orders_dlq"),
            ({"dead_letter.suffix": "-bad"}, "orders-bad"),
            ({"dead_letter.enabled": "false"}, None),
        ],
        ids=str,
    )
    def test_a_new_native_channel_gets_the_settings_of_the_owner(
        self, tmp_path: Path, more: dict[str, str], dead_letter: str | None
    ) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path), **more}
        writer = BatchWriter(parse_options(options), Columns("text", ()))
        batch = pa.RecordBatch.from_pylist([{"value": "1"}])
        writer.commit([writer.write(iter([batch]))])
        owner = QueueConfig(max_depth=3, max_priority=20, ack_deadline=5.0, max_deliveries=None)

        async def imported() -> QueueConfig:
            async with await Engine.open(tmp_path, defaults=owner) as engine:
                assert await engine.import_bulk_files() == 1
                return engine.catalogue.find("orders", "test").config

        assert asyncio.run(imported()) == replace(owner, dead_letter=dead_letter)

    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_valid_rows_become_messages_and_invalid_rows_dead_letters(
        self, options: dict[str, str]
    ) -> None:
        plan = parse_options(
            {**options, "model": "tests.spark.models:Order", "on_invalid": "dead_letter"}
        )
        writer = BatchWriter(plan, Columns("row", ()))
        batch = pa.RecordBatch.from_pylist(
            [{"id": number, "total": -1.0 if number == 7 else 1.5} for number in range(1_100)]
        )
        written = writer.write(iter([batch]))
        assert (written.rows, written.dead_letters) == (1_100, 1)
        writer.commit([written])
        with service_of(options) as service:
            deadline = time.monotonic() + 30
            while (depth := self.depth(service, options["channel"])) < 1_099:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert depth == 1_099
            [letter] = service.dead_letters(options["channel"]).list()
            assert json.loads(letter.body) == {"id": 7, "total": -1.0}

    def depth(self, service: SyncQueueService, channel: str) -> int:
        with suppress(QueueNotFound):  # the native owner imports bulk files within a second
            return service.stats(channel).depth
        return 0

    def test_only_the_parts_of_successful_attempts_are_published(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        writer = BatchWriter(parse_options(options), Columns("row", ()))
        batch = pa.RecordBatch.from_pylist([{"id": 1}])
        first = writer.write(iter([batch]))
        second = TaskResult(first.job, first.staged, 1, 0, 0)
        (tmp_path / "inbox" / f".{first.staged}" / "00000000.seg").rename(
            tmp_path / "inbox" / f".{first.staged}" / "00000001.seg"
        )
        again = writer.write(iter([batch]))
        assert again.part == 0
        writer.commit([second, None])
        [published] = (tmp_path / "inbox" / first.job).iterdir()
        assert published.name == "00000001.seg"

    def test_a_commit_fails_if_the_driver_does_not_see_all_parts(self, tmp_path: Path) -> None:
        writer = BatchWriter(
            parse_options({"channel": "orders", "path": str(tmp_path)}), Columns("row", ())
        )
        done = writer.write(iter([pa.RecordBatch.from_pylist([{"id": 1}])]))
        unseen = TaskResult(done.job, done.staged, done.part + 1, 1, 0)
        with pytest.raises(StorageError, match=r"1 of 2 parts .* must share the directory"):
            writer.commit([done, unseen])
        writer.abort([done, unseen])
        assert list((tmp_path / "inbox").iterdir()) == []

    def test_a_job_is_published_once_per_channel_and_reports_its_counts(
        self, tmp_path: Path
    ) -> None:
        report = tmp_path / "report.json"

        def write(channel: str, rows: int) -> tuple[int, int]:
            options = {"channel": channel, "path": str(tmp_path / "data"), "job_id": "J"}
            plan = parse_options({**options, "report": str(report)})
            writer = BatchWriter(plan, Columns("row", ()))
            batch = pa.RecordBatch.from_pylist([{"id": number} for number in range(rows)])
            writer.commit([writer.write(iter([batch]))])
            counts = json.loads(report.read_text())
            return counts["messages"], counts["skipped"]

        assert write("a", 40) == (40, 0)
        assert write("b", 40) == (40, 0)
        assert write("a", 30) == (0, 30), "the job was published again while it was in the inbox"
        with service_of({"channel": "a", "path": str(tmp_path / "data")}) as service:
            deadline = time.monotonic() + 30
            while min(self.depth(service, "a"), self.depth(service, "b")) < 40:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert write("b", 30) == (0, 30), "the job was published again after its import"
        assert not list((tmp_path / "data" / "inbox").iterdir())

    def test_an_invalid_job_id_is_rejected_before_any_task_starts(self, tmp_path: Path) -> None:
        plan = parse_options({"channel": "a", "path": str(tmp_path / "data"), "job_id": "no/name"})
        with pytest.raises(ConfigError, match="a job name must be"):
            BatchWriter(plan, Columns("row", ()))
        assert not (tmp_path / "data").exists()

    def test_messages_that_no_subscriber_received_fail_the_job_or_are_counted(
        self, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        report = tmp_path / "report.json"
        options = {"channel": f"spark-{new_id()}", "type": "redis", "url": redis_url}
        with (
            pytest.warns(DeprecationWarning, match="without a mode"),
            pytest.raises(ConfigError, match="explicit mode"),
        ):
            parse_options(options)
        options |= {"mode": "pubsub", "report": str(report)}

        def write(**more: str) -> int:
            writer = BatchWriter(parse_options({**options, **more}), Columns("row", ()))
            batch = pa.RecordBatch.from_pylist([{"id": number} for number in range(700)])
            writer.commit([writer.write(iter([batch])), None])
            counts = json.loads(report.read_text())
            assert counts["messages"] == 700
            return int(counts["unheard"])

        with pytest.raises(QueueError, match="700 of 700 messages had no subscriber and are lost"):
            write()
        assert write(on_unheard="warn") == 700
        assert "700 of 700 messages had no subscriber" in caplog.text
        with subscriber(redis_url, options["channel"]):
            assert write() == 0

    @pytest.mark.parametrize(("kind", "body"), [("text", None), ("struct", None), ("bytes", None)])
    def test_a_row_without_a_body_is_rejected(
        self, kind: Any, body: object, tmp_path: Path
    ) -> None:
        type_ = {"text": pa.string(), "bytes": pa.binary(), "struct": pa.struct([("a", pa.int8())])}
        batch = pa.RecordBatch.from_arrays([pa.array([body], type_[kind])], names=["value"])
        writer = BatchWriter(
            parse_options({"channel": "orders", "path": str(tmp_path)}), Columns(kind, ())
        )
        with pytest.raises(InvalidBody, match="needs a body"):
            writer.write(iter([batch]))
        assert list((tmp_path / "inbox").glob("*/*")) == []

    def test_compressed_and_validated_text_is_sent_unchanged(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "path": str(tmp_path), "compression": "gzip"}
        plan = parse_options({**options, "model": "tests.spark.models:Order"})
        batch = pa.RecordBatch.from_pylist([{"value": '{"id": 1, "total": 2}'}])
        writer = BatchWriter(plan, Columns("text", ()))
        writer.commit([writer.write(iter([batch]))])
        source = NativeLog(parse_options(options))
        with service_of(options) as service:
            deadline = time.monotonic() + 30
            while "orders" not in service.queues():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        start = source.initial()
        ranges = source.ranges(start, source.latest(start, None))
        [row] = [
            row
            for log_range in ranges
            for found in native_log.read(parse_options(options), log_range)
            for row in found.to_pylist()
        ]
        assert row["value"] == b'{"id": 1, "total": 2}'
        assert row["headers"] == []
        with pytest.raises(InvalidBody, match="row 0 of partition 0"):
            BatchWriter(plan, Columns("text", ())).write(
                iter([pa.RecordBatch.from_pylist([{"value": "{}"}])])
            )


def test_columns_are_mapped_by_the_schema() -> None:
    def schema(**types: str) -> StructType:
        fields = [
            {"name": name, "type": type_, "nullable": True, "metadata": {}}
            for name, type_ in types.items()
        ]
        return StructType.fromJson({"type": "struct", "fields": fields})

    assert columns_of(schema(id="long", key="string"), {}) == Columns("row", ())
    assert columns_of(schema(id="long", who="string"), {"key": "who"}).metadata == (("key", "who"),)
    assert columns_of(schema(value="string", ttl="decimal(10,2)"), {}) == Columns(
        "text", (("ttl", "ttl"),)
    )
    for invalid, message in [
        (schema(), "no columns"),
        (schema(value="long"), "expected a struct"),
        (schema(value="binary", headers="string"), "map<string,string>"),
    ]:
        with pytest.raises(ConfigError, match=message):
            columns_of(invalid, {})


def test_a_decimal_column_can_be_a_delay() -> None:
    from decimal import Decimal

    delays = [None, Decimal("1.5")]
    batch = pa.RecordBatch.from_pylist([{"value": "{}", "delay": delay} for delay in delays])
    found = list(Columns("text", (("delay", "delay"),)).rows(batch))
    assert found == [("{}", {}), ("{}", {"delay": 1.5})]
    assert type(found[1][1]["delay"]) is float


def test_ids_continue_in_the_next_millisecond_when_one_is_exhausted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qkit.spark.row_encoder._IDS_PER_MILLISECOND", 2)
    ids = message_ids("job", 1, 1_700_000_000.0)
    found = [next(ids) for _ in range(4)]
    assert found == sorted(set(found))
    assert {len(id) for id in found} == {32}


def test_the_memory_of_a_task_does_not_grow_with_its_rows(tmp_path: Path) -> None:
    def peak_memory(count: int) -> int:
        command = [sys.executable, "-m", "benchmarks._spark_memory", str(count), str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert peak_memory(100_000) < 1.2 * peak_memory(10_000)
