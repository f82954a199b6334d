"""Compaction and snapshots do not change the state that recovery restores."""

from __future__ import annotations

from random import Random

import pytest

from qkit.message import Envelope
from qkit.native import Engine
from qkit.native.storage.storage import Storage
from qkit.testing import VirtualClock
from tests.support.disk import SimulatedDisk

SEED = 20261116
QUEUES = ("a", "b", "a_dlq")


async def open_storage_engine(
    disk: SimulatedDisk, clock: VirtualClock, **options: object
) -> Engine:
    engine = Engine(clock=clock)
    values: dict[str, object] = {"segment_bytes": 2_000, "memory_limit": 500} | options
    await engine.attach(Storage(disk, clock=clock, **values))  # type: ignore[arg-type]  # values of several types
    return engine


async def contents(engine: Engine) -> dict[str, list[Envelope]]:
    """Release all leases and return the messages of each queue, as after a restart."""
    for actor in engine.catalogue.all_actors():
        for message in list(actor.state.leases):
            actor.release(message.state)
    return {
        name: sorted(
            await engine.peek(name, 10_000),
            key=lambda item: (item.id, item.headers.get("qkit-group", "")),
        )
        for name in await engine.list()
    }


async def history(engine: Engine, random: Random, steps: int) -> None:
    """Run random steps on three queues and a topic with two groups."""
    names = await engine.list()
    if "a" not in names:
        await engine.create("a", max_retries=2)
        await engine.create("b", max_retries=None, dead_letter=False)
        await engine.create("topic", broadcast=True)
    held = []
    for step in range(steps):
        match random.randrange(12):
            case 0 | 1 | 2 | 3:
                body = random.randbytes(random.choice((3, 20, 90)))
                await engine.publish(
                    random.choice("ab"),
                    body,
                    priority=random.randrange(10),
                    delay=random.choice((None, None, 5.0)),
                    headers=random.choice((None, {"x": str(step)})),
                    key=random.choice((None, "k")),
                )
            case 4:
                await engine.publish("topic", b"for all %d" % step)
            case 5 | 6:
                found = await engine.consume(random.choice("ab"))
                if found:
                    held.append(found)
            case 7:
                found = await engine.consume("topic", group=random.choice(("g", "h")))
                if found:
                    held.append(found)
            case 8 | 9 if held:
                await held.pop(random.randrange(len(held))).ack()
            case 10 if held:
                await held.pop(random.randrange(len(held))).nack(random.random() < 0.7)
            case 11:
                await rare_step(engine, random.random())
            case _:
                pass


async def rare_step(engine: Engine, chance: float) -> None:
    if chance < 0.05:
        await engine.purge("b")
    elif chance < 0.1 and "spare" in await engine.list():
        await engine.delete("spare")
    elif chance < 0.2:
        await engine.create("spare")
        await engine.publish("spare", b"deleted soon")


def without_snapshots(disk: SimulatedDisk) -> SimulatedDisk:
    return SimulatedDisk({n: data for n, data in disk.files().items() if ".snap" not in n})


@pytest.mark.proves("002-hybrid-7", "002-compaction-1", "002-compaction-2", "002-summary-1")
@pytest.mark.parametrize("number", range(12))
async def test_a_compacted_log_recovers_the_state_of_the_engine(number: int) -> None:
    print("seed", SEED, number)
    random = Random(SEED + number)
    with VirtualClock() as clock:
        disk = SimulatedDisk()
        engine = await open_storage_engine(disk, clock)
        before = 0
        for _ in range(6):
            await history(engine, random, random.choice((20, 60, 150)))
            if random.random() < 0.7:
                before = sum(map(len, disk.files().values()))
                await engine.storage.maintain(rotate=random.random() < 0.5)
            if random.random() < 0.3:
                await engine.aclose()
                engine = await open_storage_engine(disk, clock)
        if random.random() < 0.5:
            await engine.storage.maintain()
        expected = await contents(engine)
        await engine.aclose()
        for copy in (SimulatedDisk(disk.files()), without_snapshots(disk)):
            again = await open_storage_engine(copy, clock)
            assert await contents(again) == expected
            assert not again.storage.damage
            await again.aclose()
        assert before


@pytest.mark.proves("002-compaction-2", "002-compaction-6", "002-compaction-7", "002-compaction-13")
async def test_compaction_removes_settled_messages_from_the_disk(disk: SimulatedDisk) -> None:
    with VirtualClock() as clock:
        engine = await open_storage_engine(disk, clock)
        await engine.create("a")
        for _ in range(200):
            await engine.publish("a", bytes(100))
        full = sum(map(len, disk.files().values()))
        for _ in range(200):
            delivery = await engine.consume("a")
            assert delivery is not None
            await delivery.ack()
        await engine.storage.maintain()
        await engine.storage.maintain()
        assert sum(map(len, disk.files().values())) < full / 10
        await engine.publish("a", b"last")
        await engine.aclose()
        engine = await open_storage_engine(SimulatedDisk(disk.files()), clock)
        assert [item.body for item in await engine.peek("a", 10)] == [b"last"]
        await engine.aclose()


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()
