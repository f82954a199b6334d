"""Bodies above ``memory_limit`` stay on disk and are read when they are needed."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import tracemalloc
from random import Random
from typing import Any

import pytest

from qkit.native import Engine
from qkit.native.delivery import Delivery
from qkit.native.log.log import Log
from tests.support.crash_model import body_of
from tests.support.disk import SimulatedDisk
from tests.support.engines import held_bytes, open_engine
from tests.support.waiting import eventually

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))
LIMIT = 5_000


def body(number: int) -> bytes:
    return b"%06d" % number * 30


async def fill(engine: Engine, count: int, queue: str = "orders") -> None:
    await asyncio.gather(
        *(engine.publish(queue, body(number), message_id=str(number)) for number in range(count))
    )


async def take(engine: Engine, queue: str = "orders", **options: Any) -> Delivery:
    delivery = await engine.consume(queue, **options)
    assert delivery is not None
    assert delivery.body == body(int(delivery.message_id))
    return delivery


@pytest.mark.proves(
    "002-hybrid-2", "002-hybrid-5", "002-compaction-11", "002-performance-6", "002-testing-11"
)
@pytest.mark.parametrize("limit", [0, LIMIT, 1 << 30])
async def test_a_queue_larger_than_the_memory_limit_delivers_all_bodies(tmp_path, limit):
    """Use a real directory with several segments, consumers and concurrent compaction."""
    engine = await open_engine(tmp_path, memory_limit=limit, segment_bytes=20_000, fsync="never")
    await engine.create("orders")
    await fill(engine, 600)
    assert held_bytes(engine) == min(600 * 180, limit // 180 * 180)
    in_flight = 0

    async def consumer() -> None:
        nonlocal in_flight
        while (delivery := await engine.consume("orders")) is not None:
            in_flight += 1
            assert delivery.body == body(int(delivery.message_id))
            assert held_bytes(engine) <= limit + 180 * 8
            await delivery.ack()
            in_flight -= 1

    async def maintain() -> None:
        for _ in range(5):
            await engine.storage.maintain()
            await asyncio.sleep(0.001)

    await asyncio.gather(*(consumer() for _ in range(8)), maintain())
    assert held_bytes(engine) == 0
    await engine.aclose()


@pytest.mark.proves("002-index-3", "002-hybrid-4")
@pytest.mark.parametrize("maintain", [False, True])
@pytest.mark.parametrize("limit", [0, LIMIT, 1 << 30])
async def test_a_queue_larger_than_the_memory_limit_can_be_reopened(clock, limit, maintain):
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock, memory_limit=limit, segment_bytes=20_000)
    await engine.create("orders")
    await fill(engine, 300)
    for _ in range(50):
        await (await take(engine)).ack()
    if maintain:
        await engine.storage.maintain()
    await engine.aclose()
    engine = await open_engine(
        SimulatedDisk(disk.files()), clock, memory_limit=limit, segment_bytes=20_000
    )
    assert held_bytes(engine) <= limit
    assert [item.body for item in await engine.peek("orders", 1000)] == [
        body(number) for number in range(50, 300)
    ]
    assert held_bytes(engine) <= limit  # peek keeps no body in memory
    for number in range(50, 300):
        delivery = await take(engine)
        assert delivery.message_id == str(number)
        assert held_bytes(engine) <= limit + 180
        await delivery.ack()
    assert held_bytes(engine) == 0
    await engine.aclose()


async def test_bodies_of_released_messages_above_the_limit_are_removed_from_memory(clock):
    engine = await open_engine(SimulatedDisk(), clock, memory_limit=LIMIT)
    await engine.create("orders", max_retries=None)
    await fill(engine, 100)
    deliveries = [await take(engine) for _ in range(100)]
    assert held_bytes(engine) == 100 * 180
    for delivery in deliveries:
        await delivery.nack()
    assert held_bytes(engine) <= LIMIT
    deliveries = [await take(engine, ack_deadline=5) for _ in range(100)]
    await clock.advance(6)
    again = [await take(engine) for _ in range(100)]
    assert [item.retry_count for item in again] == [2] * 100
    for delivery in again:
        await delivery.ack()
    assert held_bytes(engine) == 0
    await engine.aclose()


async def test_bodies_of_messages_with_expired_leases_above_the_limit_are_removed_from_memory(
    clock,
):
    engine = await open_engine(SimulatedDisk(), clock, memory_limit=LIMIT)
    await engine.create("orders", max_retries=None)
    await fill(engine, 100)
    for _ in range(100):
        await take(engine, ack_deadline=5)
    await clock.advance(6)
    await engine.written()
    held = held_bytes(engine)
    await engine.aclose()
    assert held <= LIMIT


async def test_dead_letters_stay_within_the_memory_limit(clock):
    engine = await open_engine(SimulatedDisk(), clock, memory_limit=LIMIT)
    await engine.create("orders")
    for number in range(100):
        await engine.publish("orders", body(number), ttl=5, message_id=str(number))
    await clock.advance(6)
    await engine.written()
    letters = await engine.dead_letters("orders")
    assert [letter.body for letter in letters] == [body(number) for number in range(100)]
    held = held_bytes(engine)
    await engine.aclose()
    assert held <= LIMIT


async def test_every_removal_frees_memory(clock):
    engine = await open_engine(SimulatedDisk(), clock, memory_limit=LIMIT)
    await engine.create("orders", max_retries=0)
    await engine.create("news", broadcast=True)
    for group in ("a", "b"):
        assert await engine.consume("news", group=group) is None
    for _ in range(2):
        await fill(engine, 40)
        await fill(engine, 20, "news")
        await (await take(engine)).ack()
        await (await take(engine)).nack()
        await (await take(engine)).nack(requeue=False)
        await take(engine, ack_deadline=5)
        await (await take(engine, "news", group="a")).ack()
        for delay in (1, 100):
            await engine.publish("orders", body(50), delay=delay, ttl=delay + 2, message_id="50")
        await clock.advance(10)
        assert await engine.remove("orders", ["20", "21", "nothing"]) == 2
        await engine.retry_dead_letters("orders")
        await engine.purge("orders")
        await engine.purge("news")
        await engine.purge_dead_letters("orders")
        await engine.written()
        assert held_bytes(engine) == 0
    await fill(engine, 40)
    await engine.delete("orders")
    await fill(engine, 10, "news")
    await engine.delete("news")
    assert held_bytes(engine) == 0
    assert sum(segment.live for segment in engine.storage.journal.index) == 0
    await engine.aclose()


@pytest.mark.proves("002-performance-8", "002-improvements-1")
async def test_a_lease_that_expires_during_a_read_loses_no_message(tmp_path):
    engine = await open_engine(tmp_path, memory_limit=0)
    await engine.create("orders")
    await fill(engine, 1)
    journal = engine.storage.journal
    load, gate, first = journal.load, threading.Event(), True

    def slow(messages: Any) -> Any:
        nonlocal first
        if first:
            first = False
            assert gate.wait(60)
        return load(messages)

    journal.load = slow  # type: ignore[method-assign]
    late = asyncio.ensure_future(engine.consume("orders", ack_deadline=0.02))
    await asyncio.sleep(0)
    delivery = await engine.consume("orders", timeout=10)
    gate.set()
    await asyncio.wait([late])
    assert delivery is not None
    assert delivery.body == body(0)
    await delivery.ack()
    held = held_bytes(engine)
    await engine.aclose()
    assert held == 0


async def test_a_consumer_cancelled_during_a_read_loses_no_message(tmp_path):
    print("seed", SEED)
    random = Random(SEED)
    engine = await open_engine(tmp_path, memory_limit=0, fsync="never")
    await engine.create("orders", max_retries=None)
    await fill(engine, 50)
    for _ in range(300):
        work = asyncio.ensure_future(engine.consume("orders"))
        await asyncio.sleep(random.choice((0, 0, 0.0001, 0.0003)))
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            delivery = work.result()
            assert delivery is not None
            await delivery.nack()
    assert held_bytes(engine) == 0
    assert (await engine.stats("orders")).depth == 50
    found = [await take(engine) for _ in range(50)]
    assert {delivery.message_id for delivery in found} == {str(number) for number in range(50)}
    await engine.aclose()


@pytest.mark.proves("002-performance-6", "002-place-2", "002-place-5")
async def test_process_memory_stays_within_the_limit(tmp_path):
    size, count, limit = 20_000, 1_000, 1 << 20
    engine = await open_engine(tmp_path, memory_limit=limit, fsync="never")
    await engine.create("orders")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(count):
            await engine.publish("orders", os.urandom(size), message_id=str(number))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < limit + count * 700
        for _ in range(count):
            delivery = await engine.consume("orders")
            assert delivery is not None
            assert len(delivery.body) == size
            await delivery.ack()
        del delivery
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()
    await engine.aclose()


@pytest.mark.proves("002-compaction-4")
async def test_bodies_are_correct_during_compaction(clock):
    print("seed", SEED)
    random = Random(SEED)
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock, memory_limit=0, segment_bytes=2_000)
    await engine.create("orders", max_retries=None)
    alive: set[str] = set()
    for number in range(400):
        id = str(number)
        await engine.publish("orders", body_of(id), random.randrange(10), message_id=id)
        alive.add(id)
        while random.random() < 0.45:
            delivery = await engine.consume("orders")
            if delivery is None:
                break
            assert delivery.body == body_of(delivery.message_id)
            if random.random() < 0.8:
                await delivery.ack()
                alive.discard(delivery.message_id)
            else:
                await delivery.nack(requeue=random.random() < 0.8)
        if random.random() < 0.1:
            await engine.storage.maintain(rotate=random.random() < 0.5)
            letters = await engine.dead_letters("orders")
            found = {item.id: item.body for item in await engine.peek("orders", 1000)}
            found |= {letter.message_id: letter.body for letter in letters}
            assert found == {id: body_of(id) for id in alive}
        if random.random() < 0.03:
            await engine.aclose()
            disk = SimulatedDisk(disk.files())
            engine = await open_engine(disk, clock, memory_limit=0, segment_bytes=2_000)
    await engine.storage.maintain()
    size = sum(map(len, disk.files().values()))
    live = sum(len(body_of(id)) for id in alive)
    print(f"{len(alive)} messages of {live} bytes in {size} bytes of files")
    await engine.aclose()


async def test_bodies_are_never_read_in_the_event_loop(tmp_path, monkeypatch):
    """Neither by peek and dead_letters, nor for messages that expire or are dropped."""
    readers: set[int] = set()
    read = Log.read

    def recorded(self: Log, segment: int, offset: int) -> bytes:
        readers.add(threading.get_ident())
        return read(self, segment, offset)

    monkeypatch.setattr(Log, "read", recorded)
    dropped: list[bytes] = []
    async with await Engine.open(tmp_path, memory_limit=0, fsync="never") as engine:
        engine.on_dropped_letter(lambda letter: dropped.append(letter.body))
        await engine.create("orders", dead_letter_max_depth=2)
        for number in range(4):
            await engine.publish("orders", body(number), ttl=0.2)
        assert [item.body for item in await engine.peek("orders", 10)] == [*map(body, range(4))]

        async def last_two_are_dead_letters() -> bool:
            letters = await engine.dead_letters("orders")
            return [letter.body for letter in letters] == [body(2), body(3)]

        await eventually(last_two_are_dead_letters)
        await eventually(lambda: dropped == [body(0), body(1)])
        assert (await engine.stats("orders")).dead_lettered_total == 4
    assert readers
    assert threading.get_ident() not in readers
    async with await Engine.open(tmp_path) as engine:
        assert [letter.body for letter in await engine.dead_letters("orders")] == [body(2), body(3)]
