"""What a writer makes of rows, without a session."""

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
from qkit.spark.options import plan_of
from qkit.spark.row_encoder import message_ids
from qkit.spark.writer import BatchWriter, TaskResult
from tests.spark.channels import BROKERS, service_of
from tests.spark.conftest import ROOT


@contextmanager
def subscriber(url: str, channel: str) -> Iterator[None]:
    with redis.from_url(url) as client, client.pubsub() as listening:
        listening.subscribe(channel)
        assert listening.get_message(timeout=60) is not None
        yield


class TestWriter:
    @pytest.mark.parametrize(
        ("more", "letters"),
        [
            ({}, "orders_dlq"),
            ({"dead_letter.suffix": "-bad"}, "orders-bad"),
            ({"dead_letter.enabled": "false"}, None),
        ],
        ids=str,
    )
    def test_a_new_native_channel_follows_the_settings_of_the_owner(
        self, tmp_path: Path, more: dict[str, str], letters: str | None
    ) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path), **more}
        writer = BatchWriter(plan_of(options), Columns("text", ()))
        batch = pa.RecordBatch.from_pylist([{"value": "1"}])
        writer.commit([writer.write(iter([batch]))])
        owner = QueueConfig(max_depth=3, max_priority=20, ack_deadline=5.0, max_deliveries=None)

        async def imported() -> QueueConfig:
            async with await Engine.open(tmp_path, defaults=owner) as engine:
                assert await engine.import_bulk_files() == 1
                return engine.catalogue.find("orders", "test").config

        assert asyncio.run(imported()) == replace(owner, dead_letter=letters)

    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_rows_reach_the_channel_and_the_dead_letters(self, options: dict[str, str]) -> None:
        plan = plan_of(
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
        with suppress(QueueNotFound):  # native takes bulk files in within a second
            return service.stats(channel).depth
        return 0

    def test_only_the_parts_of_winning_attempts_count(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        writer = BatchWriter(plan_of(options), Columns("row", ()))
        batch = pa.RecordBatch.from_pylist([{"id": 1}])
        lost = writer.write(iter([batch]))
        won = TaskResult(lost.job, lost.staged, 1, 0, 0)
        (tmp_path / "inbox" / f".{lost.staged}" / "00000000.seg").rename(
            tmp_path / "inbox" / f".{lost.staged}" / "00000001.seg"
        )
        again = writer.write(iter([batch]))
        assert again.part == 0
        writer.commit([won, None])
        [published] = (tmp_path / "inbox" / lost.job).iterdir()
        assert published.name == "00000001.seg"

    def test_parts_that_the_driver_does_not_see_are_not_taken_for_published(
        self, tmp_path: Path
    ) -> None:
        writer = BatchWriter(
            plan_of({"channel": "orders", "path": str(tmp_path)}), Columns("row", ())
        )
        done = writer.write(iter([pa.RecordBatch.from_pylist([{"id": 1}])]))
        elsewhere = TaskResult(done.job, done.staged, done.part + 1, 1, 0)
        with pytest.raises(StorageError, match=r"1 of 2 parts .* executors must see"):
            writer.commit([done, elsewhere])
        writer.abort([done, elsewhere])
        assert list((tmp_path / "inbox").iterdir()) == []

    def test_a_job_counts_for_its_channel_and_reports_what_it_wrote(self, tmp_path: Path) -> None:
        report = tmp_path / "report.json"

        def write(channel: str, rows: int) -> tuple[int, int]:
            options = {"channel": channel, "path": str(tmp_path / "data"), "job_id": "J"}
            plan = plan_of({**options, "report": str(report)})
            writer = BatchWriter(plan, Columns("row", ()))
            batch = pa.RecordBatch.from_pylist([{"id": number} for number in range(rows)])
            writer.commit([writer.write(iter([batch]))])
            told = json.loads(report.read_text())
            return told["messages"], told["skipped"]

        assert write("a", 40) == (40, 0)
        assert write("b", 40) == (40, 0)
        assert write("a", 30) == (0, 30), "it waits in the inbox"
        with service_of({"channel": "a", "path": str(tmp_path / "data")}) as service:
            deadline = time.monotonic() + 30
            while min(self.depth(service, "a"), self.depth(service, "b")) < 40:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert write("b", 30) == (0, 30), "it is in the log"
        assert not list((tmp_path / "data" / "inbox").iterdir())

    def test_a_job_id_that_cannot_be_is_refused_before_any_task_starts(
        self, tmp_path: Path
    ) -> None:
        plan = plan_of({"channel": "a", "path": str(tmp_path / "data"), "job_id": "no/name"})
        with pytest.raises(ConfigError, match="a job is named"):
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
            plan_of(options)
        options |= {"mode": "pubsub", "report": str(report)}

        def write(**more: str) -> int:
            writer = BatchWriter(plan_of({**options, **more}), Columns("row", ()))
            batch = pa.RecordBatch.from_pylist([{"id": number} for number in range(700)])
            writer.commit([writer.write(iter([batch])), None])
            told = json.loads(report.read_text())
            assert told["messages"] == 700
            return int(told["unheard"])

        with pytest.raises(QueueError, match="700 of 700 messages had no subscriber and are lost"):
            write()
        assert write(on_unheard="warn") == 700
        assert "700 of 700 messages had no subscriber" in caplog.text
        with subscriber(redis_url, options["channel"]):
            assert write() == 0

    @pytest.mark.parametrize(("kind", "body"), [("text", None), ("struct", None), ("bytes", None)])
    def test_a_message_needs_a_body(self, kind: Any, body: object, tmp_path: Path) -> None:
        type_ = {"text": pa.string(), "bytes": pa.binary(), "struct": pa.struct([("a", pa.int8())])}
        batch = pa.RecordBatch.from_arrays([pa.array([body], type_[kind])], names=["value"])
        writer = BatchWriter(
            plan_of({"channel": "orders", "path": str(tmp_path)}), Columns(kind, ())
        )
        with pytest.raises(InvalidBody, match="needs a body"):
            writer.write(iter([batch]))
        assert list((tmp_path / "inbox").glob("*/*")) == []

    def test_compressed_and_checked_text_is_sent_as_it_is(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "path": str(tmp_path), "compression": "gzip"}
        plan = plan_of({**options, "model": "tests.spark.models:Order"})
        batch = pa.RecordBatch.from_pylist([{"value": '{"id": 1, "total": 2}'}])
        writer = BatchWriter(plan, Columns("text", ()))
        writer.commit([writer.write(iter([batch]))])
        source = NativeLog(plan_of(options))
        with service_of(options) as service:
            deadline = time.monotonic() + 30
            while "orders" not in service.queues():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        start = source.initial()
        ranges = source.ranges(start, source.latest(start, None))
        [row] = [
            row
            for piece in ranges
            for found in native_log.read(plan_of(options), piece)
            for row in found.to_pylist()
        ]
        assert row["value"] == b'{"id": 1, "total": 2}'
        assert row["headers"] == []
        with pytest.raises(InvalidBody, match="row 0 of partition 0"):
            BatchWriter(plan, Columns("text", ())).write(
                iter([pa.RecordBatch.from_pylist([{"value": "{}"}])])
            )


def test_columns_are_chosen_by_the_schema() -> None:
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
    for wrong, words in [
        (schema(), "no columns"),
        (schema(value="long"), "make it a struct"),
        (schema(value="binary", headers="string"), "map<string,string>"),
    ]:
        with pytest.raises(ConfigError, match=words):
            columns_of(wrong, {})


def test_decimals_are_seconds_too() -> None:
    from decimal import Decimal

    delays = [None, Decimal("1.5")]
    batch = pa.RecordBatch.from_pylist([{"value": "{}", "delay": delay} for delay in delays])
    found = list(Columns("text", (("delay", "delay"),)).rows(batch))
    assert found == [("{}", {}), ("{}", {"delay": 1.5})]
    assert type(found[1][1]["delay"]) is float


def test_ids_go_on_in_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkit.spark.row_encoder._ROWS", 2)
    numbers = message_ids("job", 1, 1_700_000_000.0)
    found = [next(numbers) for _ in range(4)]
    assert found == sorted(set(found))
    assert {len(id) for id in found} == {32}


def test_the_memory_of_a_task_is_flat_in_its_rows(tmp_path: Path) -> None:
    def most(count: int) -> int:
        command = [sys.executable, "-m", "benchmarks._spark_memory", str(count), str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert most(100_000) < 1.2 * most(10_000)
