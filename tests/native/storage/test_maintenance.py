"""Edge cases of compaction, the maintenance task and closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from qkit.errors import StorageError
from qkit.native import Engine
from qkit.native.bulk import BulkWriter, commit
from qkit.native.log.disk import Disk
from qkit.native.log.log import Log
from qkit.native.storage.storage import Storage
from qkit.testing import VirtualClock
from tests.support.disk import SimulatedDisk
from tests.support.engines import open_engine


async def until(condition: Callable[[], object], pause: float = 0.005) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  no event signals the condition
            await asyncio.sleep(pause)


async def message_ids(engine: Engine, queue: str) -> list[str]:
    return [item.id for item in await engine.peek(queue, 1_000)]


async def test_compaction_limits_the_size_of_a_segment_with_large_messages() -> None:
    with VirtualClock() as clock:
        disk = SimulatedDisk()
        engine = await open_engine(disk, clock, segment_bytes=10_000)
        await engine.create("large")
        await engine.create("small", max_depth=10_000)
        for _ in range(20):
            await engine.publish("large", bytes(6_000))
            for _ in range(20):
                await engine.publish("small", b"")
            await engine.storage.log.rotate()
        await engine.purge("small")
        for _ in range(12):
            await engine.storage.maintain()
        assert max(map(len, disk.files().values())) < 30_000
        assert sum(map(len, disk.files().values())) < 200_000
        await engine.aclose()
        engine = await open_engine(SimulatedDisk(disk.files()), clock)
        assert [item.body for item in await engine.peek("large", 50)] == [bytes(6_000)] * 20
        await engine.aclose()


async def test_a_deleted_dead_letter_does_not_reappear_after_compaction() -> None:
    with VirtualClock() as clock:
        disk = SimulatedDisk()
        engine = await open_engine(disk, clock, segment_bytes=4_096)
        rotate = engine.storage.log.rotate
        await engine.create("junk")
        await engine.create("orders")
        await engine.publish("orders", b"", message_id="first")
        first = await engine.consume("orders")
        assert first is not None
        await first.nack(requeue=False)  # creates the dead-letter queue in the first segment
        for _ in range(4):
            await engine.publish("junk", bytes(1_500))
        await rotate()
        for id in ("dead", "a", "b", "c"):
            await engine.publish("orders", bytes(1_200), message_id=id)
        await rotate()
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.nack(requeue=False)
        for id in ("d", "e", "f"):
            await engine.publish("orders", bytes(1_200), message_id=id)
        await rotate()
        await engine.delete("orders_dlq")
        await engine.purge("junk")
        await engine.storage.maintain(rotate=False)
        await engine.aclose()
        files = disk.files()
        for disk_files in (files, {n: data for n, data in files.items() if ".snap" not in n}):
            engine = await open_engine(SimulatedDisk(disk_files), clock)
            assert await message_ids(engine, "orders") == ["a", "b", "c", "d", "e", "f"]
            assert "orders_dlq" not in await engine.list()
            await engine.aclose()


async def test_a_message_that_is_retried_forever_does_not_fill_the_disk() -> None:
    with VirtualClock() as clock:
        disk = SimulatedDisk()
        engine = await open_engine(disk, clock, segment_bytes=4_000)
        await engine.create("orders", max_retries=None)
        await engine.publish("orders", b"again", headers={"n": "1"})
        sizes: list[int] = []
        for _ in range(6):
            for _ in range(200):
                delivery = await engine.consume("orders")
                assert delivery is not None
                await delivery.nack()
            for _ in range(3):
                await engine.storage.maintain()
            sizes.append(sum(map(len, disk.files().values())))
        assert sizes[-1] <= sizes[1] + 500
        await engine.aclose()
        engine = await open_engine(SimulatedDisk(disk.files()), clock)
        (message,) = await engine.peek("orders", 9)
        assert (message.attempt, message.headers) == (1_200, {"n": "1"})
        await engine.aclose()


async def test_segments_are_removed_and_synced_one_by_one_oldest_first(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watched(Disk):
        def unlink(self, name: str) -> None:
            calls.append(name)
            super().unlink(name)

        def sync_directory(self) -> None:
            calls.append("sync")
            super().sync_directory()

    log = Log(Watched(tmp_path), segment_bytes=100)
    list(log.recover())
    log.start()
    for _ in range(5):
        await log.writer.append([b"\x01" + bytes(100)])
    calls.clear()
    log.remove([3, 2])
    assert calls == ["00000002.seg", "sync", "00000003.seg", "sync"]
    await log.close()


async def test_a_consumer_rejected_by_a_full_disk_passes_its_wake_up_on() -> None:
    with VirtualClock() as clock:
        disk = SimulatedDisk()
        engine = await open_engine(disk, clock)
        await engine.create("orders")
        waiting = [asyncio.create_task(engine.consume("orders", timeout=60)) for _ in range(2)]
        await asyncio.sleep(0)
        log = engine.storage.log
        log.writer.deferred_records = 1  # as after a failed write, before the next attempt
        engine.catalogue.queue("orders", "test").put(clock.monotonic(), "1", b"", seq=1)
        done, _ = await asyncio.wait(waiting, timeout=1)
        assert len(done) == 2
        assert all(isinstance(task.exception(), StorageError) for task in done)
        log.writer.deferred_records = 0
        await engine.aclose()


async def test_a_cancelled_close_still_finishes(tmp_path: Path) -> None:
    engine = await Engine.open(tmp_path)
    await engine.create("orders")
    storage, started, resume = engine.storage, asyncio.Event(), asyncio.Event()
    close = storage.log.close

    async def slow_close() -> None:
        started.set()
        await resume.wait()
        await close()

    storage.log.close = slow_close  # type: ignore[method-assign]
    closing = asyncio.create_task(engine.aclose())
    await started.wait()
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    resume.set()
    await engine.aclose()
    async with await Engine.open(tmp_path) as again:
        assert await again.list() == ["orders"]


async def test_the_maintenance_task_survives_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qkit.native.storage.storage.CHECK_INTERVAL_SECONDS", 0.005)
    failures = 0

    def failing(self: Storage) -> list[str]:
        nonlocal failures
        failures += 1
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Storage, "waiting", failing)
    async with await Engine.open(tmp_path) as engine:
        task = engine.storage._maintenance_task
        assert task is not None
        await until(lambda: failures >= 3)
        assert not task.done()
    assert "a bulk file could not be imported" in caplog.text


async def test_the_maintenance_task_runs_when_the_log_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.native.storage.storage.CHECK_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr("qkit.native.storage.storage.IDLE_SECONDS", 0.02)
    monkeypatch.setattr("qkit.native.storage.storage.MIN_SNAPSHOT_BYTES", 1)
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        for _ in range(50):
            await engine.publish("orders", bytes(1_000))
        await engine.purge("orders")
        log = tmp_path / "log"
        await until(lambda: sum(file.stat().st_size for file in log.glob("*.seg")) < 20_000)


async def test_a_cancelled_import_still_imports_the_file_once(tmp_path: Path) -> None:
    with BulkWriter(tmp_path, "load", 0) as part:
        for _ in range(10):
            part.put("orders", b"")
    commit(tmp_path, "load")
    engine = await Engine.open(tmp_path)
    await engine.create("orders")
    importing = asyncio.create_task(engine.import_bulk_files())
    await until(engine.storage._import_lock.locked, pause=0)
    importing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await importing
    await engine.import_bulk_files()
    assert (await engine.stats("orders")).depth == 10
    await engine.aclose()
    async with await Engine.open(tmp_path) as again:
        assert (await again.stats("orders")).depth == 10
