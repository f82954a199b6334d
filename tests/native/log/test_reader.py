"""Reading the log with ``LogReader`` while the engine writes and compacts it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from qkit._internal.clock import SystemClock
from qkit.errors import ConfigError, LogDamaged, StorageError
from qkit.native import Engine
from qkit.native.bulk import BulkWriter, commit
from qkit.native.log.disk import Disk
from qkit.native.log.reader import LogPosition, LogReader, ReadPlan, read_range
from qkit.native.log.retention import is_retained, release, retain, retention_lock
from qkit.native.storage.storage import Storage

NONE = frozenset[int]()


def bodies(path: Path, chosen: ReadPlan) -> list[bytes]:
    return [message.body for log_range in chosen.ranges for message in read_range(path, log_range)]


def bulk(path: Path, job: str, *messages: bytes, part: int = 0) -> None:
    with BulkWriter(path, job, part) as writer:
        for message in messages:
            writer.put("orders", message)


async def small_segments(path: Path) -> Engine:
    engine = Engine()
    storage = Storage(Disk(path), clock=SystemClock(), segment_bytes=2_000)
    await engine.attach(storage)
    return engine


async def test_a_channel_is_read_in_steps_including_settled_messages(
    tmp_path: Path,
) -> None:
    reader = LogReader(tmp_path, "orders")
    assert reader.plan(LogPosition(), NONE) == ReadPlan(LogPosition(), 0, NONE, [])
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        await engine.create("other")
        for number in range(5):
            await engine.publish("orders", b"%d" % number)
            await engine.publish("other", b"no")
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.ack()
        first = reader.plan(LogPosition(), NONE, 3)
        assert (first.messages, bodies(tmp_path, first)) == (3, [b"0", b"1", b"2"])
        second = reader.plan(first.end, first.queues)
        assert bodies(tmp_path, second) == [b"3", b"4"]
        assert reader.plan(second.end, second.queues).messages == 0
        again = reader.plan(first.end, first.queues, stop=second.end)
        assert bodies(tmp_path, again) == [b"3", b"4"]
        await engine.delete("orders")
        await engine.create("orders")
        await engine.publish("orders", b"new")
        third = reader.plan(second.end, second.queues)
        assert bodies(tmp_path, third) == [b"new"]


async def test_topics_dead_letters_and_headers_are_read(tmp_path: Path) -> None:
    async with await Engine.open(tmp_path) as engine:
        await engine.create("prices", broadcast=True)
        engine.catalogue.queue("prices", "test", "a")
        engine.catalogue.queue("prices", "test", "b")
        await engine.publish("prices", b"tick", headers={"tenant": "acme"}, key="k")
        await engine.create("orders", max_retries=0)
        await engine.publish("orders", b"bad")
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.nack(requeue=False)
        prices = LogReader(tmp_path, "prices").plan(LogPosition(), NONE)
        [tick] = [item for log_range in prices.ranges for item in read_range(tmp_path, log_range)]
        assert (tick.body, tick.headers, tick.key) == (b"tick", {"tenant": "acme"}, "k")
        letters = LogReader(tmp_path, "orders_dlq").plan(LogPosition(), NONE)
        assert bodies(tmp_path, letters) == [b"bad"]


async def test_messages_of_a_bulk_file_are_read_only_after_its_import_is_complete(
    tmp_path: Path,
) -> None:
    reader = LogReader(tmp_path, "orders")
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        await engine.publish("orders", b"before")
        actor = engine.catalogue.queue("orders", "test")
        bulk(tmp_path, "load-1", b"one", b"two")
        commit(tmp_path, "load-1")

        async def fail(*args: object) -> None:
            raise RuntimeError

        journal = engine.storage.journal
        writer = journal.writer
        append, writer.append = writer.append, fail  # type: ignore[assignment]
        with pytest.raises(RuntimeError):
            await engine.import_bulk_files()
        writer.append = append  # type: ignore[method-assign]
        await engine.publish("orders", b"between")
        waiting = reader.plan(LogPosition(), NONE)
        assert bodies(tmp_path, waiting) == [b"before"], "read past an incomplete import"
        assert await engine.import_bulk_files() == 2
        decided = reader.plan(waiting.end, waiting.queues)
        assert bodies(tmp_path, decided) == [b"between", b"one", b"two"]
        in_steps = reader.plan(waiting.end, waiting.queues, 2)
        assert bodies(tmp_path, in_steps) == [b"between", b"one"]
        assert actor.name == "orders"


async def test_retained_segments_are_not_compacted(tmp_path: Path) -> None:
    engine = await small_segments(tmp_path)
    async with engine:
        await engine.create("orders")
        reader = LogReader(tmp_path, "orders")
        retain(tmp_path, "archive", 0, until=time.time() + 60)
        for number in range(100):
            await engine.publish("orders", b"%05d" % number * 20)
        await engine.purge("orders")
        await engine.storage.maintain()
        first = reader.plan(LogPosition(), NONE, 60)
        assert first.messages == 60
        retain(tmp_path, "archive", first.end.segment, until=time.time() + 60)
        await engine.storage.maintain()
        second = reader.plan(first.end, first.queues)
        assert [body[:5] for body in bodies(tmp_path, second)] == [
            b"%05d" % number for number in range(60, 100)
        ]
        assert len(LogReader(tmp_path, "orders").plan(LogPosition(), NONE).ranges) < len(
            first.ranges
        ) + len(second.ranges), "segments before the retained one were not compacted"


async def test_segments_retained_during_a_compaction_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await small_segments(tmp_path)
    async with engine:
        await engine.create("orders")
        for number in range(50):
            await engine.publish("orders", b"%05d" % number * 20)
        await engine.purge("orders")

        from qkit.native.storage import compaction, storage

        def compact_slowly(*args: object) -> object:
            result = compact(*args)  # type: ignore[arg-type]
            retain(tmp_path, "late", 0, until=time.time() + 60)
            return result

        compact = compaction.compact
        monkeypatch.setattr(storage, "compact", compact_slowly)
        await engine.storage.maintain()
        assert LogReader(tmp_path, "orders").plan(LogPosition(), NONE).messages == 50
        assert not list((tmp_path / "log").glob("*.tmp"))
        release(tmp_path, "late")
        monkeypatch.undo()
        await engine.storage.maintain()
        assert LogReader(tmp_path, "orders").plan(LogPosition(), NONE).messages == 0


async def test_a_reader_that_does_not_renew_its_retention_is_removed_and_gets_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await small_segments(tmp_path)
    async with engine:
        await engine.create("orders")
        reader = LogReader(tmp_path, "orders")
        retain(tmp_path, "lost", 0, until=time.time() - 1)
        assert is_retained(tmp_path, "lost")
        for number in range(50):
            await engine.publish("orders", b"%05d" % number * 20)
        plan = reader.plan(LogPosition(), NONE, 20)
        await engine.purge("orders")
        await engine.storage.maintain()
        assert "did not renew its retention in time" in caplog.text
        assert not is_retained(tmp_path, "lost")
        with pytest.raises(StorageError, match="stopped for too long"):
            reader.plan(plan.end, plan.queues)
        with pytest.raises((StorageError, LogDamaged)):
            bodies(tmp_path, plan)


def test_an_unreadable_reader_file_retains_the_whole_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    retain(tmp_path, "one", 7, until=time.time() + 60)
    with retention_lock(tmp_path) as border:
        assert border == 7
    (tmp_path / "readers" / "two").write_text("no JSON")
    with retention_lock(tmp_path) as border:
        assert border == 0
    with pytest.raises(ConfigError, match="A-Za-z0-9"):
        retain(tmp_path, "../three", 1, until=0)


async def test_incomplete_records_are_not_read_yet(tmp_path: Path) -> None:
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        await engine.publish("orders", b"one")
        await engine.publish("orders", b"two")
    segment = tmp_path / "log" / "00000001.seg"
    data = segment.read_bytes()
    reader = LogReader(tmp_path, "orders")
    for cut in range(80, len(data)):
        segment.write_bytes(data[:cut])
        chosen = reader.plan(LogPosition(), NONE)
        assert chosen.messages <= 2
        assert bodies(tmp_path, chosen) == [b"one", b"two"][: chosen.messages]
    segment.write_bytes(data)
    assert reader.plan(LogPosition(), NONE).messages == 2
