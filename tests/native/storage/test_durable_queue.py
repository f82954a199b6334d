"""State of a durable engine after a restart or a crash."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qkit import consume
from qkit.backends.native.backend import NativeBackend
from qkit.errors import (
    ConfigError,
    InvalidName,
    LifecycleError,
    LogDamaged,
    QueueFull,
    Unsupported,
)
from qkit.message import GROUP, Envelope, Sent
from qkit.native import Engine
from qkit.native.config import QueueConfig
from qkit.native.delivery import Delivery
from qkit.native.log.disk import Disk
from qkit.native.log.segment import name_of
from qkit.native.storage.storage import Storage
from qkit.testing import VirtualClock
from tests.support.disk import SimulatedDisk
from tests.support.engines import open_engine, view
from tests.support.services import make_service


class ReopenableEngine:
    """An engine on a simulated disk that can be closed or killed, and reopened."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.disk = SimulatedDisk()
        self.engine: Engine | None = None
        self.options: dict[str, Any] = {}

    async def open(self, **options: Any) -> Engine:
        assert self.engine is None
        self.options |= options
        self.engine = await open_engine(self.disk, self.clock, **self.options)
        return self.engine

    async def reopen(
        self, *, kill: bool = False, maintain: bool = False, down: float = 0
    ) -> Engine:
        assert self.engine is not None
        if maintain:
            await self.engine.storage.maintain()
        files = self.disk.files()
        await self.engine.aclose()
        self.disk = SimulatedDisk(files if kill else self.disk.files())
        self.engine = None
        self.clock.jump(down)
        return await self.open()

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.aclose()


@pytest.fixture
async def store(clock):
    store = ReopenableEngine(clock)
    yield store
    await store.close()


async def take(engine: Engine, queue: str, **options: Any) -> Delivery:
    delivery = await engine.consume(queue, **options)
    assert delivery is not None
    return delivery


STOPS = [
    pytest.param({"kill": False}, id="closed"),
    pytest.param({"kill": True}, id="killed"),
    pytest.param({"kill": False, "maintain": True}, id="compacted"),
    pytest.param({"kill": True, "maintain": True}, id="compacted-killed"),
]
stops = pytest.mark.parametrize("stop", STOPS)


@pytest.mark.proves("002-log-6", "002-hybrid-3", "002-testing-9")
async def test_a_reopened_message_keeps_all_its_fields(tmp_path: Path):
    """Use a real directory, the real clock and a writer thread."""
    async with await Engine.open(tmp_path / "data") as engine:
        await engine.create("orders")
        sent = await engine.publish(
            "orders", b"\0one\xff", 8, headers={"tenant": "acmé\r\n"}, key="k", message_id="id-1"
        )
        assert sent == ("id-1", 0)
        assert engine.durable
    async with await Engine.open(tmp_path / "data") as engine:
        delivery = await take(engine, "orders")
        assert (delivery.message_id, delivery.body, delivery.priority, delivery.key) == (
            "id-1",
            b"\0one\xff",
            8,
            "k",
        )
        assert delivery.headers == {"tenant": "acmé\r\n"}
        await delivery.ack()
    async with await Engine.open(tmp_path / "data") as engine:
        assert await engine.consume("orders") is None


@pytest.mark.proves("002-hybrid-4")
@stops
async def test_order_within_a_priority_is_kept(store, stop):
    engine = await store.open(segment_bytes=500)
    await engine.create("orders")
    for number in range(40):
        await engine.publish("orders", b"x" * 30, number % 3, message_id=f"{number:02}")
    before = [item.id for item in await engine.peek("orders", 100)]
    engine = await store.reopen(**stop)

    found = [(await take(engine, "orders")).message_id for _ in range(40)]
    assert found == before == sorted(before, key=lambda id: (-(int(id) % 3), id))


@pytest.mark.proves("002-delivery-2", "002-delivery-5")
@stops
async def test_messages_in_flight_are_redelivered_immediately_and_keep_their_attempts(store, stop):
    engine = await store.open()
    await engine.create("orders")
    await engine.publish("orders", b"one", message_id="1")
    await engine.publish("orders", b"two", message_id="2")
    held = await take(engine, "orders", ack_deadline=3600)
    engine = await store.reopen(**stop)

    assert (await engine.stats("orders")).in_flight == 0
    again = await take(engine, "orders")
    assert (again.message_id, again.retry_count, again.body) == ("1", 1, b"one")
    assert (await take(engine, "orders")).retry_count == 0
    with pytest.raises(LifecycleError):  # a delivery of the closed engine
        await held.ack()
    await again.ack()
    assert (await engine.stats("orders")).in_flight == 1


@pytest.mark.proves("002-log-9", "002-delivery-3", "002-delivery-6")
@stops
async def test_settled_messages_stay_settled(store, stop):
    engine = await store.open(segment_bytes=300)
    await engine.create("orders")
    for number in range(10):
        await engine.publish("orders", bytes(50), message_id=str(number))
    for _ in range(5):
        await (await take(engine, "orders")).ack()
    assert await engine.remove("orders", ["7", "8"]) == 2
    engine = await store.reopen(**stop)
    assert [item.id for item in await engine.peek("orders", 100)] == ["5", "6", "9"]
    assert await engine.purge("orders") == 3
    engine = await store.reopen(**stop)
    assert await engine.peek("orders", 100) == []


@pytest.mark.proves("002-log-11")
@stops
async def test_the_last_allowed_delivery_is_dead_lettered_only_after_a_crash(store, stop):
    engine = await store.open()
    await engine.create("orders", max_retries=1)
    await engine.publish("orders", b"poison", message_id="1")
    await (await take(engine, "orders")).nack()
    assert (await take(engine, "orders")).retry_count == 1
    letters: list[Any] = []
    engine = await store.reopen(**stop)
    engine.on_dead_letter(letters.append)

    if stop["kill"]:
        assert await engine.consume("orders") is None
        (letter,) = await engine.dead_letters("orders")
        assert (letter.message_id, letter.reason, letter.attempts, letter.body) == (
            "1",
            "MaxRetriesExceeded",
            2,
            b"poison",
        )
        engine = await store.reopen(**stop)
        assert len(await engine.dead_letters("orders")) == 1
    else:
        assert (await take(engine, "orders")).retry_count == 2


@pytest.mark.proves("002-delivery-2")
@stops
async def test_each_restart_during_a_delivery_counts_as_one_attempt(store, stop):
    engine = await store.open()
    await engine.create("orders", max_retries=2)
    await engine.publish("orders", b"poison")
    for retry in range(2):
        assert (await take(engine, "orders")).retry_count == retry
        engine = await store.reopen(**stop)
    assert (await take(engine, "orders")).retry_count == 2


@stops
async def test_a_delay_passes_while_the_engine_is_closed(store, clock, stop):
    engine = await store.open()
    await engine.create("orders")
    for delay in (10, 20, 30):
        await engine.publish("orders", b"", delay=delay, message_id=str(delay))
    engine = await store.reopen(**stop, down=15)

    stats = await engine.stats("orders")
    assert (stats.depth, stats.scheduled) == (1, 2)
    assert (await take(engine, "orders")).message_id == "10"
    assert await engine.consume("orders", timeout=4.9) is None
    assert (await take(engine, "orders", timeout=0.2)).message_id == "20"
    assert (await take(engine, "orders", timeout=11)).message_id == "30"


@pytest.mark.proves("002-log-10")
@stops
async def test_a_backoff_passes_while_the_engine_is_closed(store, stop):
    engine = await store.open()
    await engine.create("orders", backoff=10)
    await engine.publish("orders", b"")
    await (await take(engine, "orders")).nack()
    engine = await store.reopen(**stop, down=5)
    assert await engine.consume("orders", timeout=4.9) is None
    assert (await take(engine, "orders", timeout=0.2)).retry_count == 1


@stops
async def test_a_ttl_passes_while_the_engine_is_closed(store, clock, stop):
    engine = await store.open()
    await engine.create("orders")
    for ttl in (10, 20, 3600):
        await engine.publish("orders", b"%d" % ttl, ttl=ttl, message_id=str(ttl))
    await engine.publish("orders", b"", delay=12, ttl=14, message_id="late")
    engine = await store.reopen(**stop, down=15)

    await clock.advance(0)
    letters = await engine.dead_letters("orders")
    assert {(item.message_id, item.reason) for item in letters} == {
        ("10", "TTLExpired"),
        ("late", "TTLExpired"),
    }
    assert [item.id for item in await engine.peek("orders", 9)] == ["20", "3600"]
    await clock.advance(6)
    assert [item.id for item in await engine.peek("orders", 9)] == ["3600"]
    assert len(await engine.dead_letters("orders")) == 3


@pytest.mark.proves("002-log-11")
@stops
async def test_dead_letters_keep_their_fields_and_can_be_replayed(store, clock, stop):
    engine = await store.open()
    await engine.create("orders")
    await engine.publish("orders", b"one", 7, headers={"a": "b"}, key="k", message_id="1")
    await (await take(engine, "orders")).nack()
    await clock.advance(5)
    await (await take(engine, "orders")).nack(requeue=False)
    (before,) = await engine.dead_letters("orders")
    engine = await store.reopen(**stop)

    assert await engine.dead_letters("orders") == [before]
    assert (before.attempts, before.reason, before.priority) == (2, "ExplicitNack", 7)
    assert await engine.retry_dead_letters("orders") == 1
    engine = await store.reopen(**stop)
    assert await engine.dead_letters("orders") == []
    again = await take(engine, "orders")
    assert (again.message_id, again.retry_count, again.priority, again.key) == ("1", 0, 7, "k")
    assert (again.body, again.headers) == (b"one", {"a": "b"})


@stops
async def test_a_group_declared_between_two_concurrent_sends_receives_only_the_second(store, stop):
    engine = await store.open()
    await engine.create("news", broadcast=True)
    assert await engine.consume("news", group="a") is None

    async def declare_and_publish() -> None:
        engine.queue("news", "test", "b")
        await engine.publish("news", b"2", message_id="2")

    await asyncio.gather(engine.publish("news", b"1", message_id="1"), declare_and_publish())

    engine = await store.reopen(**stop)
    assert [(item.group, item.id) for item in await view(engine)] == [
        ("a", "1"),
        ("a", "2"),
        ("b", "2"),
    ]


@stops
async def test_every_group_of_a_topic_keeps_its_own_messages(store, stop):
    engine = await store.open()
    await engine.create("news", broadcast=True)
    await engine.publish("news", b"before any group", message_id="0")
    for group in ("a", "b"):
        assert await engine.consume("news", group=group) is None
    await engine.publish("news", b"one", message_id="1")
    await engine.publish("news", b"two", message_id="2")
    await (await take(engine, "news", group="a")).ack()
    await (await take(engine, "news", group="b")).nack(requeue=False)
    engine = await store.reopen(**stop)

    assert [(item.group, item.id, item.dead) for item in await view(engine)] == [
        ("a", "2", False),
        ("b", "2", False),
        ("b", "1", True),
    ]
    await engine.publish("news", b"three", message_id="3")
    assert [(await take(engine, "news", group="b")).message_id for _ in "23"] == ["2", "3"]
    assert await engine.consume("news", group="c") is None  # receives only later messages
    assert await engine.retry_dead_letters("news") == 1
    engine = await store.reopen(**stop)
    assert {item.id for item in await engine.peek("news", 99) if item.headers[GROUP] == "b"} == {
        "1",
        "2",
        "3",
    }
    with pytest.raises(Unsupported):
        await engine.consume("news")


@stops
async def test_a_queue_keeps_its_options(store, clock, stop):
    engine = await store.open()
    options: dict[str, Any] = {
        "max_depth": 2,
        "max_priority": 3,
        "max_retries": 0,
        "ack_deadline": 5,
        "dead_letter_max_depth": 1,
        "backoff": 1,
        "balance": "least_busy",
    }
    await engine.create("orders", **options)
    await engine.create("empty", dead_letter=False)
    engine = await store.reopen(**stop)

    assert await engine.list() == ["empty", "orders"]
    await engine.publish("orders", b"1", message_id="1")
    await engine.publish("orders", b"2", message_id="2")
    with pytest.raises(QueueFull):
        await engine.publish("orders", b"3")
    await take(engine, "orders")
    await take(engine, "orders")
    await clock.advance(6)
    assert [item.message_id for item in await engine.dead_letters("orders")] == ["2"]
    # A new declaration replaces the stored options, but a queue cannot become a topic.
    await engine.create("orders", **{**options, "max_depth": 7})
    with pytest.raises(ConfigError):
        await engine.create("empty", broadcast=True)
    engine = await store.reopen(**stop)
    assert engine.catalogue.find("orders", "look").config.max_depth == 7
    assert engine.catalogue.find("empty", "look").config.dead_letter is None


@stops
async def test_counters_restart_at_zero(store, stop):
    engine = await store.open()
    await engine.create("orders")
    for _ in range(3):
        await engine.publish("orders", b"")
    await (await take(engine, "orders")).ack()
    await take(engine, "orders")
    engine = await store.reopen(**stop)

    stats = await engine.stats("orders")
    totals = stats.published_total, stats.consumed_total, stats.acked_total, stats.nacked_total
    assert totals == (0, 0, 0, 0)
    assert stats.depth == 2
    assert stats.oldest_message_age_secs == 0


@pytest.mark.proves("002-log-8")
async def test_the_age_of_a_reopened_message_counts_from_its_send(store):
    engine = await store.open()
    await engine.create("orders")
    await engine.publish("orders", b"")
    engine = await store.reopen(down=100)
    assert (await engine.stats("orders")).oldest_message_age_secs == pytest.approx(100)


@stops
async def test_a_deleted_and_recreated_queue_is_empty(store, stop):
    engine = await store.open(segment_bytes=300)
    await engine.create("orders")
    for number in range(5):
        await engine.publish("orders", b"old" * 20, message_id=str(number))
    await (await take(engine, "orders")).nack(requeue=False)
    held = await take(engine, "orders")
    await engine.delete("orders")
    await engine.create("orders")
    await engine.publish("orders", b"new", message_id="new")
    engine = await store.reopen(**stop)

    assert [item.id for item in await engine.peek("orders", 9)] == ["new"]
    assert [item.message_id for item in await engine.dead_letters("orders")] == ["0"]
    await engine.delete("orders")
    engine = await store.reopen(**stop)
    assert await engine.list() == ["orders_dlq"]
    assert held.message_id == "1"


async def test_settling_a_delivery_of_a_deleted_queue_has_no_effect(store):
    engine = await store.open()
    await engine.create("orders")
    await engine.create("others")
    await engine.publish("orders", b"x" * 100)
    await engine.publish("others", b"y" * 10)
    held = await take(engine, "orders")
    await engine.delete("orders")
    await held.ack()
    assert engine.storage.journal.held == 10
    engine = await store.reopen(kill=True)
    assert [item.body for item in await view(engine)] == [b"y" * 10]


async def test_a_message_sent_while_its_queue_is_deleted_leaves_no_data(tmp_path):
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        send = asyncio.ensure_future(engine.publish("orders", b"x" * 100))
        await asyncio.sleep(0)
        await engine.delete("orders")
        await asyncio.wait([send])
        journal = engine.storage.journal
        assert journal.held == 0
        assert sum(segment.live for segment in journal.index) == 0


class GatedDisk(Disk):
    """A disk whose writes block until a gate is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.written = 0

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self.waiting.set()
        assert self.gate.wait(60)
        self.written += 1
        return super().write(fd, data, offset)


async def test_two_concurrent_creates_both_wait_until_the_queue_is_written(tmp_path):
    """The second call writes nothing, but must wait for the first call's record."""
    disk = GatedDisk(tmp_path)
    engine = Engine()
    await engine.attach(Storage(disk, clock=engine.clock))
    await engine.create("warm")
    disk.waiting.clear()
    disk.gate.clear()
    first = asyncio.ensure_future(engine.create("orders"))
    await asyncio.to_thread(disk.waiting.wait, 10)
    second = asyncio.ensure_future(engine.create("orders"))
    await asyncio.wait([second], timeout=0.1)
    early = second.done()
    disk.gate.set()
    await asyncio.gather(first, second)
    await engine.aclose()
    assert not early


async def test_a_closed_engine_rejects_all_calls(store):
    engine = await store.open()
    await engine.create("orders")
    await store.reopen()
    for work in (
        engine.publish("orders", b""),
        engine.consume("orders"),
        engine.create("other"),
        engine.peek("orders"),
    ):
        with pytest.raises(LifecycleError, match="closed"):
            await work


async def test_a_failed_open_unlocks_the_directory(tmp_path):
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders")
        for number in range(3):
            await engine.publish("orders", b"one" * 9, message_id=str(number))
    segment = tmp_path / "log" / name_of(1)
    data = bytearray(segment.read_bytes())
    data[data.index(b"one" * 9) + 1] ^= 1
    segment.write_bytes(data)
    for _ in range(2):
        with pytest.raises(LogDamaged):
            await Engine.open(tmp_path)
    async with await Engine.open(tmp_path, repair=True) as engine:
        assert [item.id for item in await engine.peek("orders", 9)] == ["1", "2"]
        assert [item.kind for item in engine.storage.damage] == ["damaged"]


@pytest.mark.proves("002-compaction-1", "002-compaction-7")
@pytest.mark.parametrize("kill", [False, True])
async def test_compaction_keeps_the_state_of_live_messages(store, clock, kill):
    """Deliveries, backoffs, dead letters and removals survive a rewrite of their segments."""
    engine = await store.open(segment_bytes=600)
    await engine.create("orders", backoff=100, max_backoff=1000, max_retries=2)

    async def publish_and_ack() -> None:
        """Publish and ack ten messages, then compact the log."""
        for _ in range(10):
            await engine.publish("orders", bytes(100), 9)
        for _ in range(10):
            await (await take(engine, "orders")).ack()
        await engine.storage.maintain(rotate=False)

    for id in ("backoff", "dead", "removed", "held", "fresh"):
        await engine.publish("orders", id.encode() * 5, 5, message_id=id)
        await publish_and_ack()
    await (await take(engine, "orders")).nack()
    await publish_and_ack()
    await (await take(engine, "orders")).nack(requeue=False)
    await publish_and_ack()
    await engine.remove("orders", ["removed"])
    await publish_and_ack()
    assert (await take(engine, "orders", ack_deadline=1000)).message_id == "held"
    await publish_and_ack()
    before = len(store.disk.files())
    for _ in range(3):
        await publish_and_ack()
    assert len(store.disk.files()) < before + 5
    engine = await store.reopen(kill=kill)

    found = {(item.id, item.attempt, item.dead) for item in await view(engine)}
    assert found == {
        ("backoff", 1, False),
        ("dead", 1, True),
        ("held", 1, False),
        ("fresh", 0, False),
    }
    stats = await engine.stats("orders")
    assert (stats.depth, stats.scheduled) == (2, 1)
    await clock.advance(101)
    assert (await engine.stats("orders")).depth == 3


# Services


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "blocks"])
async def test_a_handler_that_runs_longer_than_ten_leases_runs_once(tmp_path, how):
    """Use the real clock and a second service, which would receive a redelivery."""
    engine = await Engine.open(tmp_path)
    runs: list[int] = []

    @consume("jobs", ack_deadline=0.1)
    async def handle(number: int) -> None:
        runs.append(number)
        if how == "waits":
            await asyncio.sleep(1.2)
        else:
            for _ in range(3):
                time.sleep(0.4)  # noqa: ASYNC251  blocking is the point of the test
                await asyncio.sleep(0)

    services = [make_service(handle, backend=NativeBackend(engine=engine)) for _ in range(2)]
    for service in services:
        await service.start()
    await services[0].send("jobs", 1)
    await asyncio.sleep(1.6)
    for service in services:
        await service.shutdown()
    stats = await engine.stats("jobs")
    assert runs == [1]
    assert (stats.acked_total, stats.consumed_total, stats.depth) == (1, 1, 0)
    await engine.aclose()
    async with await Engine.open(tmp_path) as engine:
        assert await view(engine) == []


async def test_a_limit_lowered_during_a_write_does_not_reject_the_message(tmp_path):
    async with await Engine.open(tmp_path) as engine:
        await engine.create("orders", max_priority=9, max_depth=2)
        sends = [asyncio.ensure_future(engine.publish("orders", b"", 9)) for _ in range(2)]
        await asyncio.sleep(0)
        engine.catalogue.declare("orders", {"max_priority": 3, "max_depth": 1})
        for send in sends:
            await asyncio.wait_for(send, 60)
        assert (await engine.stats("orders")).depth == 2
        with pytest.raises(QueueFull):
            await engine.publish("orders", b"")


def limits(engine: Engine, name: str) -> tuple[int, int, float, int | None, str | None]:
    config = engine.catalogue.find(name, "test").config
    return (
        config.max_depth,
        config.max_priority,
        config.ack_deadline,
        config.max_deliveries,
        config.dead_letter,
    )


async def test_undeclared_fields_follow_the_settings_of_the_owner(tmp_path):
    async with await Engine.open(tmp_path) as engine:
        engine.catalogue.declare("plain", {}, defaults={"dead_letter": "plain_dlq"})
        engine.catalogue.declare("named", {"max_priority": 9, "max_deliveries": 4})
        engine.catalogue.declare("none", {"dead_letter": None, "ack_deadline": 30.0})
        await engine.create("own", max_depth=7, max_retries=None)
        assert limits(engine, "plain") == (100_000, 9, 30.0, None, "plain_dlq")
    defaults = QueueConfig(max_depth=50, max_priority=20, ack_deadline=5, max_deliveries=None)
    for _ in range(2):
        async with await Engine.open(tmp_path, defaults=defaults) as engine:
            assert limits(engine, "plain") == (50, 20, 5, None, "plain_dlq")
            assert limits(engine, "named") == (50, 9, 5, 4, None)
            assert limits(engine, "none") == (50, 20, 30.0, None, None)
            engine.catalogue.declare("none", {}, defaults={"dead_letter": "none_dlq"})
            assert limits(engine, "none")[-1] is None, "a default replaced a declared None"
            assert limits(engine, "own")[0] == 7
            await engine.storage.maintain()  # so that the second round reads a snapshot


async def test_a_record_of_version_0_1_sets_only_non_default_fields(tmp_path):
    async with await Engine.open(tmp_path) as engine:
        journal = engine.storage.journal
        journal.declare("old", None, asdict(QueueConfig(max_priority=3, max_deliveries=3)))
        await engine.written()
    defaults = QueueConfig(max_depth=50, max_priority=20, ack_deadline=5, max_deliveries=None)
    async with await Engine.open(tmp_path, defaults=defaults) as engine:
        assert limits(engine, "old") == (50, 3, 5, 3, None)


async def test_an_id_or_key_that_is_not_unicode_rejects_only_its_message(store):
    engine = await store.open()
    await engine.create("orders")
    messages = [
        Envelope("\udc80", b""),
        Envelope("good", b"", key="\u00fc"),
        Envelope("bad-key", b"", key="\udc80"),
    ]
    first, good, third = await engine.publish_many("orders", messages)
    assert isinstance(first, InvalidName)
    assert isinstance(third, InvalidName)
    assert good == Sent("good", 0)
    assert [item.id for item in await engine.peek("orders", 10)] == ["good"]
