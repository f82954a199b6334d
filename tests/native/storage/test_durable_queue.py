"""What an engine in a directory has when it is opened again."""

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
from qkit.errors import ConfigError, LifecycleError, LogDamaged, QueueFull, Unsupported
from qkit.message import GROUP
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


class Places:
    """A disk on which an engine is opened, closed or killed, and opened again."""

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

    async def again(self, *, kill: bool = False, tidy: bool = False, down: float = 0) -> Engine:
        assert self.engine is not None
        if tidy:
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
async def places(clock):
    places = Places(clock)
    yield places
    await places.close()


async def take(engine: Engine, queue: str, **options: Any) -> Delivery:
    delivery = await engine.consume(queue, **options)
    assert delivery is not None
    return delivery


STOPS = [
    pytest.param({"kill": False}, id="closed"),
    pytest.param({"kill": True}, id="killed"),
    pytest.param({"kill": False, "tidy": True}, id="tidied"),
    pytest.param({"kill": True, "tidy": True}, id="tidied-killed"),
]
stops = pytest.mark.parametrize("stop", STOPS)


@pytest.mark.proves("002-log-6", "002-hybrid-3", "002-testing-9")
async def test_a_message_keeps_all_that_it_was_sent_with(tmp_path: Path):
    """In a real directory, by the real clock, through a writer's thread."""
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
async def test_order_is_kept_inside_a_priority(places, stop):
    engine = await places.open(segment_bytes=500)
    await engine.create("orders")
    for number in range(40):
        await engine.publish("orders", b"x" * 30, number % 3, message_id=f"{number:02}")
    before = [item.id for item in await engine.peek("orders", 100)]
    engine = await places.again(**stop)

    found = [(await take(engine, "orders")).message_id for _ in range(40)]
    assert found == before == sorted(before, key=lambda id: (-(int(id) % 3), id))


@pytest.mark.proves("002-delivery-2", "002-delivery-5")
@stops
async def test_what_was_held_comes_again_at_once_and_its_attempts_are_kept(places, stop):
    engine = await places.open()
    await engine.create("orders")
    await engine.publish("orders", b"one", message_id="1")
    await engine.publish("orders", b"two", message_id="2")
    held = await take(engine, "orders", ack_deadline=3600)
    engine = await places.again(**stop)

    assert (await engine.stats("orders")).in_flight == 0
    again = await take(engine, "orders")
    assert (again.message_id, again.retry_count, again.body) == ("1", 1, b"one")
    assert (await take(engine, "orders")).retry_count == 0
    with pytest.raises(LifecycleError):  # it belongs to an engine that is closed
        await held.ack()
    await again.ack()
    assert (await engine.stats("orders")).in_flight == 1


@pytest.mark.proves("002-log-9", "002-delivery-3", "002-delivery-6")
@stops
async def test_what_is_settled_stays_settled(places, stop):
    engine = await places.open(segment_bytes=300)
    await engine.create("orders")
    for number in range(10):
        await engine.publish("orders", bytes(50), message_id=str(number))
    for _ in range(5):
        await (await take(engine, "orders")).ack()
    assert await engine.remove("orders", ["7", "8"]) == 2
    engine = await places.again(**stop)
    assert [item.id for item in await engine.peek("orders", 100)] == ["5", "6", "9"]
    assert await engine.purge("orders") == 3
    engine = await places.again(**stop)
    assert await engine.peek("orders", 100) == []


@pytest.mark.proves("002-log-11")
@stops
async def test_the_last_delivery_in_flight_is_a_dead_letter_after_a_crash_only(places, stop):
    engine = await places.open()
    await engine.create("orders", max_retries=1)
    await engine.publish("orders", b"poison", message_id="1")
    await (await take(engine, "orders")).nack()
    assert (await take(engine, "orders")).retry_count == 1
    letters: list[Any] = []
    engine = await places.again(**stop)
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
        engine = await places.again(**stop)
        assert len(await engine.dead_letters("orders")) == 1
    else:
        assert (await take(engine, "orders")).retry_count == 2


@pytest.mark.proves("002-delivery-2")
@stops
async def test_a_crash_before_the_last_delivery_is_one_delivery(places, stop):
    engine = await places.open()
    await engine.create("orders", max_retries=2)
    await engine.publish("orders", b"poison")
    for retry in range(2):
        assert (await take(engine, "orders")).retry_count == retry
        engine = await places.again(**stop)
    assert (await take(engine, "orders")).retry_count == 2


@stops
async def test_a_delay_goes_on_while_the_engine_is_down(places, clock, stop):
    engine = await places.open()
    await engine.create("orders")
    for delay in (10, 20, 30):
        await engine.publish("orders", b"", delay=delay, message_id=str(delay))
    engine = await places.again(**stop, down=15)

    stats = await engine.stats("orders")
    assert (stats.depth, stats.scheduled) == (1, 2)
    assert (await take(engine, "orders")).message_id == "10"
    assert await engine.consume("orders", timeout=4.9) is None
    assert (await take(engine, "orders", timeout=0.2)).message_id == "20"
    assert (await take(engine, "orders", timeout=11)).message_id == "30"


@pytest.mark.proves("002-log-10")
@stops
async def test_a_backoff_goes_on_too(places, stop):
    engine = await places.open()
    await engine.create("orders", backoff=10)
    await engine.publish("orders", b"")
    await (await take(engine, "orders")).nack()
    engine = await places.again(**stop, down=5)
    assert await engine.consume("orders", timeout=4.9) is None
    assert (await take(engine, "orders", timeout=0.2)).retry_count == 1


@stops
async def test_a_life_goes_on_while_the_engine_is_down(places, clock, stop):
    engine = await places.open()
    await engine.create("orders")
    for ttl in (10, 20, 3600):
        await engine.publish("orders", b"%d" % ttl, ttl=ttl, message_id=str(ttl))
    await engine.publish("orders", b"", delay=12, ttl=14, message_id="late")
    engine = await places.again(**stop, down=15)

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
async def test_dead_letters_keep_their_facts_and_can_be_replayed(places, clock, stop):
    engine = await places.open()
    await engine.create("orders")
    await engine.publish("orders", b"one", 7, headers={"a": "b"}, key="k", message_id="1")
    await (await take(engine, "orders")).nack()
    await clock.advance(5)
    await (await take(engine, "orders")).nack(requeue=False)
    (before,) = await engine.dead_letters("orders")
    engine = await places.again(**stop)

    assert await engine.dead_letters("orders") == [before]
    assert (before.attempts, before.reason, before.priority) == (2, "ExplicitNack", 7)
    assert await engine.retry_dead_letters("orders") == 1
    engine = await places.again(**stop)
    assert await engine.dead_letters("orders") == []
    again = await take(engine, "orders")
    assert (again.message_id, again.retry_count, again.priority, again.key) == ("1", 0, 7, "k")
    assert (again.body, again.headers) == (b"one", {"a": "b"})


@stops
async def test_a_group_declared_between_two_sends_of_one_turn_gets_the_second(places, stop):
    engine = await places.open()
    await engine.create("news", broadcast=True)
    assert await engine.consume("news", group="a") is None

    async def declare_and_publish() -> None:
        engine.queue("news", "test", "b")
        await engine.publish("news", b"2", message_id="2")

    await asyncio.gather(engine.publish("news", b"1", message_id="1"), declare_and_publish())

    engine = await places.again(**stop)
    assert [(item.group, item.id) for item in await view(engine)] == [
        ("a", "1"),
        ("a", "2"),
        ("b", "2"),
    ]


@stops
async def test_every_group_of_a_topic_has_its_own_share(places, stop):
    engine = await places.open()
    await engine.create("news", broadcast=True)
    await engine.publish("news", b"nobody", message_id="0")
    for group in ("a", "b"):
        assert await engine.consume("news", group=group) is None
    await engine.publish("news", b"one", message_id="1")
    await engine.publish("news", b"two", message_id="2")
    await (await take(engine, "news", group="a")).ack()
    await (await take(engine, "news", group="b")).nack(requeue=False)
    engine = await places.again(**stop)

    assert [(item.group, item.id, item.dead) for item in await view(engine)] == [
        ("a", "2", False),
        ("b", "2", False),
        ("b", "1", True),
    ]
    await engine.publish("news", b"three", message_id="3")
    assert [(await take(engine, "news", group="b")).message_id for _ in "23"] == ["2", "3"]
    assert await engine.consume("news", group="c") is None  # from its first declaration on
    assert await engine.retry_dead_letters("news") == 1
    engine = await places.again(**stop)
    assert {item.id for item in await engine.peek("news", 99) if item.headers[GROUP] == "b"} == {
        "1",
        "2",
        "3",
    }
    with pytest.raises(Unsupported):
        await engine.consume("news")


@stops
async def test_a_queue_keeps_its_options(places, clock, stop):
    engine = await places.open()
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
    engine = await places.again(**stop)

    assert await engine.list() == ["empty", "orders"]
    await engine.publish("orders", b"1", message_id="1")
    await engine.publish("orders", b"2", message_id="2")
    with pytest.raises(QueueFull):
        await engine.publish("orders", b"3")
    await take(engine, "orders")
    await take(engine, "orders")
    await clock.advance(6)
    assert [item.message_id for item in await engine.dead_letters("orders")] == ["2"]
    # The declarations of this run decide; the kind alone is given.
    await engine.create("orders", **{**options, "max_depth": 7})
    with pytest.raises(ConfigError):
        await engine.create("empty", broadcast=True)
    engine = await places.again(**stop)
    assert engine.catalogue.find("orders", "look").config.max_depth == 7
    assert engine.catalogue.find("empty", "look").config.dead_letter is None


@stops
async def test_counters_begin_anew(places, stop):
    engine = await places.open()
    await engine.create("orders")
    for _ in range(3):
        await engine.publish("orders", b"")
    await (await take(engine, "orders")).ack()
    await take(engine, "orders")
    engine = await places.again(**stop)

    stats = await engine.stats("orders")
    totals = stats.published_total, stats.consumed_total, stats.acked_total, stats.nacked_total
    assert totals == (0, 0, 0, 0)
    assert stats.depth == 2
    assert stats.oldest_message_age_secs == 0


@pytest.mark.proves("002-log-8")
async def test_the_age_of_a_message_counts_from_its_send(places):
    engine = await places.open()
    await engine.create("orders")
    await engine.publish("orders", b"")
    engine = await places.again(down=100)
    assert (await engine.stats("orders")).oldest_message_age_secs == pytest.approx(100)


@stops
async def test_a_queue_made_anew_under_its_old_name_has_nothing_of_the_first(places, stop):
    engine = await places.open(segment_bytes=300)
    await engine.create("orders")
    for number in range(5):
        await engine.publish("orders", b"old" * 20, message_id=str(number))
    await (await take(engine, "orders")).nack(requeue=False)
    held = await take(engine, "orders")
    await engine.delete("orders")
    await engine.create("orders")
    await engine.publish("orders", b"new", message_id="new")
    engine = await places.again(**stop)

    assert [item.id for item in await engine.peek("orders", 9)] == ["new"]
    assert [item.message_id for item in await engine.dead_letters("orders")] == ["0"]
    await engine.delete("orders")
    engine = await places.again(**stop)
    assert await engine.list() == ["orders_dlq"]
    assert held.message_id == "1"


async def test_settling_what_a_deleted_queue_gave_out_disturbs_nothing(places):
    engine = await places.open()
    await engine.create("orders")
    await engine.create("others")
    await engine.publish("orders", b"x" * 100)
    await engine.publish("others", b"y" * 10)
    held = await take(engine, "orders")
    await engine.delete("orders")
    await held.ack()
    assert engine.storage.journal.held == 10
    engine = await places.again(kill=True)
    assert [item.body for item in await view(engine)] == [b"y" * 10]


async def test_what_was_sent_to_a_queue_while_it_is_deleted_leaves_nothing_behind(tmp_path):
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
    """A disk on which writes wait at a gate."""

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


async def test_two_who_create_a_queue_at_once_may_both_rely_on_it(tmp_path):
    """The second has nothing to write, but must wait for what the first wrote."""
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


async def test_nothing_is_done_by_a_closed_engine(places):
    engine = await places.open()
    await engine.create("orders")
    await places.again()
    for work in (
        engine.publish("orders", b""),
        engine.consume("orders"),
        engine.create("other"),
        engine.peek("orders"),
    ):
        with pytest.raises(LifecycleError, match="closed"):
            await work


async def test_opening_fails_and_lets_the_directory_go(tmp_path):
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
async def test_compaction_keeps_what_became_of_those_that_stay(places, clock, kill):
    """Deliveries, backoffs, burials and removals of messages whose segments are written anew."""
    engine = await places.open(segment_bytes=600)
    await engine.create("orders", backoff=100, max_backoff=1000, max_retries=2)

    async def crowd() -> None:
        """Many that are soon done with, so that their segments are worth writing anew."""
        for _ in range(10):
            await engine.publish("orders", bytes(100), 9)
        for _ in range(10):
            await (await take(engine, "orders")).ack()
        await engine.storage.maintain(rotate=False)

    for id in ("backoff", "dead", "removed", "held", "fresh"):
        await engine.publish("orders", id.encode() * 5, 5, message_id=id)
        await crowd()
    await (await take(engine, "orders")).nack()
    await crowd()
    await (await take(engine, "orders")).nack(requeue=False)
    await crowd()
    await engine.remove("orders", ["removed"])
    await crowd()
    assert (await take(engine, "orders", ack_deadline=1000)).message_id == "held"
    await crowd()
    before = len(places.disk.files())
    for _ in range(3):
        await crowd()
    assert len(places.disk.files()) < before + 5
    engine = await places.again(kill=kill)

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


# A service on it


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "blocks"])
async def test_a_handler_that_outlives_ten_leases_runs_once(tmp_path, how):
    """By the real clock; a second service would take what comes back."""
    engine = await Engine.open(tmp_path)
    runs: list[int] = []

    @consume("jobs", ack_deadline=0.1)
    async def handle(number: int) -> None:
        runs.append(number)
        if how == "waits":
            await asyncio.sleep(1.2)
        else:
            for _ in range(3):
                time.sleep(0.4)  # noqa: ASYNC251  that is the point
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


async def test_limits_that_change_while_a_message_is_on_its_way_do_not_refuse_it(tmp_path):
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


async def test_what_no_declaration_set_follows_the_settings_of_the_owner(tmp_path):
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
            assert limits(engine, "none")[-1] is None, "its consumer wanted none"
            assert limits(engine, "own")[0] == 7
            await engine.storage.maintain()  # the second time it comes from a snapshot


async def test_a_record_of_the_first_version_sets_what_is_not_the_default(tmp_path):
    async with await Engine.open(tmp_path) as engine:
        journal = engine.storage.journal
        journal.declare("old", None, asdict(QueueConfig(max_priority=3, max_deliveries=3)))
        await engine.written()
    defaults = QueueConfig(max_depth=50, max_priority=20, ack_deadline=5, max_deliveries=None)
    async with await Engine.open(tmp_path, defaults=defaults) as engine:
        assert limits(engine, "old") == (50, 3, 5, 3, None)
