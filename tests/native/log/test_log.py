"""The log in a running event loop: order, fsync policies, failing disks, reading, maintenance."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from qkit.errors import (
    ConfigError,
    LifecycleError,
    LogDamaged,
    PayloadTooLarge,
    ReadOnly,
    StorageError,
)
from qkit.native.log import log as log_module
from qkit.native.log.log import Log, Rewrite, positions
from tests.support.crasher import content, number
from tests.support.disk import SimulatedDisk


def started(disk: SimulatedDisk, **options) -> Log:
    log = Log(disk, **options)
    list(log.recover())
    log.start()
    return log


def numbers(disk: SimulatedDisk) -> list[int]:
    return [number(entry.content) for entry in Log(SimulatedDisk(disk.files())).recover()]


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.mark.proves("002-log-1", "002-log-2", "002-testing-2")
async def test_records_are_recovered_in_append_order(tmp_path):
    log_positions = []
    for round in range(3):
        log = Log.open(tmp_path, segment_bytes=2000)
        assert len(list(log.recover())) == round * 100
        log.start()
        futures = [log.writer.append([content(round * 100 + at, at)]) for at in range(100)]
        log_positions += await asyncio.gather(*futures)
        await log.close()

    log = Log.open(tmp_path)
    entries = list(log.recover())
    assert [number(entry.content) for entry in entries] == list(range(300))
    assert [entry.position for entry in entries] == log_positions
    assert log.damage == []
    assert [entry.position for entry in entries] == sorted(log_positions)
    assert len({segment for segment, _ in log_positions}) > 3
    await log.close()


@pytest.mark.proves("002-index-6")
async def test_recovery_can_start_at_the_end_of_a_snapshot(disk):
    log = started(disk, segment_bytes=300)
    log_positions = [await log.writer.append([content(at, 30)]) for at in range(30)]
    await log.close()
    assert list(Log(SimulatedDisk(disk.files())).recover((log_positions[-1][0] + 1, 0))) == []
    for at in (0, 1, 7, 29):
        later = Log(SimulatedDisk(disk.files())).recover(log_positions[at])
        assert [number(entry.content) for entry in later] == list(range(at, 30))


@pytest.mark.proves("002-performance-4", "002-performance-5", "002-performance-7")
async def test_concurrent_appends_share_syncs(disk):
    log = started(disk)

    async def sender() -> None:
        for at in range(10):
            await log.writer.append([content(at)])

    await asyncio.gather(*(sender() for _ in range(100)))
    assert log.writer.groups <= 12
    assert disk.syncs <= 14
    await log.close()


async def test_every_record_of_a_batch_can_be_read_by_position(disk):
    log = started(disk)
    batch = [content(at, at * 3) for at in range(20)]
    first = await log.writer.append(batch)

    for (segment, offset), record in zip(positions(first, batch), batch, strict=True):
        assert log.read(segment, offset) == record
    with pytest.raises(LogDamaged, match="segment 1, offset 81"):
        log.read(1, 81)
    await log.close()


async def test_reading_a_damaged_record_raises(tmp_path):
    log = Log.open(tmp_path)
    list(log.recover())
    log.start()
    segment, offset = await log.writer.append([content(7, 100)])
    with (tmp_path / "log/00000001.seg").open("r+b") as file:
        file.seek(offset + 50)
        file.write(b"?")

    with pytest.raises(LogDamaged) as raised:
        log.read(segment, offset)
    assert [(item.segment, item.offset) for item in raised.value.damage] == [(segment, offset)]
    await log.close()


async def test_the_number_of_open_segments_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_OPEN_FILES", 3)
    log = Log.open(tmp_path, segment_bytes=100)
    list(log.recover())
    log.start()
    log_positions = [await log.writer.append([content(at, 50)]) for at in range(20)]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  not a directory of real files

    for at, (segment, offset) in enumerate(log_positions * 2):
        assert number(log.read(segment, offset)) == at % 20
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # noqa: PTH208  as above
    await log.close()


# Fsync policies


@pytest.mark.proves("002-delivery-1", "002-performance-8", "002-improvements-1", "002-pitfalls-1")
async def test_with_fsync_always_append_waits_for_the_sync_and_written_does_not(disk):
    log = started(disk)
    await log.writer.append([content(0)])
    syncing, continue_sync = threading.Event(), threading.Event()
    sync_file = disk.sync

    def slow_sync(fd: int) -> None:
        syncing.set()
        assert continue_sync.wait(60)
        sync_file(fd)

    disk.sync = slow_sync
    synced = log.writer.append([content(1)])
    log.writer.append_nowait([content(2)])
    written = log.writer.written()
    assert written is not None
    await written
    assert syncing.wait(60)
    assert not synced.done()
    continue_sync.set()
    await synced
    await log.close()


@pytest.mark.parametrize(("fsync", "syncs"), [("interval", 0), ("never", 0), ("always", 5)])
async def test_the_fsync_policy_determines_the_number_of_syncs(disk, fsync, syncs):
    log = started(disk, fsync=fsync, fsync_interval=60.0)
    await log.writer.append([content(0)])
    before = disk.syncs
    for at in range(1, 6):
        await log.writer.append([content(at)])
    assert disk.syncs - before == syncs
    await log.close()
    assert numbers(disk) == list(range(6))
    unsynced = disk.lose_power(len(disk.journal), Random(1), "none")
    assert numbers(unsynced) == ([] if fsync == "never" else list(range(6)))


async def test_unawaited_records_are_synced_after_the_interval(disk):
    log = started(disk, fsync="interval", fsync_interval=0.01)
    await log.writer.append([content(0)])
    await next_sync(disk)
    await log.close()

    log = started(disk, fsync="always", fsync_interval=0.01)
    log.writer.append_nowait([content(1)])
    await next_sync(disk)
    assert numbers(disk) == [0, 1]
    await log.close()


async def next_sync(disk: SimulatedDisk) -> None:
    """Wait until the next sync has completed, in any thread."""
    done = threading.Event()
    sync_file = disk.sync

    def sync(fd: int) -> None:
        sync_file(fd)
        done.set()

    disk.sync = sync  # type: ignore[method-assign]
    assert await asyncio.to_thread(done.wait, 60)


@pytest.mark.proves("002-log-1")
async def test_unawaited_records_keep_their_order_and_are_written_at_close(disk):
    log = started(disk)
    log.writer.append_nowait([content(0)])
    await log.writer.append([content(1)])
    log.writer.append_nowait([content(2), content(3)])
    log.writer.append_nowait([content(4)])
    await log.close()

    assert numbers(disk) == [0, 1, 2, 3, 4]


@pytest.mark.proves("002-improvements-2")
@pytest.mark.parametrize("fsync", ["always", "never"])
async def test_a_large_group_is_written_in_several_writes(disk, fsync):
    log = started(disk, segment_bytes=5 << 20, fsync=fsync)
    records = [content(at) + bytes(3 << 20) for at in range(8)]
    log_positions = await asyncio.gather(*(log.writer.append([record]) for record in records))
    for (segment, offset), record in zip(log_positions, records, strict=True):
        assert log.read(segment, offset) == record
    assert len({segment for segment, _ in log_positions}) > 1
    await log.close()


# Failing disks


async def test_a_failed_sync_fails_its_group_and_makes_the_log_read_only(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    syncs = disk.syncs
    disk.fail["sync"] = OSError(errno.EIO, "Input/output error")
    group = await asyncio.gather(
        *(log.writer.append([content(at)]) for at in range(2, 12)), return_exceptions=True
    )

    assert all(isinstance(error, ReadOnly) for error in group)
    assert all(isinstance(error.__cause__, OSError) for error in group)  # type: ignore[union-attr]
    assert log.read_only
    for call in (log.writer.append, log.writer.append_nowait):
        with pytest.raises(ReadOnly, match="close and reopen"):
            call([content(99)])
    await log.close()
    assert disk.syncs == syncs + 1  # the sync is not retried
    assert numbers(disk) == [1]

    log = started(SimulatedDisk(disk.files()))
    await log.writer.append([content(2)])
    await log.close()


async def test_a_group_after_a_failed_sync_is_rejected(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    disk.fail["sync"] = OSError(errno.EIO, "Input/output error")
    first = log.writer.append([content(2)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = log.writer.append([content(3)]) if not log.read_only else first
    for future in (first, second):
        with pytest.raises(ReadOnly):
            await future
    await log.close()
    assert numbers(disk) == [1]


@pytest.mark.parametrize("kind", ["sync", "sync_directory"])
async def test_a_failed_sync_during_a_rotation_makes_the_log_read_only(disk, kind):
    log = started(disk, segment_bytes=100)
    await log.writer.append([content(1, 50)])
    disk.fail[kind] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        await log.writer.append([content(2)])
    await log.close()
    assert numbers(disk) == [1]


async def test_close_raises_if_the_last_sync_fails(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    log.writer.append_nowait([content(2)])
    disk.fail["sync"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        await log.close()


@pytest.mark.parametrize("short", [None, 100])
async def test_a_full_disk_rejects_appends_until_there_is_space(disk, short):
    log = started(disk, segment_bytes=1500)
    disk.short = short
    kept = [0]
    await log.writer.append([content(0)])
    for at in range(1, 200):
        if at % 50 == 10:
            disk.capacity = sum(map(len, disk.files().values())) + 333
        if at % 50 == 40:
            disk.capacity = None
        if at % 5 == 0:
            log.writer.append_nowait([content(at, 100)])  # deferred while the disk is full
            kept.append(at)
            continue
        (answer,) = await asyncio.gather(
            log.writer.append([content(at, 100)]), return_exceptions=True
        )
        if isinstance(answer, tuple):
            kept.append(at)
        else:
            assert type(answer) is StorageError
            assert isinstance(answer.cause, OSError)
            assert answer.cause.errno == errno.ENOSPC
    await log.close()

    assert len(kept) < 200
    assert numbers(disk) == kept
    assert kept[-1] == 199


async def test_a_full_disk_at_close_is_not_an_error_if_all_records_are_synced(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    disk.fail["write"] = OSError(errno.ENOSPC, "No space left on device")
    await log.close()
    assert numbers(disk) == [1]


async def test_a_failed_rename_during_a_rotation_is_retried(disk):
    log = started(disk, segment_bytes=100)
    await log.writer.append([content(1, 60)])
    disk.fail["rename"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError):
        await log.writer.append([content(2)])
    await log.writer.append([content(3)])
    await log.close()
    assert numbers(disk) == [1, 3]


async def test_an_unexpected_error_in_the_writer_fails_its_callers(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    with pytest.raises(ReadOnly, match="writer failed"):
        await log.writer.append(["no bytes"])  # type: ignore[list-item]
    assert log.read_only
    await log.close()
    assert numbers(disk) == [1]


async def test_a_failed_write_that_cannot_be_undone_makes_the_log_read_only(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    disk.fail["write"] = OSError(errno.EIO, "Input/output error")
    disk.fail["truncate"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        await log.writer.append([content(2)])
    assert log.read_only
    await log.close()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system: needs root and permission to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_full_disk_on_a_real_file_system_loses_no_confirmed_record(small_disk):
    log = Log.open(small_disk / "data", segment_bytes=64_000)
    list(log.recover())
    log.start()
    (small_disk / "other").write_bytes(bytes(100_000))
    sent, at = [], 0
    for space in (False, True):
        if space:
            (small_disk / "other").unlink()
        for _ in range(100):
            group = [log.writer.append([content(at + i, 300)]) for i in range(5)]
            for i, answer in enumerate(await asyncio.gather(*group, return_exceptions=True)):
                if isinstance(answer, tuple):
                    sent.append(at + i)
            at += 5
        assert 100 < len(sent) < at
    await log.close()
    reopened = Log.open(small_disk / "data")
    assert [number(entry.content) for entry in reopened.recover()] == sent
    await reopened.close()


# Maintenance


@pytest.mark.proves("002-compaction-3")
async def test_segments_are_rewritten_and_removed(disk):
    log = started(disk, segment_bytes=300)
    log_positions = [await log.writer.append([content(at, 50)]) for at in range(20)]
    sealed = [segment for segment, _ in log.segments()]
    assert sealed == sorted({segment for segment, _ in log_positions})[:-1]

    first = [entry.content for entry in log.entries(1)]
    assert [number(record) for record in first] == [at for at, place in enumerate(log_positions)
                                                    if place[0] == 1]  # fmt: skip
    log.read(1, log_positions[0][1])  # opens the old file; reads of the new file must not use it
    rewrite = log.rewrite(1, first[1:2])
    assert numbers(disk) == list(range(20))
    log.install(rewrite)
    assert log.read(1, log_positions[0][1]) == first[0]  # the old positions are still active
    log.activate_rewrite(1)
    assert log.read(1, rewrite.offsets[0]) == first[1]
    log.remove([2])
    kept = [1] + [at for at, place in enumerate(log_positions) if place[0] > 2]
    assert numbers(disk) == kept
    await log.writer.append([content(20)])
    await log.close()
    assert numbers(disk) == [*kept, 20]


async def test_rewritten_and_removed_segments_survive_a_power_loss(disk):
    log = started(disk, segment_bytes=100)
    for at in range(4):
        await log.writer.append([content(at, 60)])
    for change, kept in (
        (lambda: log.install(log.rewrite(1, [])), [1, 2, 3]),
        (lambda: log.remove([2]), [2, 3]),
    ):
        change()
        assert numbers(disk.lose_power(len(disk.journal), Random(1), "none")) == kept
    await log.close()


async def test_a_disk_failure_during_maintenance_leaves_the_log_unchanged(disk):
    log = started(disk, segment_bytes=100)
    for at in range(4):
        await log.writer.append([content(at, 60)])
    files = disk.files()
    rewrite = log.rewrite(1, [])
    for kind, call in (
        ("create", lambda: log.rewrite(2, [])),
        ("write", lambda: log.rewrite(2, [])),
        ("sync", lambda: log.rewrite(2, [])),
        ("rename", lambda: log.install(rewrite)),
    ):
        disk.fail[kind] = OSError(errno.EIO, "Input/output error")
        with pytest.raises(StorageError, match="the log is unchanged") as raised:
            call()
        assert isinstance(raised.value.cause, OSError)
        assert {name: disk.files()[name] for name in files} == files
        assert not log.read_only
    log.install(rewrite)
    disk.fail["sync_directory"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        log.remove([1])
    assert log.read_only
    await log.close()


async def test_the_active_segment_cannot_be_rewritten_or_removed(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    assert [number(entry.content) for entry in log.entries(1)] == [1]
    for call in (lambda: log.remove([1]), lambda: log.rewrite(1, [])):
        with pytest.raises(LifecycleError, match="being written"):
            call()
    await log.close()


async def test_compaction_detects_a_damaged_segment(tmp_path):
    log = Log.open(tmp_path, segment_bytes=100)
    list(log.recover())
    log.start()
    for at in range(3):
        await log.writer.append([content(at, 60)])
    path = tmp_path / "log/00000001.seg"
    data = bytearray(path.read_bytes())
    for at in (100, 0):
        data[at] ^= 1
        data[40] ^= at == 0
        path.write_bytes(data)
        with pytest.raises(LogDamaged):
            list(log.entries(1))
    with pytest.raises(LogDamaged, match="header"):
        log.read(1, 80)
    await log.close()


# Lifecycle


@pytest.mark.proves("002-index-3")
async def test_calls_in_the_wrong_state_raise(disk):
    log = Log(disk)
    for call in (log.start, log.segments, lambda: log.writer.append([b"x"]),
                 lambda: log.writer.append_nowait([b"x"]), lambda: log.install(Rewrite(1, "", [])),
                 ):  # fmt: skip
        with pytest.raises((LifecycleError, KeyError)):
            call()
    list(log.recover())
    log.start()
    with pytest.raises(LifecycleError, match="started only once"):
        log.start()
    with pytest.raises(LifecycleError, match="recovered only once"):
        list(log.recover())
    await log.close()
    await log.close()
    with pytest.raises(LifecycleError, match="closed"):
        log.writer.append([b"x"])


async def test_a_log_that_was_never_started_can_be_closed(tmp_path):
    for recover in (False, True):
        log = Log.open(tmp_path)
        if recover:
            list(log.recover())
        await log.close()
    assert not log.read_only


async def test_invalid_batches_and_settings_are_rejected(disk, tmp_path):
    log = started(disk)
    for batch in ([], [b""], [b"x", b""]):
        with pytest.raises(ValueError, match="at least one record"):
            log.writer.append(batch)
    huge = [bytes(1 << 20)] * 1025
    with pytest.raises(PayloadTooLarge):
        log.writer.append_nowait(huge)
    await log.close()
    for options in ({"fsync": "often"}, {"fsync_interval": 0}, {"segment_bytes": 80},
                    {"segment_bytes": 1 << 31}):  # fmt: skip
        with pytest.raises(ConfigError):
            Log.open(tmp_path, **options)
    await Log.open(tmp_path).close()  # the rejected calls left no lock


async def test_cancelled_appends_are_still_written(disk):
    log = started(disk)
    task = asyncio.ensure_future(log.writer.append([content(1)]))
    task.cancel()
    await log.writer.append([content(2)])
    await log.close()
    assert numbers(disk) == [1, 2]


def test_closing_the_loop_before_the_log_does_not_crash_the_writer_thread(tmp_path: Path):
    async def leave() -> Log:
        log = Log.open(tmp_path)
        list(log.recover())
        log.start()
        log.writer.append_nowait([content(1)])
        await asyncio.sleep(0)
        return log

    log = asyncio.run(leave())
    assert log.writer.deferred_records == 0
    log._writer._queue.put(None)  # type: ignore[union-attr]  # as close() does
    log._writer._thread.join()  # type: ignore[union-attr]
    log._disk.close()
