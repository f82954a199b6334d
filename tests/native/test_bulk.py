"""Bulk files: imported exactly once, atomically and in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from qkit.errors import ConfigError, LogDamaged
from qkit.native import Engine
from qkit.native.bulk import BulkWriter, abort, commit, published_jobs
from qkit.native.log.writer import AppendCallback
from qkit.testing import VirtualClock


def bulk(path: Path, job: str, parts: int = 2, count: int = 3) -> None:
    for part in range(parts):
        with BulkWriter(path, job, part) as writer:
            for at in range(count):
                body, headers = b"%d.%d" % (part, at), {"n": str(at)}
                writer.put("orders", body, priority=at % 10, headers=headers)


async def bodies(engine: Engine, queue: str = "orders") -> list[bytes]:
    return sorted(item.body for item in await engine.peek(queue, 100_000))


EXPECTED = [b"0.0", b"0.1", b"0.2", b"1.0", b"1.1", b"1.2"]


async def test_a_job_is_imported_exactly_once(tmp_path: Path) -> None:
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            bulk(tmp_path, "load")
            assert await engine.import_bulk_files() == 0  # not published yet
            assert commit(tmp_path, "load")
            assert not commit(tmp_path, "load")
            assert await engine.import_bulk_files() == 6
            assert published_jobs(tmp_path) == []
            bulk(tmp_path, "load")
            assert commit(tmp_path, "load")  # published again by mistake
            assert await engine.import_bulk_files() == 0
            assert await bodies(engine) == EXPECTED
            first = await engine.consume("orders")
            assert first is not None
            assert (first.body, first.priority, first.headers) == (b"0.2", 2, {"n": "2"})
            await first.ack()
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.import_bulk_files() == 0
            assert await bodies(engine) == [body for body in EXPECTED if body != b"0.2"]


async def test_an_interrupted_import_has_no_effect(tmp_path: Path) -> None:
    with VirtualClock() as clock:
        engine = await Engine.open(tmp_path, clock=clock)
        bulk(tmp_path, "load", count=5_000)
        commit(tmp_path, "load")
        append = engine.storage.journal.writer.append_with_callback
        calls = 0

        def failing(
            contents: Sequence[bytes], done: AppendCallback, *, force: bool = False
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("killed")
            append(contents, done, force=force)

        engine.storage.journal.writer.append_with_callback = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            await engine.import_bulk_files()
        engine.storage.journal.writer.append_with_callback = append  # type: ignore[method-assign]
        await engine.publish("orders", b"between")
        await engine.storage.maintain()
        await engine.aclose()
        async with await Engine.open(tmp_path, clock=clock) as again:
            assert await bodies(again) == [b"between"]
            assert await again.import_bulk_files() == 10_000
            await again.storage.maintain()
        async with await Engine.open(tmp_path, clock=clock) as again:
            assert len(await bodies(again)) == 10_001


async def test_a_bulk_message_is_copied_to_every_group(tmp_path: Path) -> None:
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            await engine.create("prices", broadcast=True)
            for group in ("g", "h"):
                assert await engine.consume("prices", group=group) is None
            with BulkWriter(tmp_path, "ticks", 0) as writer:
                writer.put("prices", b"tick")
            commit(tmp_path, "ticks")
            assert await engine.import_bulk_files() == 2
        async with await Engine.open(tmp_path, clock=clock) as engine:
            for group in ("g", "h"):
                delivery = await engine.consume("prices", group=group)
                assert delivery is not None
                assert delivery.body == b"tick"


async def test_a_declared_queue_is_created_without_messages(tmp_path: Path) -> None:
    with BulkWriter(tmp_path, "load", 0) as part:
        part.declare("orders", {"max_priority": 20})
        part.declare("prices", {"broadcast": True})
    commit(tmp_path, "load")
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.import_bulk_files() == 0
            assert published_jobs(tmp_path) == []
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await bodies(engine) == []
            channels = engine.catalogue.channels
            assert channels["orders"].config.max_priority == 20
            assert channels["prices"].config.broadcast


async def test_an_aborted_job_leaves_no_files(tmp_path: Path) -> None:
    bulk(tmp_path, "load")
    abort(tmp_path, "load")
    assert not commit(tmp_path, "load")
    writer = BulkWriter(tmp_path, "load", 0)
    writer.put("orders", b"1")
    writer.__exit__(RuntimeError, RuntimeError("bad row"), None)
    assert commit(tmp_path, "load")
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.import_bulk_files() == 0


async def test_a_damaged_part_is_rejected_and_other_jobs_are_imported(tmp_path: Path) -> None:
    for job in ("bad", "good"):
        bulk(tmp_path, job)
        commit(tmp_path, job)
    part = tmp_path / "inbox/bad/00000001.seg"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            with pytest.raises(LogDamaged, match="is damaged"):
                await engine.import_bulk_files()
            assert published_jobs(tmp_path) == ["bad"]
            assert await bodies(engine) == EXPECTED
            assert await engine.import_bulk_files() == 0  # the error is raised only once
        async with await Engine.open(tmp_path, clock=clock) as engine:
            with pytest.raises(LogDamaged, match=r"bad/00000001\.seg is damaged"):
                await engine.import_bulk_files()


@pytest.mark.parametrize("job", ["", "../x", "/x", ".hidden", "a/b", "x" * 201, "a\n"])
def test_an_invalid_job_name_is_rejected(tmp_path: Path, job: str) -> None:
    with pytest.raises(ConfigError, match="a job name must be"):
        BulkWriter(tmp_path, job, 0)


def test_bulk_files_are_private_to_their_owner(tmp_path: Path) -> None:
    bulk(tmp_path, "load")
    commit(tmp_path, "load")
    assert (tmp_path / "inbox/load").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "inbox/load/00000000.seg").stat().st_mode & 0o777 == 0o600


async def test_a_running_engine_imports_bulk_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.native.storage.storage.CHECK_INTERVAL_SECONDS", 0.01)
    async with await Engine.open(tmp_path) as engine:
        bulk(tmp_path, "load")
        commit(tmp_path, "load")
        await engine.create("orders")
        delivery = await engine.consume("orders", timeout=20)
        assert delivery is not None
        assert delivery.body in EXPECTED


# Id of a Spark query. Its batches are the jobs QUERY-0, QUERY-1, and so on.
QUERY = "6f0c6b5e-9f0e-4a5a-8f5e-0a1b2c3d4e5f"


def batch_of(path: Path, number: int, *, query: str = QUERY, partitions: int = 2) -> None:
    """Write one batch of a stream, with a message for each of three keys in each partition."""
    for partition in range(partitions):
        with BulkWriter(path, f"{query}-{number}", partition * 1_000) as writer:
            for key in ("a", "b", "c"):
                writer.put("orders", b"%d.%d" % (partition, number), key=key)


async def order_of(engine: Engine) -> list[tuple[str | None, bytes]]:
    return [(item.key, item.body) for item in await engine.peek("orders", 100_000)]


async def test_200_batches_in_one_inbox_are_imported_in_order(tmp_path: Path) -> None:
    for number in range(200):
        batch_of(tmp_path, number)
        assert commit(tmp_path, f"{QUERY}-{number}")
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.import_bulk_files() == 200 * 2 * 3
            found = await order_of(engine)
    expected = [b"%d.%d" % (partition, number) for number in range(200) for partition in range(2)]
    for key in ("a", "b", "c"):
        assert [body for name, body in found if name == key] == expected
    consumed = [body for name, body in found]
    for partition in (b"0.", b"1."):
        assert [body for body in consumed if body.startswith(partition)] == [
            b"%s%d" % (partition, number) for number in range(200) for _ in range(3)
        ]


async def test_jobs_are_imported_in_commit_order(tmp_path: Path) -> None:
    names = [
        "z-10",
        "a",
        f"{QUERY}-9",
        "z-9",
        f"{QUERY}-10",
        "m",
        "load-2026-11-16",
        "load-2026-11-15",
    ]
    for name in reversed(names):  # written in a different order than committed
        bulk(tmp_path, name, parts=1, count=1)
    for name in names:
        assert commit(tmp_path, name)
    assert published_jobs(tmp_path) == names


async def test_setting_the_clock_back_does_not_change_the_import_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2_000_000_000 * 10**9, 1_000_000_000 * 10**9, 1_500_000_000 * 10**9])
    monkeypatch.setattr("qkit.native.bulk.time_ns", lambda: next(times))
    for name in ("c", "a", "b"):
        bulk(tmp_path, name, parts=1, count=1)
        commit(tmp_path, name)
    assert published_jobs(tmp_path) == ["c", "a", "b"]


async def test_batches_of_an_older_version_are_imported_in_order(tmp_path: Path) -> None:
    """An older version set no commit time; only job names and directory times are known."""
    other = QUERY.replace("6f", "a0")
    for number in (0, 1, 10, 11, 2, 9):
        for query, start in ((QUERY, 0), (other, 5)):
            batch_of(tmp_path, number, query=query)
            staged = tmp_path / "inbox" / f".{query}-{number}"
            os.utime(staged, (1_700_000_000 + start + number,) * 2)
            staged.rename(tmp_path / "inbox" / f"{query}-{number}")
    by_time = [
        (query, number)
        for query, start in ((QUERY, 0), (other, 5))
        for number in (0, 1, 2, 9, 10, 11)
    ]
    by_time.sort(key=lambda item: (item[1] + (0 if item[0] == QUERY else 5), item[0]))
    assert published_jobs(tmp_path) == [f"{query}-{number}" for query, number in by_time]
    for entry in (tmp_path / "inbox").iterdir():  # as after a copy that does not preserve times
        os.utime(entry, (1_800_000_000,) * 2)
    found = published_jobs(tmp_path)
    for query in (QUERY, other):
        batches = [name for name in found if name.startswith(query)]
        assert batches == [f"{query}-{number}" for number in (0, 1, 2, 9, 10, 11)]
    # This time contradicts the number of the batch.
    os.utime(tmp_path / "inbox" / f"{QUERY}-9", (1_600_000_000,) * 2)
    batches = [name for name in published_jobs(tmp_path) if name.startswith(QUERY)]
    assert batches == [f"{QUERY}-{number}" for number in (0, 1, 2, 9, 10, 11)]


async def test_parts_are_imported_in_order_of_number(tmp_path: Path) -> None:
    for part in (99_999_000, 100_000_000):
        with BulkWriter(tmp_path, "load", part) as writer:
            writer.put("orders", b"%d" % part)
    commit(tmp_path, "load")
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.import_bulk_files() == 2
            assert [body for _, body in await order_of(engine)] == [b"99999000", b"100000000"]
