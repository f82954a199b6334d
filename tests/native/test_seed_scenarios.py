"""The eight scenarios of the requirements (``000-scenarios-*``), and all statistics of a queue.

Each test runs with an engine in memory and with a durable one, in virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from qkit.backend import SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.errors import AckDeadlineExceeded, QueueFull
from qkit.message import Reason
from qkit.native import Delivery, Engine
from qkit.testing.clock import VirtualClock


async def take(engine: Engine, **options) -> Delivery:
    delivery = await engine.consume("tasks", **options)
    assert delivery is not None
    return delivery


async def drain(engine: Engine) -> list[bytes]:
    bodies = []
    while (delivery := await engine.consume("tasks")) is not None:
        bodies.append(delivery.body)
        await delivery.ack()
    return bodies


@pytest.mark.proves(
    "000-publish-7",
    "000-scenarios-1",
    "001-cycle-2",
    "002-hybrid-3",
    "002-testing-5",
    "004-states-1",
)
async def test_messages_of_equal_priority_are_delivered_in_fifo_order(either: Engine) -> None:
    await either.create("tasks")
    sent = [await either.publish("tasks", f"{n}".encode()) for n in range(5)]
    assert [item.position for item in sent] == [0, 1, 2, 3, 4]
    assert len({item.message_id for item in sent}) == 5
    assert await drain(either) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.proves("000-intro-1", "000-lifecycle-1", "000-priority-1", "000-scenarios-2")
async def test_messages_with_a_higher_priority_are_delivered_first(either: Engine) -> None:
    await either.create("tasks")
    for n, priority in enumerate((0, 9, 5, 9, 0, None)):
        await either.publish("tasks", f"{priority} {n}".encode(), priority)
    assert await drain(either) == [b"9 1", b"9 3", b"5 2", b"None 5", b"0 0", b"0 4"]


@pytest.mark.proves("000-scenarios-3", "001-overview-3", "002-improvements-4")
async def test_messages_are_shared_evenly_among_consumers(either: Engine) -> None:
    await either.create("tasks")
    shares: dict[str, int] = {"a": 0, "b": 0, "c": 0}

    async def work(name: str) -> None:
        while (delivery := await either.consume("tasks", 1, consumer=name)) is not None:
            shares[name] += 1
            await asyncio.sleep(0.01)
            await delivery.ack()

    async with asyncio.TaskGroup() as group:
        for name in shares:
            group.create_task(work(name))
        for _ in range(30):
            await either.publish("tasks", b"x")
    assert shares == {"a": 10, "b": 10, "c": 10}


@pytest.mark.proves(
    "000-intro-1",
    "000-features-2",
    "000-lifecycle-4",
    "000-lifecycle-5",
    "000-consume-3",
    "000-consume-4",
    "000-consume-8",
    "000-deadline-1",
    "000-deadline-3",
    "000-metrics-6",
    "000-scenarios-4",
    "001-reaper-3",
    "002-ack-1",
    "002-ack-3",
    "004-states-4",
)
async def test_an_unacked_message_is_redelivered_after_its_deadline(
    either: Engine, clock: VirtualClock
) -> None:
    await either.create("tasks")
    await either.publish("tasks", b"x")
    first = await take(either, ack_deadline=60)
    assert first.retry_count == 0
    await clock.advance(59)
    assert await either.consume("tasks") is None
    await clock.advance(1)
    second = await take(either)
    assert (second.message_id, second.retry_count) == (first.message_id, 1)
    with pytest.raises(AckDeadlineExceeded):
        await first.ack()
    await second.ack()
    assert (await either.stats("tasks")).acked_total == 1


@pytest.mark.proves(
    "000-operations-4",
    "000-management-2",
    "000-features-4",
    "000-structures-1",
    "000-structures-7",
    "000-lifecycle-4",
    "000-lifecycle-5",
    "000-lifecycle-6",
    "000-publish-5",
    "000-nack-2",
    "000-nack-4",
    "000-nack-6",
    "000-dead-1",
    "000-dead-2",
    "000-dead-3",
    "000-dead-5",
    "000-dead-6",
    "000-dead-8",
    "000-dead-9",
    "000-config-2",
    "000-config-5",
    "000-metrics-8",
    "000-scenarios-5",
    "002-overview-4",
    "002-log-11",
    "002-ack-2",
    "002-dlq-1",
    "002-dlq-2",
    "002-dlq-5",
    "002-dlq-7",
    "002-improvements-11",
    "002-testing-7",
    "002-testing-8",
    "002-usage-2",
    "002-summary-4",
    "004-actors-1",
    "004-actors-6",
    "004-dlq-3",
    "004-dlq-4",
)
async def test_failed_messages_become_dead_letters_that_can_be_replayed_and_purged(
    either: Engine, clock: VirtualClock
) -> None:
    await either.create("tasks")
    await either.publish("tasks", b"poison", headers={"source": "web"})
    for expected in ["requeued", "requeued", "requeued", "dead_lettered"]:
        assert await (await take(either)).nack() == expected
    await either.publish("tasks", b"rejected")
    assert await (await take(either)).nack(requeue=False) == "dead_lettered"
    await either.publish("tasks", b"late", ttl=5)
    await clock.advance(5)

    letters = await either.dead_letters("tasks")
    assert [(letter.body, letter.reason, letter.attempts) for letter in letters] == [
        (b"poison", Reason.MAX_RETRIES_EXCEEDED, 4),
        (b"rejected", Reason.EXPLICIT_NACK, 1),
        (b"late", Reason.TTL_EXPIRED, 0),
    ]
    assert letters[0].channel == "tasks"
    assert letters[0].headers == {"source": "web"}
    assert letters[2].last_failed_at == clock.time()
    assert await either.list() == ["tasks", "tasks_dlq"]
    assert (await either.stats("tasks")).dead_lettered_total == 3

    assert await either.retry_dead_letters("tasks", ids=[letters[0].message_id]) == 1
    again = await take(either)
    assert (again.message_id, again.retry_count) == (letters[0].message_id, 0)
    assert again.headers == {"source": "web"}
    await again.ack()
    assert await either.retry_dead_letters("tasks") == 2
    assert await either.dead_letters("tasks") == []
    await either.purge("tasks")
    await either.publish("tasks", b"y")
    await (await take(either)).nack(requeue=False)
    assert await either.purge_dead_letters("tasks") == 1


@pytest.mark.proves("000-features-5", "000-prefetch-3", "000-prefetch-4", "000-scenarios-6")
async def test_prefetch_limits_a_registered_consumer(either: Engine) -> None:
    await either.create("tasks")
    await either.register("tasks", "anna", 2)
    for n in range(5):
        await either.publish("tasks", str(n).encode())
    held = [await take(either, consumer="anna") for _ in range(2)]
    assert [delivery.body for delivery in held] == [b"0", b"1"]
    assert await either.consume("tasks", consumer="anna") is None
    more = asyncio.create_task(take(either, timeout=60, consumer="anna"))
    await asyncio.sleep(1)
    assert not more.done()
    other = await take(either, consumer="bert")  # other consumers receive the remaining messages
    assert other.body == b"2"
    await held[0].ack()
    assert (await more).body == b"3"


@pytest.mark.proves("000-scenarios-6")
async def test_prefetch_limits_a_subscription(either: Engine) -> None:
    await either.create("tasks")
    for n in range(5):
        await either.publish("tasks", str(n).encode())
    spec = SubscriptionSpec(queue="tasks", group="g", consumer="c", prefetch=2)
    async with NativeBackend(engine=either).subscribe(spec) as subscription:
        held = await subscription.receive(10)
        assert [delivery.envelope.body for delivery in held] == [b"0", b"1"]
        more = asyncio.create_task(subscription.receive(10))
        await asyncio.sleep(1)
        assert not more.done()
        await subscription.ack(held[0])
        assert [delivery.envelope.body for delivery in await more] == [b"2"]


@pytest.mark.proves("000-scenarios-7", "002-testing-10", "002-testing-13")
async def test_concurrent_producers_and_consumers_neither_lose_nor_duplicate_messages(
    either: Engine,
) -> None:
    await either.create("tasks")
    seen: list[bytes] = []

    async def produce(name: int) -> None:
        for n in range(200):
            await either.publish("tasks", f"{name}-{n}".encode())
            if n % 7 == 0:
                await asyncio.sleep(0)

    async def work() -> None:
        while (delivery := await either.consume("tasks", 1)) is not None:
            seen.append(delivery.body)
            await asyncio.sleep(0)
            await delivery.ack()

    async with asyncio.TaskGroup() as group:
        for name in range(5):
            group.create_task(produce(name))
            group.create_task(work())
    assert len(seen) == len(set(seen)) == 1000


@pytest.mark.proves("000-errors-2", "000-scenarios-8")
async def test_a_full_queue_rejects_messages_until_one_is_acked(either: Engine) -> None:
    await either.create("tasks", max_depth=2)
    await either.publish("tasks", b"1")
    await either.publish("tasks", b"2")
    with pytest.raises(QueueFull, match="at most 2"):
        await either.publish("tasks", b"3")
    with pytest.raises(QueueFull):
        await either.publish("tasks", b"3", wait=1)
    held = await take(either)  # messages in flight count too
    with pytest.raises(QueueFull):
        await either.publish("tasks", b"3")
    await held.ack()
    await either.publish("tasks", b"3")
    assert await drain(either) == [b"2", b"3"]


@pytest.mark.proves(
    "000-metrics-1",
    "000-metrics-2",
    "000-metrics-3",
    "000-metrics-4",
    "000-metrics-5",
    "000-metrics-6",
    "000-metrics-7",
    "000-metrics-8",
    "000-metrics-9",
    "000-metrics-10",
)
async def test_stats_count_each_figure_separately(either: Engine, clock: VirtualClock) -> None:
    """Check every statistic of a queue; all counts differ."""
    await either.create("tasks", ack_deadline=600)
    for consumer in "abcde":
        await either.register("tasks", consumer, 20)
    for _ in range(100):
        await either.publish("tasks", b"x")
    await clock.advance(0.125)
    held = [await take(either, consumer="abcde"[n % 5]) for n in range(60)]
    for n, delivery in enumerate(held):
        if n < 50:
            await delivery.ack()
        else:
            await delivery.nack(requeue=n < 58)
    for consumer in "abc":
        await take(either, consumer=consumer)  # redeliver three released messages
    for _ in range(4):
        await either.publish("tasks", b"later", delay=3600)
    await clock.advance(45 - 0.125)
    assert asdict(await either.stats("tasks")) == {
        "queue": "tasks",
        "depth": 45,
        "consumers": 5,
        "published_total": 104,
        "consumed_total": 63,
        "acked_total": 50,
        "nacked_total": 10,
        "dead_lettered_total": 2,
        "avg_wait_time_ms": 125,
        "oldest_message_age_secs": 45,
        "in_flight": 3,
        "scheduled": 4,
        "dropped_total": 0,
    }
