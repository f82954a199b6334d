"""Engines and services on a disk that fails to sync or is temporarily full."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from random import Random
from typing import Any

import pytest

from qkit import QueueService, consume
from qkit.backends.native.backend import NativeBackend
from qkit.errors import QueueError, ReadOnly, StorageError
from qkit.native import Engine
from qkit.native.log.disk import Disk
from qkit.native.storage.storage import Storage
from qkit.testing import VirtualClock
from tests.support.disk import SimulatedDisk
from tests.support.engines import open_engine, view
from tests.support.services import make_service, until

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))


def disk_error(code: int = errno.EIO) -> OSError:
    return OSError(code, os.strerror(code))


async def filled(disk: SimulatedDisk, clock: VirtualClock, **options: Any) -> Engine:
    engine = await open_engine(disk, clock, **options)
    await engine.create("orders")
    await engine.create("empty")
    for number in range(4):
        await engine.publish("orders", b"body %d" % number, message_id=str(number))
    return engine


# Failed syncs


async def test_a_failed_sync_fails_all_waiting_calls_and_makes_the_engine_read_only(clock):
    disk = SimulatedDisk()
    engine = await filled(disk, clock)
    held = await engine.consume("orders")
    assert held is not None
    syncs, disk.fail["sync"] = disk.syncs, disk_error()

    results = await asyncio.gather(
        *(engine.publish("orders", b"new", message_id=f"new-{n}") for n in range(5)),
        return_exceptions=True,
    )
    assert all(isinstance(result, ReadOnly) for result in results)
    assert disk.syncs == syncs + 1

    for _ in range(3):
        for work in (
            engine.publish("orders", b"later"),
            engine.consume("orders"),
            engine.consume("orders", timeout=10),
            engine.create("other"),
            engine.purge("empty"),
        ):
            with pytest.raises(ReadOnly):
                await work
    with pytest.raises(ReadOnly):
        await held.ack()
    # Inspection still works.
    assert (await engine.stats("orders")).queue == "orders"
    assert [item.id for item in await engine.peek("orders", 10)][:2] == ["1", "2"]
    await clock.advance(3600)
    assert disk.syncs == syncs + 1
    await engine.aclose()
    assert disk.syncs == syncs + 1

    engine = await open_engine(SimulatedDisk(disk.files()), clock)
    assert {item.id for item in await view(engine)} == {"0", "1", "2", "3"}
    await engine.publish("orders", b"again")
    await engine.aclose()


@pytest.mark.parametrize("mode", ["none", "prefix", "subset", "all"])
async def test_confirmed_messages_survive_a_failed_sync_followed_by_a_power_loss(clock, mode):
    print("seed", SEED)
    random = Random(SEED)
    for number in range(20):
        disk = SimulatedDisk()
        engine = await filled(disk, clock, segment_bytes=random.choice((300, 1 << 20)))
        disk.fail["sync"] = disk_error()
        if number % 2:
            disk.fail["truncate"] = disk_error()
        with pytest.raises(ReadOnly):
            await engine.publish("orders", b"in doubt", message_id="x")
        await engine.aclose()
        after = disk.lose_power(len(disk.journal), random, mode)
        engine = await open_engine(after, clock)
        found = {item.id for item in await view(engine)}
        await engine.aclose()
        assert {"0", "1", "2", "3"} <= found <= {"0", "1", "2", "3", "x"}
        # Messages that were recovered once survive the next power loss.
        again = await open_engine(after.lose_power(len(after.journal), random, "none"), clock)
        assert {item.id for item in await view(again)} == found
        await again.aclose()


async def test_a_failed_background_sync_is_raised_by_the_next_call(tmp_path):
    """Callers do not wait until acks are synced; a thread syncs them after the interval."""

    class Failing(Disk):
        fail = False
        syncs = 0

        def sync(self, fd: int) -> None:
            self.syncs += 1
            if self.fail:
                raise disk_error()
            super().sync(fd)

    disk = Failing(tmp_path)
    engine = Engine()
    await engine.attach(Storage(disk, clock=engine.clock, fsync_interval=0.05))
    await engine.create("orders")
    await engine.publish("orders", b"", message_id="1")
    await engine.publish("orders", b"", message_id="2")
    delivery = await engine.consume("orders")
    assert delivery is not None
    disk.fail = True
    await delivery.ack()
    await asyncio.sleep(0.05)
    await until(lambda: engine.storage.log.read_only)
    failed = disk.syncs
    with pytest.raises(ReadOnly):
        await engine.publish("orders", b"")
    with pytest.raises(ReadOnly):
        await engine.consume("orders")
    await engine.aclose()
    assert disk.syncs == failed

    async with await Engine.open(tmp_path) as engine:
        assert "2" in {item.id for item in await view(engine)}


async def service_on_failed_disk(
    clock: VirtualClock, handled: list[int]
) -> tuple[QueueService, Engine, SimulatedDisk]:
    """Return a service that handled message 1 and scheduled message 2 before its disk failed."""
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock)

    @consume("jobs")
    async def handle(number: int) -> None:
        handled.append(number)

    service = make_service(handle, backend=NativeBackend(engine=engine), clock=clock)
    await service.start()
    await service.send("jobs", 1)
    await service.send("jobs", 2, delay=30)
    await clock.advance(1)
    assert handled == [1]
    assert service.ready
    disk.fail["sync"] = disk_error()
    with pytest.raises(StorageError):
        await service.send("jobs", 3)
    return service, engine, disk


async def test_a_service_on_a_failed_disk_raises_on_send_and_does_not_spin(clock):
    handled: list[int] = []
    service, engine, disk = await service_on_failed_disk(clock, handled)
    calls, syncs = 0, disk.syncs
    written = engine.storage.journal.written

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return written()

    engine.storage.journal.written = counted  # type: ignore[method-assign]
    await clock.advance(120)
    for number in range(3):
        with pytest.raises(QueueError):
            await service.send("jobs", number)
    assert calls < 200  # in two minutes
    assert disk.syncs == syncs
    assert handled == [1]
    await service.shutdown()
    await engine.aclose()

    engine = await open_engine(SimulatedDisk(disk.files()), clock)
    assert [item.attempt for item in await engine.peek("jobs", 9)] == [0]
    await engine.aclose()


async def test_a_service_on_a_failed_disk_is_unhealthy(clock):
    service, engine, _ = await service_on_failed_disk(clock, [])
    await clock.advance(20)  # before message 2 is due
    health = service.health_check()
    await service.shutdown()
    await engine.aclose()
    assert health.status == "unhealthy"


# Full disks


@pytest.mark.parametrize("short", [None, 7], ids=["", "short-writes"])
async def test_a_full_disk_rejects_sends_and_the_engine_recovers_without_a_restart(clock, short):
    disk = SimulatedDisk()
    engine = await filled(disk, clock)
    held = [await engine.consume("orders"), await engine.consume("orders")]
    disk.short = short
    disk.capacity = sum(map(len, disk.files().values())) + 20
    for _ in range(3):
        with pytest.raises(StorageError, match="free some space") as raised:
            await engine.publish("orders", b"x" * 50, message_id="rejected")
        assert not isinstance(raised.value, ReadOnly)
    for delivery in held:
        assert delivery is not None
        with pytest.raises(StorageError):
            await delivery.ack()
    assert engine.storage.log.writer.deferred_records
    assert (await engine.stats("orders")).in_flight == 0
    # After a kill, messages with unwritten acks are redelivered; no confirmed message is lost.
    killed = await open_engine(SimulatedDisk(disk.files()), clock)
    assert {item.id for item in await view(killed)} == {"0", "1", "2", "3"}
    await killed.aclose()

    disk.capacity = None
    await clock.advance(1)
    assert engine.storage.log.writer.deferred_records == 0
    sent = await engine.publish("orders", b"again", message_id="again")
    assert sent.position == 2
    delivery = await engine.consume("orders")
    assert delivery is not None
    assert (delivery.message_id, delivery.retry_count) == ("2", 0)
    files = disk.files()
    await engine.aclose()
    engine = await open_engine(SimulatedDisk(files), clock)
    assert {item.id for item in await view(engine)} == {"2", "3", "again"}
    await engine.aclose()


async def test_deferred_changes_are_written_when_there_is_space(clock):
    """Messages and leases expire, and a message is removed, while the disk is full."""
    disk = SimulatedDisk()
    engine = await filled(disk, clock)
    await engine.publish("orders", b"expires", message_id="m", ttl=5)
    await engine.create("spent", max_retries=0)
    await engine.publish("spent", b"poison", message_id="p")
    assert await engine.consume("spent", ack_deadline=3)
    disk.capacity = sum(map(len, disk.files().values())) + 10
    await clock.advance(10)
    with pytest.raises(StorageError):
        await engine.remove("orders", ["0"])
    assert [item.message_id for item in await engine.dead_letters("orders")] == ["m"]
    assert [item.message_id for item in await engine.dead_letters("spent")] == ["p"]
    # After a kill, each message is either in its queue or a dead letter; none is lost.
    killed = await open_engine(SimulatedDisk(disk.files()), clock)
    await clock.advance(0)
    found = [item.id for item in await view(killed)]
    await killed.aclose()
    assert sorted(found) == ["0", "1", "2", "3", "m", "p"]

    disk.capacity = None
    await clock.advance(1)
    assert engine.storage.log.writer.deferred_records == 0
    files = disk.files()
    await engine.aclose()
    engine = await open_engine(SimulatedDisk(files), clock)
    assert {(item.id, item.dead) for item in await view(engine)} == {
        *((id, False) for id in "123"),
        ("m", True),
        ("p", True),
    }
    await engine.aclose()


async def test_compaction_keeps_a_message_whose_dead_letter_could_not_be_written(clock):
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock, segment_bytes=1_000)
    await engine.create("orders")
    for id in ("1", "2", "3", "4"):
        await engine.publish("orders", bytes(700), message_id=id)
    first, second = await engine.consume("orders"), await engine.consume("orders")
    assert first is not None
    assert second is not None
    await second.ack()
    disk.capacity = sum(map(len, disk.files().values())) + 900
    with pytest.raises(StorageError):
        await first.nack(requeue=False)
    with contextlib.suppress(StorageError, OSError):
        await engine.storage.maintain(rotate=False)
    files = disk.files()
    await engine.aclose()
    engine = await open_engine(SimulatedDisk(files), clock)
    found = {item.id for item in await view(engine)}
    await engine.aclose()
    assert found == {"1", "3", "4"}


async def test_consumers_on_a_full_disk_do_not_fill_the_memory(clock):
    """Each failed consume claims and releases a message; deferred records must not accumulate."""
    disk = SimulatedDisk()
    engine = await filled(disk, clock)
    disk.capacity = sum(map(len, disk.files().values()))
    for _ in range(200):
        with pytest.raises(StorageError):
            await engine.consume("orders")
    deferred = engine.storage.log.writer.deferred_records
    disk.capacity = None
    await clock.advance(1)
    delivery = await engine.consume("orders")
    assert delivery is not None
    assert (delivery.message_id, delivery.retry_count) == ("0", 0)
    await engine.aclose()
    assert deferred < 20


@pytest.mark.proves("002-compaction-12")
async def test_maintenance_on_a_full_disk_raises_storage_error(clock):
    disk = SimulatedDisk()
    engine = await filled(disk, clock, segment_bytes=300)
    await engine.storage.maintain()
    for _ in range(4):
        await engine.publish("orders", bytes(250))
    disk.capacity = sum(map(len, disk.files().values())) + 10
    try:
        with pytest.raises(StorageError):
            await engine.storage.maintain(rotate=False)
    finally:
        await engine.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_a_repeatedly_full_disk_loses_no_confirmed_message(clock, seed):
    print("seed", SEED + seed)
    random = Random(SEED + seed)
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock, segment_bytes=random.choice((400, 3000)))
    await engine.create("orders", max_retries=None)
    sent: set[str] = set()
    unconfirmed: set[str] = set()
    acked: set[str] = set()
    rejected = 0
    for number in range(300):
        if number % 20 == 0:
            used = sum(map(len, disk.files().values()))
            disk.capacity = None if number % 40 == 0 else used + random.randint(0, 300)
            disk.short = random.choice((None, None, 3, 50))
            await clock.advance(1)
        try:
            match random.randrange(5):
                case 0 | 1:
                    id = str(number)
                    unconfirmed.add(id)
                    await engine.publish("orders", bytes(random.randrange(60)), message_id=id)
                    unconfirmed.discard(id)
                    sent.add(id)
                case 2 | 3:
                    delivery = await engine.consume("orders", ack_deadline=1e6)
                    if delivery is not None:
                        id = delivery.message_id
                        if random.random() < 0.7:
                            acked.add(id)
                            await delivery.ack()
                        else:
                            await delivery.nack()
                case 4:
                    with contextlib.suppress(OSError):
                        await engine.storage.maintain(rotate=random.random() < 0.5)
        except StorageError:
            rejected += 1
            assert not engine.storage.log.read_only
    assert rejected
    disk.capacity = None
    await clock.advance(1)
    assert engine.storage.log.writer.deferred_records == 0
    files = disk.files()
    await engine.aclose()
    engine = await open_engine(SimulatedDisk(files), clock)
    found = {item.id for item in await view(engine)}
    await engine.aclose()
    # A rejected send stored nothing.
    assert found == sent - acked
    assert not found & unconfirmed


SMALL = """
import asyncio, os, sys
from pathlib import Path
from qkit.errors import ReadOnly, StorageError
from qkit.native import Engine

async def main() -> None:
    path = Path(sys.argv[1]) / "data"
    ballast = Path(sys.argv[1]) / "ballast"
    ballast.write_bytes(bytes(300_000))
    engine = await Engine.open(path)
    await engine.create("orders")
    sent, rejected = [], 0
    while rejected < 5:
        try:
            sent.append((await engine.publish("orders", os.urandom(3000))).message_id)
        except ReadOnly:
            raise
        except StorageError:
            rejected += 1
    assert sent
    acked = []
    try:
        while (delivery := await engine.consume("orders")) is not None:
            acked.append(delivery.message_id)
            await delivery.ack()
    except StorageError:
        pass
    ballast.unlink()
    deadline = asyncio.get_running_loop().time() + 10
    while engine.storage.log.writer.deferred_records:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    sent.append((await engine.publish("orders", b"after")).message_id)
    await engine.aclose()
    engine = await Engine.open(path)
    found = [item.id for item in await engine.peek("orders", 10_000)]
    assert found == [id for id in sent if id not in acked], (len(found), len(sent), len(acked))
    await engine.aclose()
    print("sent", len(sent), "rejected", rejected, "acked", len(acked))

asyncio.run(main())
"""


def test_a_full_disk_on_a_real_tmpfs_loses_no_confirmed_message(tmp_path):
    """Fill a real file system, if the machine allows mounting one."""
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    root = tmp_path / "mounted"
    root.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {root}"
    allowed = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False
    )
    if allowed.returncode:
        pytest.skip("cannot mount a file system here; the simulated disk covers the same cases")
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} {script} {root}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr
