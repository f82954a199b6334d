"""What Spark calls, called by hand: writers and sources on every backend, without a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from qkit import SyncQueueService
from qkit.errors import (
    BackendUnavailable,
    ConfigError,
    InvalidBody,
    QueueNotFound,
    StorageError,
    Unsupported,
)
from qkit.message import new_id
from qkit.native.readers import forget
from qkit.spark import broker_log, native_log, snapshot, stage
from qkit.spark.bodies import ids
from qkit.spark.broker_log import BrokerLog
from qkit.spark.columns import Columns, columns_of
from qkit.spark.native_log import NativeLog
from qkit.spark.options import Plan, plan_of
from qkit.spark.page import page
from qkit.spark.report import Report
from qkit.spark.snapshot import Snapshot
from qkit.spark.stage import Stage
from qkit.spark.streaming import StreamReader
from qkit.spark.writing import BatchWriter, TaskDone
from tests.spark.conftest import ROOT
from tests.support.private_brokers import PrivateBroker
from tests.support.proxy import Proxy

BROKERS = ["redis", "rabbitmq", "kafka", "native"]


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Options of a channel that is new, and gone afterwards."""
    kind = request.param
    chosen = {"channel": f"spark-{new_id()}", "type": kind}
    if kind == "native":
        chosen["path"] = str(tmp_path / "data")
    else:
        chosen["url"] = request.getfixturevalue(f"{kind}_url")
    if kind == "redis":
        chosen["mode"] = "list"
    with service_of(chosen) as service:
        yield chosen
        for name in (chosen["channel"], service.settings.dead_letter_name(chosen["channel"])):
            try:
                service.delete(name)
            except Exception:
                continue  # not every test makes both


@contextmanager
def service_of(options: Mapping[str, str]) -> Iterator[SyncQueueService]:
    with SyncQueueService(plan_of(options).settings) as service:
        yield service


def rows(files: list[list[str]]) -> list[dict[str, Any]]:
    return [row for names in files for batch in stage.read(names) for row in batch.to_pylist()]


def values(found: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["value"]) for row in found]


class TestStage:
    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_batches_are_staged_acknowledged_and_removed_when_spark_is_done(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        directory = tmp_path / "stage"
        with service_of(options) as service:
            service.send_many(options["channel"], range(25), headers={"tenant": "acme"}, key="k")
            source = Stage(plan_of({**options, "stage": str(directory), "consume": "true"}))
            start = source.initial()
            first = source.latest(start, 10)
            assert values(rows(source.pieces(start, first))) == list(range(10))
            assert len(list(directory.iterdir())) == 1
            # Spark asks again for the same batch after a crash.
            assert values(rows(source.pieces(start, first))) == list(range(10))
            second = source.latest(first, None)
            found = rows(source.pieces(first, second))
            assert values(found) == list(range(10, 25))
            assert dict(found[0]["headers"]) == {"tenant": "acme"}
            assert (found[0]["key"], found[0]["attempt"]) == ("k", 1)
            source.commit(second)
            assert list(directory.iterdir()) == []
            assert source.latest(second, None) == second
            source.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_what_a_crash_left_comes_first_with_or_without_a_checkpoint(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        plan = plan_of({**options, "stage": str(tmp_path / "stage")})
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            crashed = Stage(plan)
            start = crashed.initial()
            end = crashed.latest(start, None)
            assert service.stats(options["channel"]).depth == 0
            crashed.close()
            (tmp_path / "stage" / "00000009.arrow.tmp").write_bytes(b"cut short")
            service.send(options["channel"], 5)
            again = Stage(plan)
            assert again.latest(start, None) == end
            assert values(rows(again.pieces(start, end))) == list(range(5))
            again.close()
            anew = Stage(plan)
            assert anew.initial() == start, "before what nobody has seen"
            after = anew.latest(end, None)
            assert values(rows(anew.pieces(end, after))) == [5]
            with pytest.raises(StorageError, match="is missing"):
                anew.pieces(start, after)
            anew.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_a_stream_of_what_is_there_now_takes_no_more(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            source = Stage(plan_of({**options, "stage": str(tmp_path / "stage")}))
            start = source.initial()
            source.stop_here()
            service.send_many(options["channel"], range(5, 10))
            end = source.latest(start, None)
            assert values(rows(source.pieces(start, end))) == list(range(5))
            assert source.latest(end, None) == end
            source.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_messages_that_never_cease_do_not_keep_a_batch_open(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        over = threading.Event()

        def trickle() -> None:
            with service_of(options) as service:
                while not over.wait(0.03):
                    service.send(options["channel"], 1)

        sending = threading.Thread(target=trickle)
        source = Stage(plan_of({**options, "stage": str(tmp_path / "stage")}))
        start = source.initial()
        sending.start()
        try:
            first = source.latest(start, None)  # or never
            assert 0 < len(rows(source.pieces(start, first))) < 1_000
            assert source.latest(first, None) != first
        finally:
            over.set()
            sending.join()
            source.close()

    def test_it_needs_a_directory_and_has_it_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        redis = {"channel": "orders", "type": "redis", "mode": "list", "url": "redis://x:1/0"}
        with pytest.raises(ConfigError, match="option\\('stage'"):
            StreamReader(plan_of(redis))
        monkeypatch.setattr(stage, "PATIENCE", 0.1)
        plan = plan_of({**redis, "stage": str(tmp_path / "stage")})
        first = Stage(plan)
        first.initial()
        with pytest.raises(ConfigError, match="another stream"):
            Stage(plan).initial()
        first.close()


class TestBrokerLog:
    @pytest.mark.parametrize("options", ["kafka"], indirect=True)
    def test_a_log_is_watched_by_offsets(self, options: dict[str, str]) -> None:
        plan = plan_of({**options, "partitions": "3"})
        with SyncQueueService(plan.settings) as service:
            source = BrokerLog(plan)
            start = source.initial()
            for number in range(25):
                service.send(options["channel"], number, key=str(number), headers={"n": "x"})
            first = source.latest(start, 10)
            second = source.latest(first, None)
            assert sum(second["offsets"].values()) == 25
            found = [self.found(plan, source, *ends) for ends in ((start, first), (first, second))]
            assert len(found[0]) == 10
            assert sorted(found[0] + found[1]) == list(range(25))
            assert self.found(plan, source, start, first) == found[0], "it can be replayed"
            source.stop_here()
            service.send(options["channel"], 25)
            assert source.latest(second, None) == second
            source.close()

    @pytest.mark.parametrize("options", ["kafka"], indirect=True)
    def test_what_the_log_no_longer_has_is_said(self, options: dict[str, str]) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            source = BrokerLog(plan_of(options))
            end = source.latest(source.initial(), None)
            beyond = {"offsets": {place: at + 1 for place, at in end["offsets"].items()}}
            with pytest.raises(StorageError, match="made again"):
                source.latest(beyond, None)
            service.purge(options["channel"])
            with pytest.raises(StorageError, match="retention"):
                source.latest({"offsets": dict.fromkeys(end["offsets"], 0)}, None)
            source.close()

    def found(
        self, plan: Plan, source: BrokerLog, start: dict[str, Any], end: dict[str, Any]
    ) -> list[int]:
        return [
            json.loads(row["value"])
            for span in source.pieces(start, end)
            for batch in broker_log.read(plan, span)
            for row in batch.to_pylist()
        ]


class TestSnapshot:
    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_a_look_consumes_nothing(self, options: dict[str, str]) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            for _ in range(2):
                assert values(self.found(options)) == list(range(5))
            assert values(self.found({**options, "limit": "2"})) == [0, 1]
            assert self.found({**options, "dead_letters": "true"}) == []
            assert service.stats(options["channel"]).depth == 5

    def found(self, options: dict[str, str]) -> list[dict[str, Any]]:
        reader = Snapshot(plan_of(options))
        return [
            row
            for piece in reader.partitions()
            for batch in reader.read(piece)
            for row in batch.to_pylist()
        ]

    def test_what_has_no_end_and_what_keeps_nothing_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshot, "MOST", 3)
        options = {"channel": "orders", "path": str(tmp_path)}
        with service_of(options) as service:
            service.send_many("orders", range(4))
            with pytest.raises(ConfigError, match="more than 3 messages"):
                self.found(options)
            assert len(self.found({**options, "limit": "4"})) == 4
            with pytest.raises(QueueNotFound):
                self.found({**options, "channel": "nobody"})
        redis = {"channel": "orders", "type": "redis", "mode": "pubsub", "url": "redis://x:1/0"}
        with pytest.raises(Unsupported, match="as a stream"):
            self.found(redis)
        with pytest.raises(ConfigError, match="name the directory"):
            Snapshot(plan_of({"channel": "orders"}))


class TestOutages:
    """Of Redis, which is staged, and of Kafka, which has a log."""

    @pytest.fixture
    def outage(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[tuple[dict[str, str], Callable[[], AbstractContextManager[None]]]]:
        """Options of a channel, and what makes its broker go away for a while."""
        options = {"channel": f"spark-{new_id()}", "type": request.param, "send_timeout": "2"}
        if request.param == "kafka":
            kafka: PrivateBroker = request.getfixturevalue("private_kafka")
            yield {**options, "url": kafka.url}, kafka.frozen
            return
        port = urlsplit(request.getfixturevalue("redis_url")).port
        assert port is not None
        with Proxy(port) as proxy:

            @contextmanager
            def refused() -> Iterator[None]:
                proxy.refuse()
                yield
                proxy.heal()

            url = f"redis://127.0.0.1:{proxy.port}/0"
            yield {**options, "url": url, "mode": "list", "stage": str(tmp_path / "s")}, refused
            with service_of({**options, "url": url, "mode": "list"}) as service:
                service.delete(options["channel"])

    def send(self, options: dict[str, str], *bodies: int) -> None:
        chosen = {name: value for name, value in options.items() if name != "send_timeout"}
        with service_of(chosen) as service:
            service.send_many(options["channel"], bodies)

    @pytest.mark.parametrize("outage", ["redis", "kafka"], indirect=True)
    def test_a_stream_waits_for_its_broker(self, outage: Any) -> None:
        options, away = outage
        self.send(options, 1)
        reader = StreamReader(plan_of(options))
        start = reader.initialOffset()
        first = reader.latestOffset(start, ReadAllAvailable())
        assert self.read(reader, start, first) == [1]
        with away():
            assert reader.latestOffset(first, ReadAllAvailable()) == first
        self.send(options, 2)
        deadline = time.monotonic() + 60
        while (second := reader.latestOffset(first, ReadAllAvailable())) == first:
            assert time.monotonic() < deadline
        assert self.read(reader, first, second) == [2]
        reader.stop()

    def read(self, reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
        found = [
            row
            for piece in reader.partitions(start, end)
            for batch in reader.read(piece)
            for row in batch.to_pylist()
        ]
        return values(found)

    @pytest.mark.parametrize("outage", ["redis"], indirect=True)
    def test_an_outage_is_not_the_end_of_what_is_there_now(self, outage: Any) -> None:
        options, away = outage
        self.send(options, 1, 2)
        reader = StreamReader(plan_of(options))
        start = reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        first = reader.latestOffset(start, ReadMaxRows(1))
        with away(), pytest.raises(BackendUnavailable):
            reader.latestOffset(first, ReadMaxRows(1))
        reader.stop()


class TestNativeLog:
    def test_places_are_kept_from_the_first_look_on(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        plan = plan_of(options)
        with service_of(options) as service:
            service.send_many("orders", range(5))
            source = NativeLog(plan)
            start = source.initial()
            assert [file.name for file in (tmp_path / "readers").iterdir()] == [start["reader"]]
            end = source.latest(start, 3)
            assert self.found(plan, source, start, end) == [0, 1, 2]
            service.send("other", 1)
            source.stop_here()
            service.send("orders", 5)
            rest = source.latest(end, None)
            assert self.found(plan, source, end, rest) == [3, 4]
            assert source.latest(rest, None) == rest
            json.dumps(rest)
            again = NativeLog(plan)
            assert self.found(plan, again, end, rest) == [3, 4]
            assert self.found(plan, again, rest, again.latest(rest, None)) == [5]
            source.commit(rest)

    def found(
        self, plan: Any, source: NativeLog, start: dict[str, Any], end: dict[str, Any]
    ) -> list[int]:
        return [
            json.loads(row["value"])
            for piece in source.pieces(start, end)
            for batch in native_log.read(plan, piece)
            for row in batch.to_pylist()
        ]

    def test_one_whose_place_was_not_kept_says_so(self, tmp_path: Path) -> None:
        plan = plan_of({"channel": "orders", "type": "native", "path": str(tmp_path)})
        start = NativeLog(plan).initial()
        forget(tmp_path, start["reader"])
        with pytest.raises(StorageError, match="retention"):
            NativeLog(plan).latest(start, None)

    def test_dead_letters_are_a_stream_too(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        writer = BatchWriter(
            plan_of({**options, "model": "tests.spark.models:Order", "on_invalid": "dead_letter"}),
            Columns("row", ()),
        )
        batch = pa.RecordBatch.from_pylist([{"id": 1, "total": -1.0}])
        writer.commit([writer.write(iter([batch]))])
        with service_of(options) as service:
            deadline = time.monotonic() + 30
            while not service.dead_letters("orders").list():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        plan = plan_of({**options, "dead_letters": "true"})
        source = NativeLog(plan)
        start = source.initial()
        end = source.latest(start, None)
        [row] = [
            row
            for piece in source.pieces(start, end)
            for batch in native_log.read(plan, piece)
            for row in batch.to_pylist()
        ]
        assert (row["reason"], row["channel"]) == ("Undecodable", "orders")


class TestWriter:
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
        won = TaskDone(lost.job, lost.staged, 1, 0, 0)
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
        elsewhere = TaskDone(done.job, done.staged, done.part + 1, 1, 0)
        with pytest.raises(StorageError, match=r"1 of 2 parts .* executors must see"):
            writer.commit([done, elsewhere])
        writer.abort([done, elsewhere])
        assert list((tmp_path / "inbox").iterdir()) == []

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
        pieces = source.pieces(start, source.latest(start, None))
        [row] = [
            row
            for piece in pieces
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
    monkeypatch.setattr("qkit.spark.bodies._ROWS", 2)
    numbers = ids("job", 1, 1_700_000_000.0)
    found = [next(numbers) for _ in range(4)]
    assert found == sorted(set(found))
    assert {len(id) for id in found} == {32}


def test_the_page_escapes_what_messages_say_and_draws_every_hour() -> None:
    hour = datetime(2026, 11, 16, 8, tzinfo=UTC)
    report = Report(
        channel="orders",
        made_at=hour,
        total=20,
        first=hour,
        last=hour + timedelta(hours=3),
        by_reason=[("<script>alert(1)</script>", 20)],
        by_error=[(f"Error{number}", 1) for number in range(20)],
        by_attempts=[("3 attempts", 20)],
        by_hour=[(hour, 5), (hour + timedelta(hours=3), 15)],
        examples=[("0190", "Error0", "<b>", '{"id": 1}')],
    )
    text = page(report)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "16 Nov 08:00: 5'" in text
    assert "16 Nov 11:00: 15'" in text
    assert text.count("<i></i>") == 24 - 2, "a day at least, and most of it without any"
    assert "8 others" in text
    assert "There are no dead letters" in page(Report(channel="orders", made_at=hour))
    report.by_hour = []
    assert "tells when" in page(report)


def test_the_memory_of_a_task_is_flat_in_its_rows(tmp_path: Path) -> None:
    def most(count: int) -> int:
        command = [sys.executable, "-m", "benchmarks._spark_memory", str(count), str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert most(100_000) < 1.2 * most(10_000)
