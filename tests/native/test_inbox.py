"""Bulk files: taken in exactly once, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from qkit.errors import ConfigError, LogDamaged
from qkit.native import Engine
from qkit.native.inbox import BulkWriter, abort, bulks, commit
from qkit.native.writer import Done
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


async def test_a_job_is_taken_once_whatever_happens(tmp_path: Path) -> None:
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            bulk(tmp_path, "load")
            assert await engine.take_inbox() == 0  # not published yet
            assert commit(tmp_path, "load")
            assert not commit(tmp_path, "load")
            assert await engine.take_inbox() == 6
            assert bulks(tmp_path) == []
            bulk(tmp_path, "load")
            assert commit(tmp_path, "load")  # tried again by somebody who did not know
            assert await engine.take_inbox() == 0
            assert await bodies(engine) == EXPECTED
            first = await engine.consume("orders")
            assert first is not None
            assert (first.body, first.priority, first.headers) == (b"0.2", 2, {"n": "2"})
            await first.ack()
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.take_inbox() == 0
            assert await bodies(engine) == [body for body in EXPECTED if body != b"0.2"]


async def test_a_crash_in_the_middle_counts_for_nothing(tmp_path: Path) -> None:
    with VirtualClock() as clock:
        engine = await Engine.open(tmp_path, clock=clock)
        bulk(tmp_path, "load", count=5_000)
        commit(tmp_path, "load")
        whole = engine.storage.log.append_then
        calls = 0

        def broken(contents: Sequence[bytes], done: Done) -> None:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("killed")
            whole(contents, done)

        engine.storage.log.append_then = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            await engine.take_inbox()
        engine.storage.log.append_then = whole  # type: ignore[method-assign]
        await engine.publish("orders", b"between")
        await engine.storage.tidy()
        await engine.aclose()
        async with await Engine.open(tmp_path, clock=clock) as again:
            assert await bodies(again) == [b"between"]
            assert await again.take_inbox() == 10_000
            await again.storage.tidy()
        async with await Engine.open(tmp_path, clock=clock) as again:
            assert len(await bodies(again)) == 10_001


async def test_every_group_of_a_topic_gets_its_copy(tmp_path: Path) -> None:
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            await engine.create("prices", broadcast=True)
            for group in ("g", "h"):
                assert await engine.consume("prices", group=group) is None
            with BulkWriter(tmp_path, "ticks", 0) as writer:
                writer.put("prices", b"tick")
            commit(tmp_path, "ticks")
            assert await engine.take_inbox() == 2
        async with await Engine.open(tmp_path, clock=clock) as engine:
            for group in ("g", "h"):
                delivery = await engine.consume("prices", group=group)
                assert delivery is not None
                assert delivery.body == b"tick"


async def test_an_aborted_job_leaves_nothing(tmp_path: Path) -> None:
    bulk(tmp_path, "load")
    abort(tmp_path, "load")
    assert not commit(tmp_path, "load")
    writer = BulkWriter(tmp_path, "load", 0)
    writer.put("orders", b"1")
    writer.__exit__(RuntimeError, RuntimeError("bad row"), None)
    assert commit(tmp_path, "load")
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            assert await engine.take_inbox() == 0


async def test_a_part_that_is_not_whole_is_refused_and_the_others_taken(tmp_path: Path) -> None:
    for job in ("bad", "good"):
        bulk(tmp_path, job)
        commit(tmp_path, job)
    part = tmp_path / "inbox/bad/00000001.seg"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            with pytest.raises(LogDamaged, match="is not whole"):
                await engine.take_inbox()
            assert bulks(tmp_path) == ["bad"]
            assert await bodies(engine) == EXPECTED
            assert await engine.take_inbox() == 0  # told once
        async with await Engine.open(tmp_path, clock=clock) as engine:
            with pytest.raises(LogDamaged, match=r"bad/00000001\.seg is not whole"):
                await engine.take_inbox()


@pytest.mark.parametrize("job", ["", "../x", "/x", ".hidden", "a/b", "x" * 201, "a\n"])
def test_a_job_cannot_be_named_out_of_the_inbox(tmp_path: Path, job: str) -> None:
    with pytest.raises(ConfigError, match="a job is named"):
        BulkWriter(tmp_path, job, 0)


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    bulk(tmp_path, "load")
    commit(tmp_path, "load")
    assert (tmp_path / "inbox/load").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "inbox/load/00000000.seg").stat().st_mode & 0o777 == 0o600


async def test_an_engine_finds_bulk_files_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.native.storage.LOOK", 0.01)
    async with await Engine.open(tmp_path) as engine:
        bulk(tmp_path, "load")
        commit(tmp_path, "load")
        await engine.create("orders")
        delivery = await engine.consume("orders", timeout=20)
        assert delivery is not None
        assert delivery.body in EXPECTED
