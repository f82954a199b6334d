"""Reads of existing and missing channels: none is created, and bulk files are imported."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from qkit._internal.ids import new_id
from qkit.errors import BackendUnavailable, ConfigError, LogDamaged, QueueNotFound, StorageError
from qkit.native import Engine, bulk_import
from qkit.native.bulk import BulkWriter, commit, published_jobs
from qkit.spark import staging
from qkit.spark.batch_reader import BatchReader
from qkit.spark.columns import Columns
from qkit.spark.native_log import NativeLog
from qkit.spark.options import Plan, parse_options
from qkit.spark.stream_reader import StreamReader
from qkit.spark.writer import BatchWriter
from tests.spark.channels import BROKERS, service_of, values


@pytest.fixture
def native(tmp_path: Path) -> dict[str, str]:
    return {"channel": "orders", "type": "native", "path": str(tmp_path / "data")}


@pytest.fixture
def new(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Options of a channel that does not exist yet."""
    kind = request.param
    chosen = {"channel": f"spark-{new_id()}", "type": kind, "stage": str(tmp_path / "stage")}
    if kind == "native":
        return {**chosen, "path": str(tmp_path / "data")}
    chosen["url"] = request.getfixturevalue(f"{kind}_url")
    return {**chosen, "mode": "list"} if kind == "redis" else chosen


def snapshot(options: dict[str, str]) -> list[int]:
    reader = BatchReader(parse_options(options))
    return values(
        [
            row
            for partition in reader.partitions()
            for batch in reader.read(partition)
            for row in batch.to_pylist()
        ]
    )


def stream(options: dict[str, str], start: dict[str, Any] | None = None) -> list[int]:
    """Return the values that a stream with the trigger ``availableNow`` reads."""
    reader = StreamReader(parse_options(options))
    try:
        start = start or reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        end = reader.latestOffset(start, ReadAllAvailable())
        return read_values(reader, start, end)
    finally:
        reader.stop()


def read_values(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return values(
        [
            row
            for partition in reader.partitions(start, end)
            for batch in pickle.loads(pickle.dumps(reader)).read(partition)
            for row in batch.to_pylist()
        ]
    )


def publish(options: dict[str, str], *bodies: int) -> None:
    """Publish messages as a Spark job does: a task writes a part, and the driver publishes it."""
    writer = BatchWriter(parse_options(options), Columns("text", ()))
    batch = pa.RecordBatch.from_pydict({"value": [str(body) for body in bodies]})
    writer.commit([pickle.loads(pickle.dumps(writer)).write(iter([batch]))])


class TestMissingChannel:
    @pytest.mark.parametrize("read", [snapshot, stream])
    @pytest.mark.parametrize("more", [{}, {"dead_letters": "true"}, {"consume": "true"}], ids=str)
    @pytest.mark.parametrize("new", BROKERS, indirect=True)
    def test_a_read_fails_and_creates_nothing(
        self, new: dict[str, str], more: dict[str, str], read: Callable[[dict[str, str]], object]
    ) -> None:
        with pytest.raises(QueueNotFound, match=new["channel"]) as raised:
            read({**new, **more})
        assert (new.get("path") or new["url"].rpartition("@")[2]) in str(raised.value)
        if "path" in new:
            assert not Path(new["path"]).exists()
            Path(new["path"]).mkdir()
            with pytest.raises(QueueNotFound):
                read({**new, **more})
            assert list(Path(new["path"]).iterdir()) == []
            return
        plan = parse_options(new)
        with service_of(new) as service:
            if new["type"] != "rabbitmq":  # AMQP cannot list queues
                assert not [name for name in service.queues() if new["channel"] in name]
            for name in (plan.channel, plan.dead_letter_name):
                with pytest.raises(QueueNotFound):
                    service.stats(name)

    @pytest.mark.parametrize("new", ["redis", "rabbitmq", "native"], indirect=True)
    def test_a_topic_must_exist_but_its_group_is_created(
        self, new: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qkit.spark.stage_consumer.FIRST_FILL_TIMEOUT_SECONDS", 1.0)
        topic = {**new, "broadcast": "true", "consume": "true", "group": "archive"}
        with pytest.raises(QueueNotFound, match=new["channel"]):
            stream(topic)
        with service_of(new) as service:
            service.publish(new["channel"], 1)
            assert stream(topic) == [], "the group received a message from before its declaration"
            service.publish(new["channel"], 2)
            assert stream(topic) == [2]
            service.delete(new["channel"])

    def test_a_missing_channel_is_not_found_next_to_other_channels(
        self, native: dict[str, str]
    ) -> None:
        with service_of(native) as service:
            service.send("other", 1)
            service.send("deleted", 1)
            service.delete("deleted")
        for read in (snapshot, stream):
            for name in ("orders", "deleted"):
                with pytest.raises(QueueNotFound, match=f"no channel '{name}' in {native['path']}"):
                    read({**native, "channel": name})
        assert not (Path(native["path"]) / "readers").exists()

    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_a_channel_without_a_dead_letter_queue_has_no_dead_letters(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        dead_letters = {**options, "dead_letters": "true", "stage": str(tmp_path / "stage")}
        with service_of({**options, "dead_letter.enabled": "false"}) as service:
            service.send(options["channel"], 1)
        assert snapshot(dead_letters) == []
        assert stream(dead_letters) == []

    @pytest.mark.parametrize("options", ["kafka"], indirect=True)
    def test_a_stream_finds_a_dead_letter_queue_that_is_created_later(
        self, options: dict[str, str]
    ) -> None:
        with service_of({**options, "dead_letter.enabled": "false"}) as service:
            service.send(options["channel"], 1)
        reader = StreamReader(parse_options({**options, "dead_letters": "true"}))
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable()) == start
        writer = BatchWriter(
            parse_options(
                {**options, "model": "tests.spark.models:Order", "on_invalid": "dead_letter"}
            ),
            Columns("row", ()),
        )
        writer.write(iter([pa.RecordBatch.from_pylist([{"id": 1, "total": -1.0}])]))
        end = reader.latestOffset(start, ReadAllAvailable())
        assert read_bodies(reader, start, end) == [{"id": 1, "total": -1.0}]
        reader.stop()


def read_bodies(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    return [
        json.loads(row["value"])
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


class TestBulkFiles:
    @pytest.mark.parametrize("read", [snapshot, stream])
    @pytest.mark.parametrize("consume", ["false", "true"])
    def test_bulk_files_are_read_if_no_engine_has_opened_the_directory(
        self,
        native: dict[str, str],
        consume: str,
        read: Callable[[dict[str, str]], list[int]],
        tmp_path: Path,
    ) -> None:
        publish(native, 1, 2, 3)
        assert read({**native, "consume": consume, "stage": str(tmp_path / "stage")}) == [1, 2, 3]
        assert published_jobs(Path(native["path"])) == []

    def test_bulk_files_are_read_while_another_process_owns_the_directory(
        self, native: dict[str, str]
    ) -> None:
        with owner(native):
            publish(native, 1, 2)
            assert stream(native) == [1, 2]
            publish(native, 3)
            assert snapshot(native) == [1, 2, 3]

    def test_bulk_files_are_read_after_the_owner_was_killed_before_the_import(
        self, native: dict[str, str]
    ) -> None:
        with owner(native) as process:
            os.kill(process.pid, signal.SIGSTOP)  # it keeps the lock but imports nothing
            publish(native, 1, 2)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert stream(native) == [1, 2]

    def test_offsets_are_stable_across_an_import(self, native: dict[str, str]) -> None:
        with service_of(native) as service:
            service.send_many("orders", range(3))
        reader = StreamReader(parse_options(native))
        start = reader.initialOffset()
        first = reader.latestOffset(start, ReadAllAvailable())
        assert read_values(reader, start, first) == [0, 1, 2]
        publish(native, 3, 4)
        assert read_values(reader, start, first) == [0, 1, 2], "the bulk file changed the offsets"
        second = reader.latestOffset(first, ReadAllAvailable())
        for _ in range(2):  # a restarted stream reads the same offsets
            assert read_values(reader, start, first) == [0, 1, 2]
            assert read_values(reader, first, second) == [3, 4]
            reader = StreamReader(parse_options(native))
        latest = StreamReader(parse_options({**native, "starting": "latest"}))
        publish(native, 5)
        begin = latest.initialOffset()
        assert read_values(latest, begin, latest.latestOffset(begin, ReadAllAvailable())) == []
        assert stream(native, second) == [5]

    def test_a_bulk_file_without_rows_creates_its_channel(self, native: dict[str, str]) -> None:
        publish(native)
        assert snapshot(native) == stream(native) == []

    def test_a_damaged_bulk_file_is_an_error_only_for_its_channel(
        self, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulk_import, "CHECK_AFTER_SECONDS", 0.2)
        path = Path(native["path"])
        with service_of(native) as service:
            service.send_many("orders", range(2))
            service.send("other", 1)
        with BulkWriter(path, "bad", 0) as part:
            for number in range(5):
                part.put("other", b"%d" % number)
        commit(path, "bad")
        file = path / "inbox" / "bad" / "00000000.seg"
        file.write_bytes(file.read_bytes()[:-30])
        assert stream(native) == snapshot(native) == [0, 1]
        for read in (stream, snapshot):
            with pytest.raises(LogDamaged, match="bad/00000000"):
                read({**native, "channel": "other"})

    def test_a_rejected_bulk_file_is_an_error_only_for_its_channel(
        self, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulk_import, "CHECK_AFTER_SECONDS", 0.2)
        path = Path(native["path"])
        with service_of(native) as service:
            service.send_many("orders", range(2))
        with BulkWriter(path, "bad", 0) as part:
            part.declare("other", {"max_depth": 0})
            part.put("other", b"1")
        commit(path, "bad")
        assert stream(native) == snapshot(native) == [0, 1]
        for read in (stream, snapshot):
            with pytest.raises(ConfigError, match="max_depth"):
                read({**native, "channel": "other"})

    def test_a_bulk_file_that_the_owner_does_not_import_is_an_outage(
        self, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bulk_import, "CHECK_AFTER_SECONDS", 0.1)
        monkeypatch.setattr(bulk_import, "GIVE_UP_AFTER_SECONDS", 0.3)
        monkeypatch.setattr(
            "qkit.backends.native.shared_directory.SharedDirectoryBackend.start", refuse
        )
        with owner(native) as process:
            os.kill(process.pid, signal.SIGSTOP)
            publish(native, 1)
            with pytest.raises(BackendUnavailable, match=r"1 bulk files .* were not imported"):
                stream(native)


async def refuse(self: object) -> None:
    raise BackendUnavailable("the owner does not respond")


@contextmanager
def owner(options: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run another process that owns the directory, as a worker would."""
    program = (
        "import sys, json\n"
        "from tests.spark.channels import service_of\n"
        "with service_of(json.loads(sys.argv[1])) as service:\n"
        "    service.send('mine', 1)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


class TestUnsharedDirectory:
    """Executors on machines where the path is another directory or does not exist."""

    @pytest.fixture(params=["missing", "another"])
    def replace_directory(self, request: pytest.FixtureRequest, native: dict[str, str]) -> Any:
        """Function that replaces the directory with the state of another machine."""

        def move() -> Path:
            path = Path(native["path"])
            path.rename(path.with_name("on-the-driver"))
            if request.param == "another":
                with service_of(native) as service:
                    service.send_many("orders", range(5))
            return path

        return move

    def files(self, path: Path) -> list[Path]:
        return sorted(path.rglob("*"))

    def test_a_write_fails_and_leaves_no_files(
        self, native: dict[str, str], replace_directory: Callable[[], Path]
    ) -> None:
        writer = BatchWriter(parse_options(native), Columns("row", ()))
        path = replace_directory()
        before = self.files(path)
        with pytest.raises(StorageError, match="not the directory of the driver"):
            writer.write(iter([pa.RecordBatch.from_pylist([{"id": 1}])]))
        assert self.files(path) == before
        assert path.exists() == bool(before)

    def test_a_read_fails(
        self, native: dict[str, str], replace_directory: Callable[[], Path]
    ) -> None:
        with service_of(native) as service:
            service.send_many("orders", range(5))
        snapshot_reader = BatchReader(parse_options(native))
        [whole] = snapshot_reader.partitions()
        reader = StreamReader(parse_options(native))
        start = reader.initialOffset()
        [partition] = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        path = replace_directory()
        before = self.files(path)
        for read in (lambda: snapshot_reader.read(whole), lambda: list(reader.read(partition))):
            with pytest.raises(StorageError, match="not the directory of the driver"):
                read()
        assert self.files(path) == before

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_a_staged_read_fails(self, options: dict[str, str], tmp_path: Path) -> None:
        with service_of(options) as service:
            service.send(options["channel"], 1)
        reader = StreamReader(parse_options({**options, "stage": str(tmp_path / "stage")}))
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        [partition] = reader.partitions(start, end)
        [file] = (tmp_path / "stage").glob("*.arrow")
        shutil.copy(file, tmp_path / "kept")
        file.unlink()
        with pytest.raises(StorageError, match="not the file that the driver wrote"):
            list(reader.read(partition))
        table = pa.ipc.open_file(tmp_path / "kept").read_all()
        with pa.ipc.new_file(file, table.schema.with_metadata({"qkit-stage": "other"})) as writer:
            writer.write_table(table.replace_schema_metadata({"qkit-stage": "other"}))
        with pytest.raises(StorageError, match="not the file that the driver wrote"):
            list(reader.read(partition))
        shutil.copy(tmp_path / "kept", file)
        [found] = reader.read(partition)
        assert found.column("value").to_pylist() == [b"1"]
        assert found.schema.metadata is None
        reader.stop()


def test_a_stage_written_by_an_older_version_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "00000001.arrow"
    batch = pa.RecordBatch.from_pylist([{"value": b"1"}])
    with pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    source = staging.StagingArea(
        parse_options({"channel": "orders", "path": str(tmp_path / "x"), "stage": str(tmp_path)})
    )
    [[found]] = source.ranges({"stage": 0}, {"stage": 1})
    assert [item.to_pylist() for item in staging.read([found])] == [[{"value": b"1"}]]


def test_paths_are_resolved_on_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qkit.spark.options import with_absolute_paths

    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "qkit.toml").write_text('type = "native"\npath = "link/data"\n')
    monkeypatch.chdir(tmp_path)
    options = {"channel": "orders", "config": "qkit.toml", "stage": "s", "report": "r.json"}
    plan: Plan = parse_options(options)
    assert plan.settings.path == tmp_path / "real" / "data"
    assert (plan.stage, plan.report) == (str(tmp_path / "s"), str(tmp_path / "r.json"))
    chosen = with_absolute_paths(options, plan)
    monkeypatch.chdir(tmp_path / "real")  # another working directory, as in an executor
    assert parse_options(chosen) == plan
    assert not (tmp_path / "real" / "data").exists()


async def test_a_reader_releases_the_directory_after_an_import(
    native: dict[str, str],
) -> None:
    await asyncio.to_thread(publish, native, 1)
    source = NativeLog(parse_options(native))
    await asyncio.to_thread(source.initial)
    async with asyncio.timeout(60), await Engine.open(native["path"]) as engine:
        assert [item.body for item in await engine.peek("orders", 10)] == [b"1"]
