"""The log in a running loop: order, durability by policy, failing disks, reading back."""

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
async def test_records_come_back_in_the_order_of_their_appends(tmp_path):
    places = []
    for round in range(3):
        log = Log.open(tmp_path, segment_bytes=2000)
        assert len(list(log.recover())) == round * 100
        log.start()
        futures = [log.writer.append([content(round * 100 + at, at)]) for at in range(100)]
        places += await asyncio.gather(*futures)
        await log.close()

    log = Log.open(tmp_path)
    entries = list(log.recover())
    assert [number(entry.content) for entry in entries] == list(range(300))
    assert [entry.position for entry in entries] == places
    assert log.damage == []
    assert [entry.position for entry in entries] == sorted(places)
    assert len({segment for segment, _ in places}) > 3
    await log.close()


@pytest.mark.proves("002-index-6")
async def test_recovery_can_begin_where_a_snapshot_ends(disk):
    log = started(disk, segment_bytes=300)
    places = [await log.writer.append([content(at, 30)]) for at in range(30)]
    await log.close()
    assert list(Log(SimulatedDisk(disk.files())).recover((places[-1][0] + 1, 0))) == []
    for at in (0, 1, 7, 29):
        later = Log(SimulatedDisk(disk.files())).recover(places[at])
        assert [number(entry.content) for entry in later] == list(range(at, 30))


@pytest.mark.proves("002-performance-4", "002-performance-5", "002-performance-7")
async def test_a_hundred_appenders_share_their_syncs(disk):
    log = started(disk)

    async def sender() -> None:
        for at in range(10):
            await log.writer.append([content(at)])

    await asyncio.gather(*(sender() for _ in range(100)))
    assert log.writer.groups <= 12
    assert disk.syncs <= 14
    await log.close()


async def test_every_place_in_a_batch_can_be_read_back(disk):
    log = started(disk)
    batch = [content(at, at * 3) for at in range(20)]
    first = await log.writer.append(batch)

    for (segment, offset), record in zip(positions(first, batch), batch, strict=True):
        assert log.read(segment, offset) == record
    with pytest.raises(LogDamaged, match="segment 1, offset 81"):
        log.read(1, 81)
    await log.close()


async def test_a_record_damaged_on_disk_is_not_handed_out(tmp_path):
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


async def test_many_segments_are_read_with_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_OPEN_FILES", 3)
    log = Log.open(tmp_path, segment_bytes=100)
    list(log.recover())
    log.start()
    places = [await log.writer.append([content(at, 50)]) for at in range(20)]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a directory of no real files

    for at, (segment, offset) in enumerate(places * 2):
        assert number(log.read(segment, offset)) == at % 20
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # noqa: PTH208  the same
    await log.close()


# Policies


@pytest.mark.proves("002-delivery-1", "002-performance-8", "002-improvements-1", "002-pitfalls-1")
async def test_always_confirms_after_the_sync_and_only_written_before_it(disk):
    log = started(disk)
    await log.writer.append([content(0)])
    held, let_go = threading.Event(), threading.Event()
    sync_file = disk.sync

    def slow_sync(fd: int) -> None:
        held.set()
        assert let_go.wait(60)
        sync_file(fd)

    disk.sync = slow_sync
    synced = log.writer.append([content(1)])
    log.writer.append_nowait([content(2)])
    written = log.writer.written()
    assert written is not None
    await written
    assert held.wait(60)
    assert not synced.done()
    let_go.set()
    await synced
    await log.close()


@pytest.mark.parametrize(("fsync", "syncs"), [("interval", 0), ("never", 0), ("always", 5)])
async def test_the_policy_says_how_often_it_is_synced(disk, fsync, syncs):
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


async def test_interval_syncs_by_itself_and_always_does_so_for_what_nobody_awaits(disk):
    log = started(disk, fsync="interval", fsync_interval=0.01)
    await log.writer.append([content(0)])
    await synced_again(disk)
    await log.close()

    log = started(disk, fsync="always", fsync_interval=0.01)
    log.writer.append_nowait([content(1)])
    await synced_again(disk)
    assert numbers(disk) == [0, 1]
    await log.close()


async def synced_again(disk: SimulatedDisk) -> None:
    """Wait for the next sync, by whatever thread."""
    done = threading.Event()
    sync_file = disk.sync

    def sync(fd: int) -> None:
        sync_file(fd)
        done.set()

    disk.sync = sync  # type: ignore[method-assign]
    assert await asyncio.to_thread(done.wait, 60)


@pytest.mark.proves("002-log-1")
async def test_what_nobody_awaits_keeps_its_place_and_is_written_at_close(disk):
    log = started(disk)
    log.writer.append_nowait([content(0)])
    await log.writer.append([content(1)])
    log.writer.append_nowait([content(2), content(3)])
    log.writer.append_nowait([content(4)])
    await log.close()

    assert numbers(disk) == [0, 1, 2, 3, 4]


@pytest.mark.proves("002-improvements-2")
@pytest.mark.parametrize("fsync", ["always", "never"])
async def test_a_group_too_large_for_one_write_goes_in_steps(disk, fsync):
    log = started(disk, segment_bytes=5 << 20, fsync=fsync)
    records = [content(at) + bytes(3 << 20) for at in range(8)]
    places = await asyncio.gather(*(log.writer.append([record]) for record in records))
    for (segment, offset), record in zip(places, records, strict=True):
        assert log.read(segment, offset) == record
    assert len({segment for segment, _ in places}) > 1
    await log.close()


# Failing disks


async def test_after_a_failed_sync_its_group_gets_the_error_and_the_log_is_read_only(disk):
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
    assert disk.syncs == syncs + 1  # never retried
    assert numbers(disk) == [1]

    log = started(SimulatedDisk(disk.files()))
    await log.writer.append([content(2)])
    await log.close()


async def test_a_group_that_waits_behind_the_failed_one_is_refused(disk):
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
async def test_a_sync_that_fails_in_a_rotation_makes_it_read_only_too(disk, kind):
    log = started(disk, segment_bytes=100)
    await log.writer.append([content(1, 50)])
    disk.fail[kind] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        await log.writer.append([content(2)])
    await log.close()
    assert numbers(disk) == [1]


async def test_a_sync_that_fails_at_close_is_told(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    log.writer.append_nowait([content(2)])
    disk.fail["sync"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        await log.close()


@pytest.mark.parametrize("short", [None, 100])
async def test_a_full_disk_refuses_and_goes_on_when_there_is_space(disk, short):
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
            log.writer.append_nowait([content(at, 100)])  # put off at worst
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


async def test_a_full_disk_at_close_is_no_error_once_all_is_synced(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    disk.fail["write"] = OSError(errno.ENOSPC, "No space left on device")
    await log.close()
    assert numbers(disk) == [1]


async def test_a_rename_that_fails_in_a_rotation_is_tried_again(disk):
    log = started(disk, segment_bytes=100)
    await log.writer.append([content(1, 60)])
    disk.fail["rename"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError):
        await log.writer.append([content(2)])
    await log.writer.append([content(3)])
    await log.close()
    assert numbers(disk) == [1, 3]


async def test_a_mistake_in_the_writer_is_told_to_those_who_wait(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    with pytest.raises(ReadOnly, match="writer failed"):
        await log.writer.append(["no bytes"])  # type: ignore[list-item]
    assert log.read_only
    await log.close()
    assert numbers(disk) == [1]


async def test_a_write_that_cannot_be_taken_back_makes_it_read_only(disk):
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
        pytest.skip("a small file system can be mounted by root alone, and not on every machine")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_real_full_disk(small_disk):
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


# Tidying


@pytest.mark.proves("002-compaction-3")
async def test_segments_are_rewritten_and_removed(disk):
    log = started(disk, segment_bytes=300)
    places = [await log.writer.append([content(at, 50)]) for at in range(20)]
    sealed = [segment for segment, _ in log.segments()]
    assert sealed == sorted({segment for segment, _ in places})[:-1]

    first = [entry.content for entry in log.entries(1)]
    assert [number(record) for record in first] == [at for at, place in enumerate(places)
                                                    if place[0] == 1]  # fmt: skip
    log.read(1, places[0][1])  # its file is kept open, and must not be used for the new one
    rewrite = log.rewrite(1, first[1:2])
    assert numbers(disk) == list(range(20))
    log.install(rewrite)
    assert log.read(1, places[0][1]) == first[0]  # until whoever reads knows the new places
    log.activate_rewrite(1)
    assert log.read(1, rewrite.offsets[0]) == first[1]
    log.remove([2])
    kept = [1] + [at for at, place in enumerate(places) if place[0] > 2]
    assert numbers(disk) == kept
    await log.writer.append([content(20)])
    await log.close()
    assert numbers(disk) == [*kept, 20]


async def test_what_was_rewritten_or_removed_stays_so_without_power(disk):
    log = started(disk, segment_bytes=100)
    for at in range(4):
        await log.writer.append([content(at, 60)])
    for tidy, kept in (
        (lambda: log.install(log.rewrite(1, [])), [1, 2, 3]),
        (lambda: log.remove([2]), [2, 3]),
    ):
        tidy()
        assert numbers(disk.lose_power(len(disk.journal), Random(1), "none")) == kept
    await log.close()


async def test_a_disk_that_fails_while_tidying_leaves_the_log_as_it_was(disk):
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
        with pytest.raises(StorageError, match="as before") as raised:
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


async def test_the_segment_being_written_can_be_neither_rewritten_nor_removed(disk):
    log = started(disk)
    await log.writer.append([content(1)])
    assert [number(entry.content) for entry in log.entries(1)] == [1]
    for call in (lambda: log.remove([1]), lambda: log.rewrite(1, [])):
        with pytest.raises(LifecycleError, match="being written"):
            call()
    await log.close()


async def test_damage_is_noticed_when_a_segment_is_read_for_compaction(tmp_path):
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


# Life


@pytest.mark.proves("002-index-3")
async def test_calls_at_the_wrong_time_say_so(disk):
    log = Log(disk)
    for call in (log.start, log.segments, lambda: log.writer.append([b"x"]),
                 lambda: log.writer.append_nowait([b"x"]), lambda: log.install(Rewrite(1, "", [])),
                 ):  # fmt: skip
        with pytest.raises((LifecycleError, KeyError)):
            call()
    list(log.recover())
    log.start()
    with pytest.raises(LifecycleError, match="started once"):
        log.start()
    with pytest.raises(LifecycleError, match="recovered once"):
        list(log.recover())
    await log.close()
    await log.close()
    with pytest.raises(LifecycleError, match="closed"):
        log.writer.append([b"x"])


async def test_a_log_that_was_never_started_closes(tmp_path):
    for recover in (False, True):
        log = Log.open(tmp_path)
        if recover:
            list(log.recover())
        await log.close()
    assert not log.read_only


async def test_bad_batches_and_settings_are_refused(disk, tmp_path):
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
    await Log.open(tmp_path).close()  # the refused ones let go of the directory


async def test_cancelled_appends_are_written_all_the_same(disk):
    log = started(disk)
    task = asyncio.ensure_future(log.writer.append([content(1)]))
    task.cancel()
    await log.writer.append([content(2)])
    await log.close()
    assert numbers(disk) == [1, 2]


def test_a_loop_closed_without_close_ends_no_thread_with_a_traceback(tmp_path: Path):
    async def leave() -> Log:
        log = Log.open(tmp_path)
        list(log.recover())
        log.start()
        log.writer.append_nowait([content(1)])
        await asyncio.sleep(0)
        return log

    log = asyncio.run(leave())
    assert log.writer.deferred_records == 0
    log._writer._queue.put(None)  # type: ignore[union-attr]  # what its close would do
    log._writer._thread.join()  # type: ignore[union-attr]
    log._disk.close()
