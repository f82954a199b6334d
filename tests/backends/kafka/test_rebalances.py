"""Kafka's rebalances: nothing is lost, next to nothing comes twice, and handlers are left alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiokafka import errors

from qkit import Message, QueueService, Reject, Settings, consume
from qkit._internal.ids import new_id
from qkit.backend import Delivery, QueueSpec
from qkit.backends.kafka import driver
from qkit.backends.kafka.backend import KafkaBackend
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import AckDeadlineExceeded
from qkit.message import Envelope
from tests.support.kafka import spec, take
from tests.support.waiting import eventually

SESSION = 6.0  # the least that a broker with default settings takes

Open = Callable[..., KafkaBackend]


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def open_backend(kafka_url: str) -> AsyncIterator[Open]:
    """Backends that are started with ``await backend.start()`` and closed after the test."""
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> KafkaBackend:
            values: dict[str, Any] = {"partitions": 4, "heartbeat": 0.2, **options}
            backend = KafkaBackend(kafka_url, **values)
            stack.push_async_callback(backend.aclose)
            return backend

        yield make


@pytest_asyncio.fixture
async def backend(open_backend: Open) -> KafkaBackend:
    backend = open_backend()
    await backend.start()
    return backend


async def put(backend: KafkaBackend, name: str, count: int) -> list[str]:
    envelopes = [Envelope(new_id(), b"{}", key=f"key {number}") for number in range(count)]
    await backend.publish(name, envelopes)
    return [envelope.id for envelope in envelopes]


async def quiet(subscription: KafkaSubscription, seconds: float = 1.0) -> list[str]:
    """What comes in so many seconds."""
    found: list[Delivery] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                found += await subscription.receive(100)
    except TimeoutError:
        return [delivery.envelope.id for delivery in found]


def generation(subscription: KafkaSubscription) -> int:
    return driver.generation_of(subscription.membership._consumer)


@asynccontextmanager
async def listening(subscription: KafkaSubscription) -> AsyncIterator[list[Delivery]]:
    """Whatever arrives, for as long as it lasts."""
    got: list[Delivery] = []

    async def listen() -> None:
        while True:
            got.extend(await subscription.receive(100))

    task = asyncio.create_task(listen())
    try:
        yield got
    finally:
        task.cancel()
        await asyncio.wait({task})


# Partitions that stay


async def test_what_a_consumer_holds_is_not_delivered_again_when_others_come_and_go(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    ids = await put(backend, name, 40)
    async with backend.subscribe(spec(name, prefetch=60)) as first:
        held = await take(first, 40)
        rounds = generation(first)
        async with listening(first) as again, backend.subscribe(spec(name)) as second:
            async with listening(second) as theirs:
                await asyncio.sleep(1.5)
            assert generation(first) > rounds, "there was a rebalance"
            for delivery in held:
                await first.ack(delivery)
            await eventually(lambda: len(second.membership.trackers) > 5)
        assert [*again, *theirs] == []
        assert sorted(delivery.envelope.id for delivery in held) == sorted(ids)
    async with backend.subscribe(spec(name)) as late:
        assert await quiet(late) == []


async def test_a_newcomer_gets_its_share_once_what_is_held_there_is_settled(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await put(backend, name, 40)
    async with backend.subscribe(spec(name)) as first:
        held = await take(first, 40)
        async with backend.subscribe(spec(name)) as second:
            mine = {partition for partition in first.membership.trackers if partition.topic == name}
            assert len(mine) == 4, "each of them is held"
            for delivery in held:
                await first.ack(delivery)
            await eventually(
                lambda: (
                    sum(partition.topic == name for partition in second.membership.trackers) == 2
                )
            )
            more = await put(backend, name, 40)
            async with listening(first) as ours, listening(second) as theirs:
                await eventually(lambda: len(ours) + len(theirs) >= 40)
            assert ours
            assert theirs
            got = [delivery.envelope.id for delivery in (*ours, *theirs)]
            assert Counter(got) == Counter(more)


async def test_a_partition_whose_messages_take_too_long_goes_all_the_same(
    open_backend: Open, name: str
) -> None:
    """Half a session at most, then another has them, and a late ack is refused."""
    backend = open_backend(partitions=2, session=SESSION)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await put(backend, name, 20)
    async with backend.subscribe(spec(name)) as first:
        told: list[Delivery] = []
        first.on_lost(told.extend)
        held = await take(first, 20)
        async with backend.subscribe(spec(name)) as second, listening(second) as theirs:
            await eventually(lambda: theirs, within=SESSION + 10)
            await eventually(lambda: len(theirs) >= len(told))
            lost = {delivery.envelope.id for delivery in theirs}
            assert {delivery.envelope.id for delivery in told} == lost
            refused = 0
            for delivery in held:
                if delivery.envelope.id in lost:
                    with pytest.raises(AckDeadlineExceeded):
                        await first.ack(delivery)
                    with pytest.raises(AckDeadlineExceeded):
                        await first.release(delivery, 0.0)
                    refused += 1
                else:
                    await first.ack(delivery)
            assert 0 < refused < 20, "the other partition stayed"
            for delivery in theirs:
                await second.ack(delivery)
    async with backend.subscribe(spec(name)) as late:
        assert await quiet(late) == []


async def test_a_handler_whose_partition_went_to_another_is_cancelled_and_buries_nothing(
    open_backend: Open, kafka_url: str, name: str
) -> None:
    """The other handles its message well: a dead letter of it would be wrong."""
    cancelled: list[str] = []
    handled: list[str] = []

    @consume(name, concurrency=20)
    async def slow(body: int, message: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(message.id)
            raise Reject("in the midst of it") from None

    @consume(name, concurrency=20)
    async def quick(body: int, message: Message) -> None:
        handled.append(message.id)

    def service(handler: Any) -> QueueService:
        backend = open_backend(partitions=2, session=SESSION)
        service = QueueService(Settings(type="kafka", url=kafka_url), backend=backend)
        service.register(handler)
        return service

    async with service(slow) as first:
        for number in range(20):
            await first.send(name, number, key=f"key {number}")
        await eventually(lambda: first.metrics().in_flight == 20)
        async with service(quick) as second:
            await eventually(lambda: handled, within=SESSION + 20)
            await eventually(lambda: set(cancelled) >= set(handled))
            await eventually(lambda: first.metrics().in_flight == 20 - len(cancelled))
            assert len(cancelled) < 20, "the other partition stayed"
            assert first.metrics().messages_dead_lettered == 0
            assert await second.dead_letters(name).list() == []
        await first.shutdown(0)


async def test_a_handler_longer_than_the_session_runs_once_and_disturbs_nobody(
    open_backend: Open, name: str
) -> None:
    backend = open_backend(session=SESSION)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await put(backend, name, 1)
    async with backend.subscribe(spec(name, prefetch=1)) as subscription:
        (delivery,) = await take(subscription, 1)
        rounds = generation(subscription)
        async with backend.subscribe(spec(f"{name}", consumer="other")) as other:
            assert await quiet(other, SESSION + 2) == []
            assert generation(subscription) <= rounds + 2, "no storm of rebalances"
            await subscription.ack(delivery)
            assert await quiet(other, 1.0) == []


# Under load


class Books:
    """What was sent and what was handled, and how long nothing was."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.handled: Counter[str] = Counter()
        self.by: Counter[str] = Counter()
        self.last = time.monotonic()
        self.longest = 0.0

    def note(self, who: str, id: str) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.last)
        self.last = now
        self.handled[id] += 1
        self.by[who] += 1


async def churn(
    kafka_url: str, name: str, *, rebalances: int, messages: int, slow: float = 0.0
) -> Books:
    """Consumers come and go while messages are sent and handled."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    books = Books()
    numbers = itertools.count()
    done = asyncio.Event()

    async def serve() -> QueueService:
        who = f"s{next(numbers)}"

        @consume(name, concurrency=8, prefetch=50)
        async def handle(body: int, message: Message) -> None:
            await asyncio.sleep(dice.random() / 200)
            if slow and body % 997 == 0:
                await asyncio.sleep(slow)
            books.note(who, message.id)

        service = QueueService(
            Settings(type="kafka", url=kafka_url),
            backend=KafkaBackend(kafka_url, partitions=6, heartbeat=0.3),
        )
        service.register(handle)
        await service.start()
        return service

    async def produce(service: QueueService) -> None:
        for start in range(0, messages, 50):
            sends = (
                service.send(name, number, key=f"k{number}") for number in range(start, start + 50)
            )
            books.sent |= {sent.message_id for sent in await asyncio.gather(*sends)}
            # A backlog, and not all of it before the end.
            await eventually(lambda: len(books.sent) - len(books.handled) <= 500, within=60)
        done.set()

    first = await serve()
    producing = asyncio.create_task(produce(first))
    others: list[QueueService] = []
    for number in range(rebalances):
        if others and (number % 2 or len(others) > 2):
            await others.pop(dice.randrange(len(others))).shutdown()
        else:
            others.append(await serve())
        await asyncio.sleep(dice.random())
    await producing
    await eventually(lambda: set(books.handled) >= books.sent, within=60)
    for service in (*others, first):
        await service.shutdown()
    return books


async def test_rebalances_under_load_lose_nothing(kafka_url: str, name: str) -> None:
    books = await churn(kafka_url, name, rebalances=4, messages=2_000, slow=1.0)
    assert set(books.handled) == books.sent
    twice = sum(books.handled.values()) - len(books.sent)
    assert twice <= 4 * 50, "at most what was held, for each rebalance"
    assert len(books.by) > 1, "the others had their share"
    assert books.longest <= 15


@pytest.mark.torture
@pytest.mark.timeout(600)
async def test_twenty_rebalances_under_twenty_thousand_messages(kafka_url: str, name: str) -> None:
    books = await churn(kafka_url, name, rebalances=20, messages=20_000, slow=3.0)
    twice = sum(books.handled.values()) - len(books.sent)
    print(f"{twice} came twice, at most {books.longest:.1f} s without any, {dict(books.by)}")
    assert set(books.handled) == books.sent
    assert twice <= 20 * 50
    assert books.longest <= 15


async def test_a_commit_that_fails_is_made_again(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await put(backend, name, 10)
    async with backend.subscribe(spec(name)) as subscription:
        consumer = subscription.membership._consumer
        commit, failures = (
            consumer.commit,
            [errors.RequestTimedOutError(), errors.CommitFailedError()],
        )

        async def failing(offsets: Any) -> None:
            if failures:
                raise failures.pop()
            await commit(offsets)

        consumer.commit = failing
        for delivery in await take(subscription, 10):
            await subscription.ack(delivery)
        await eventually(lambda: not failures)

        async def depth() -> bool:
            return (await backend.stats(name)).depth == 0

        await eventually(depth)
    async with backend.subscribe(spec(name)) as late:
        assert await quiet(late) == []


async def test_commits_are_gathered(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await put(backend, name, 500)
    async with backend.subscribe(spec(name, prefetch=500)) as subscription:
        commits = spy(subscription)
        for delivery in await take(subscription, 500):
            await subscription.ack(delivery)
        await asyncio.sleep(0.3)
    assert 1 <= len(commits) <= 20


@pytest.mark.proves("003-speed-6")
async def test_with_a_batch_size_each_completed_batch_is_committed(
    open_backend: Open, name: str
) -> None:
    backend = open_backend(partitions=1, batch_size=10)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await put(backend, name, 40)
    async with backend.subscribe(spec(name)) as subscription:
        commits = spy(subscription)
        deliveries = await take(subscription, 40)
        for number, delivery in enumerate(deliveries[:30], 1):
            await subscription.ack(delivery)
            if number % 10 == 0:
                await eventually(lambda number=number: number in commits)
            else:
                assert number not in commits
        for delivery in deliveries[30:35]:
            await subscription.ack(delivery)
        assert 35 not in commits
        await eventually(lambda: 35 in commits)


def spy(subscription: KafkaSubscription) -> list[int]:
    """The offsets of the channel's own partitions as they are committed."""
    consumer = subscription.membership._consumer
    commit, seen = consumer.commit, list[int]()

    async def spied(offsets: Any) -> None:
        await commit(offsets)
        seen.extend(
            saved.offset
            for partition, saved in offsets.items()
            if partition.topic == subscription.queue
        )

    consumer.commit = spied
    return seen


# A worker that dies


async def test_more_handlers_than_partitions_and_a_kill_lose_nothing(
    backend: KafkaBackend, kafka_url: str, name: str
) -> None:
    """The dead worker settled out of order: what it finished behind a slow one comes not again."""
    await backend.declare(QueueSpec(name=name))
    ids = await put(backend, name, 200)
    worker = subprocess.Popen(  # noqa: ASYNC220  # it starts at once; its lines are read in a thread
        [sys.executable, "-m", "tests.support.kafka_worker", kafka_url, name, str(SESSION)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    done: list[str] = []
    try:
        while len(done) < 60:
            line = await asyncio.to_thread(worker.stdout.readline)
            assert line, "the worker ended by itself"
            done.append(line.strip())
        await asyncio.sleep(0.5)  # its commits are made by then
    finally:
        worker.kill()
        done += [line.strip() for line in worker.stdout.read().splitlines()]
        worker.stdout.close()
        worker.wait()
    began = time.monotonic()
    async with backend.subscribe(spec(name, prefetch=300)) as heir, listening(heir) as theirs:
        await eventually(
            lambda: {delivery.envelope.id for delivery in theirs} | set(done) == set(ids),
            within=SESSION + 20,
        )
    got = Counter(delivery.envelope.id for delivery in theirs)
    assert max(got.values()) == 1
    twice = set(done) & set(got)
    print(f"back after {time.monotonic() - began:.1f} s, {len(twice)} came twice")
    assert len(twice) <= 20, "only what it did after its last commit"
