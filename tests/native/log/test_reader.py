"""Reading the log from outside, while it is written, compacted and taken over."""

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
    return [message.body for piece in chosen.ranges for message in read_range(path, piece)]


def bulk(path: Path, job: str, *messages: bytes, part: int = 0) -> None:
    with BulkWriter(path, job, part) as writer:
        for message in messages:
            writer.put("orders", message)


async def small_segments(path: Path) -> Engine:
    engine = Engine()
    storage = Storage(Disk(path), clock=SystemClock(), segment_bytes=2_000)
    await engine.attach(storage)
    return engine


async def test_one_channel_is_followed_in_steps_whatever_became_of_its_messages(
    tmp_path: Path,
) -> None:
    follower = LogReader(tmp_path, "orders")
    assert follower.plan(LogPosition(), NONE) == ReadPlan(LogPosition(), 0, NONE, [])
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        await engine.create("other")
        for number in range(5):
            await engine.publish("orders", b"%d" % number)
            await engine.publish("other", b"no")
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.ack()
        first = follower.plan(LogPosition(), NONE, 3)
        assert (first.messages, bodies(tmp_path, first)) == (3, [b"0", b"1", b"2"])
        second = follower.plan(first.end, first.queues)
        assert bodies(tmp_path, second) == [b"3", b"4"]
        assert follower.plan(second.end, second.queues).messages == 0
        again = follower.plan(first.end, first.queues, stop=second.end)
        assert bodies(tmp_path, again) == [b"3", b"4"]
        await engine.delete("orders")
        await engine.create("orders")
        await engine.publish("orders", b"new")
        third = follower.plan(second.end, second.queues)
        assert bodies(tmp_path, third) == [b"new"]


async def test_topics_dead_letters_and_headers_are_followed(tmp_path: Path) -> None:
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
        [tick] = [item for piece in prices.ranges for item in read_range(tmp_path, piece)]
        assert (tick.body, tick.headers, tick.key) == (b"tick", {"tenant": "acme"}, "k")
        letters = LogReader(tmp_path, "orders_dlq").plan(LogPosition(), NONE)
        assert bodies(tmp_path, letters) == [b"bad"]


async def test_a_bulk_file_counts_from_its_end_on_and_one_that_was_cut_short_never(
    tmp_path: Path,
) -> None:
    follower = LogReader(tmp_path, "orders")
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        await engine.publish("orders", b"before")
        actor = engine.catalogue.queue("orders", "test")
        bulk(tmp_path, "load-1", b"one", b"two")
        commit(tmp_path, "load-1")

        async def cut_short(*args: object) -> None:
            raise RuntimeError

        journal = engine.storage.journal
        writer = journal.writer
        append, writer.append = writer.append, cut_short  # type: ignore[assignment]
        with pytest.raises(RuntimeError):
            await engine.import_bulk_files()
        writer.append = append  # type: ignore[method-assign]
        await engine.publish("orders", b"between")
        waiting = follower.plan(LogPosition(), NONE)
        assert bodies(tmp_path, waiting) == [b"before"], "it may still be completed"
        assert await engine.import_bulk_files() == 2
        decided = follower.plan(waiting.end, waiting.queues)
        assert bodies(tmp_path, decided) == [b"between", b"one", b"two"]
        in_steps = follower.plan(waiting.end, waiting.queues, 2)
        assert bodies(tmp_path, in_steps) == [b"between", b"one"]
        assert actor.name == "orders"


async def test_what_a_reader_has_asked_for_is_not_compacted(tmp_path: Path) -> None:
    engine = await small_segments(tmp_path)
    async with engine:
        await engine.create("orders")
        follower = LogReader(tmp_path, "orders")
        retain(tmp_path, "archive", 0, until=time.time() + 60)
        for number in range(100):
            await engine.publish("orders", b"%05d" % number * 20)
        await engine.purge("orders")
        await engine.storage.maintain()
        first = follower.plan(LogPosition(), NONE, 60)
        assert first.messages == 60
        retain(tmp_path, "archive", first.end.segment, until=time.time() + 60)
        await engine.storage.maintain()
        second = follower.plan(first.end, first.queues)
        assert [body[:5] for body in bodies(tmp_path, second)] == [
            b"%05d" % number for number in range(60, 100)
        ]
        assert len(LogReader(tmp_path, "orders").plan(LogPosition(), NONE).ranges) < len(
            first.ranges
        ) + len(second.ranges), "what lies behind was compacted"


async def test_a_reader_that_asks_during_a_compaction_is_heard(
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


async def test_a_reader_that_stays_away_is_forgotten_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await small_segments(tmp_path)
    async with engine:
        await engine.create("orders")
        follower = LogReader(tmp_path, "orders")
        retain(tmp_path, "lost", 0, until=time.time() - 1)
        assert is_retained(tmp_path, "lost")
        for number in range(50):
            await engine.publish("orders", b"%05d" % number * 20)
        place = follower.plan(LogPosition(), NONE, 20)
        await engine.purge("orders")
        await engine.storage.maintain()
        assert "stayed away" in caplog.text
        assert not is_retained(tmp_path, "lost")
        with pytest.raises(StorageError, match="stayed away"):
            follower.plan(place.end, place.queues)
        with pytest.raises((StorageError, LogDamaged)):
            bodies(tmp_path, place)


def test_a_file_that_cannot_be_read_keeps_everything(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    retain(tmp_path, "one", 7, until=time.time() + 60)
    with retention_lock(tmp_path) as border:
        assert border == 7
    (tmp_path / "readers" / "two").write_text("no JSON")
    with retention_lock(tmp_path) as border:
        assert border == 0
    with pytest.raises(ConfigError, match="A-Za-z0-9"):
        retain(tmp_path, "../three", 1, until=0)


async def test_records_that_are_being_written_are_left_for_the_next_look(tmp_path: Path) -> None:
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        await engine.publish("orders", b"one")
        await engine.publish("orders", b"two")
    segment = tmp_path / "log" / "00000001.seg"
    whole = segment.read_bytes()
    follower = LogReader(tmp_path, "orders")
    for cut in range(80, len(whole)):
        segment.write_bytes(whole[:cut])
        chosen = follower.plan(LogPosition(), NONE)
        assert chosen.messages <= 2
        assert bodies(tmp_path, chosen) == [b"one", b"two"][: chosen.messages]
    segment.write_bytes(whole)
    assert follower.plan(LogPosition(), NONE).messages == 2
