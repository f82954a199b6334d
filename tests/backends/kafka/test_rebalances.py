"""Rebalances: no message is lost, few are delivered twice, and handlers keep running."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import select
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO, Any

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

SESSION = 6.0  # seconds; the minimum that a broker allows by default

Open = Callable[..., KafkaBackend]


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def open_backend(kafka_url: str) -> AsyncIterator[Open]:
    """Yield a factory of unstarted backends, and close the backends after the test."""
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


async def publish(backend: KafkaBackend, name: str, count: int) -> list[str]:
    envelopes = [Envelope(new_id(), b"{}", key=f"key {number}") for number in range(count)]
    await backend.publish(name, envelopes)
    return [envelope.id for envelope in envelopes]


async def received_within(subscription: KafkaSubscription, seconds: float = 1.0) -> list[str]:
    """Return the ids of all messages that are delivered within ``seconds``."""
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
async def receiving(subscription: KafkaSubscription) -> AsyncIterator[list[Delivery]]:
    """Yield a list to which a background task adds all deliveries of a subscription."""
    got: list[Delivery] = []

    async def receive() -> None:
        while True:
            got.extend(await subscription.receive(100))

    task = asyncio.create_task(receive())
    try:
        yield got
    finally:
        task.cancel()
        await asyncio.wait({task})


# Partitions in use


async def test_held_messages_are_not_delivered_again_when_other_consumers_join_and_leave(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    ids = await publish(backend, name, 40)
    async with backend.subscribe(spec(name, prefetch=60)) as first:
        held = await take(first, 40)
        generation_before = generation(first)
        async with receiving(first) as again, backend.subscribe(spec(name)) as second:
            async with receiving(second) as theirs:
                await asyncio.sleep(1.5)
            assert generation(first) > generation_before, "no rebalance took place"
            for delivery in held:
                await first.ack(delivery)
            await eventually(lambda: len(second.membership.trackers) > 5)
        assert [*again, *theirs] == []
        assert sorted(delivery.envelope.id for delivery in held) == sorted(ids)
    async with backend.subscribe(spec(name)) as late:
        assert await received_within(late) == []


async def test_a_new_consumer_gets_its_share_when_the_held_messages_are_settled(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await publish(backend, name, 40)
    async with backend.subscribe(spec(name)) as first:
        held = await take(first, 40)
        async with backend.subscribe(spec(name)) as second:
            kept = {partition for partition in first.membership.trackers if partition.topic == name}
            assert len(kept) == 4, "a partition with held messages moved"
            for delivery in held:
                await first.ack(delivery)
            await eventually(
                lambda: (
                    sum(partition.topic == name for partition in second.membership.trackers) == 2
                )
            )
            more = await publish(backend, name, 40)
            async with receiving(first) as ours, receiving(second) as theirs:
                await eventually(lambda: len(ours) + len(theirs) >= 40)
            assert ours
            assert theirs
            got = [delivery.envelope.id for delivery in (*ours, *theirs)]
            assert Counter(got) == Counter(more)


async def test_a_partition_moves_after_a_time_limit_even_if_messages_are_held(
    open_backend: Open, name: str
) -> None:
    """Another consumer then receives the messages, and a late settlement is rejected."""
    backend = open_backend(partitions=2, session=SESSION)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await publish(backend, name, 20)
    async with backend.subscribe(spec(name)) as first:
        reported: list[Delivery] = []
        first.on_lost(reported.extend)
        held = await take(first, 20)
        async with backend.subscribe(spec(name)) as second, receiving(second) as theirs:
            await eventually(lambda: theirs, within=SESSION + 10)
            await eventually(lambda: len(theirs) >= len(reported))
            lost = {delivery.envelope.id for delivery in theirs}
            assert {delivery.envelope.id for delivery in reported} == lost
            rejected = 0
            for delivery in held:
                if delivery.envelope.id in lost:
                    with pytest.raises(AckDeadlineExceeded):
                        await first.ack(delivery)
                    with pytest.raises(AckDeadlineExceeded):
                        await first.release(delivery, 0.0)
                    rejected += 1
                else:
                    await first.ack(delivery)
            assert 0 < rejected < 20, "only one of the two partitions must move"
            for delivery in theirs:
                await second.ack(delivery)
    async with backend.subscribe(spec(name)) as late:
        assert await received_within(late) == []


async def test_a_handler_whose_partition_was_lost_is_cancelled_without_a_dead_letter(
    open_backend: Open, kafka_url: str, name: str
) -> None:
    """The next consumer handles the message, so a dead letter would duplicate it."""
    cancelled: list[str] = []
    handled: list[str] = []

    @consume(name, concurrency=20)
    async def slow(body: int, message: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(message.id)
            raise Reject("cancelled") from None

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
            assert len(cancelled) < 20, "only one of the two partitions must move"
            assert first.metrics().messages_dead_lettered == 0
            assert await second.dead_letters(name).list() == []
        await first.shutdown(0)


async def test_a_handler_that_runs_longer_than_the_session_causes_no_redelivery_or_rebalances(
    open_backend: Open, name: str
) -> None:
    backend = open_backend(session=SESSION)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await publish(backend, name, 1)
    async with backend.subscribe(spec(name, prefetch=1)) as subscription:
        (delivery,) = await take(subscription, 1)
        generation_before = generation(subscription)
        async with backend.subscribe(spec(f"{name}", consumer="other")) as other:
            assert await received_within(other, SESSION + 2) == []
            assert generation(subscription) <= generation_before + 2, "repeated rebalances"
            await subscription.ack(delivery)
            assert await received_within(other, 1.0) == []


# Under load


class Results:
    """Messages sent and handled, and the longest time in which no message was handled."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.handled: Counter[str] = Counter()
        self.by_service: Counter[str] = Counter()
        self.last = time.monotonic()
        self.longest_gap = 0.0

    def record(self, service: str, id: str) -> None:
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now
        self.handled[id] += 1
        self.by_service[service] += 1


async def churn(
    kafka_url: str, name: str, *, rebalances: int, messages: int, slow: float = 0.0
) -> Results:
    """Start and stop consumers while messages are sent and handled."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    results = Results()
    numbers = itertools.count()
    done = asyncio.Event()

    async def serve() -> QueueService:
        service_name = f"s{next(numbers)}"

        @consume(name, concurrency=8, prefetch=50)
        async def handle(body: int, message: Message) -> None:
            await asyncio.sleep(rng.random() / 200)
            if slow and body % 997 == 0:
                await asyncio.sleep(slow)
            results.record(service_name, message.id)

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
            results.sent |= {sent.message_id for sent in await asyncio.gather(*sends)}
            # Keep a backlog, so that messages are sent during the rebalances.
            await eventually(lambda: len(results.sent) - len(results.handled) <= 500, within=60)
        done.set()

    first = await serve()
    producing = asyncio.create_task(produce(first))
    others: list[QueueService] = []
    for number in range(rebalances):
        if others and (number % 2 or len(others) > 2):
            await others.pop(rng.randrange(len(others))).shutdown()
        else:
            others.append(await serve())
        await asyncio.sleep(rng.random())
    await producing
    await eventually(lambda: set(results.handled) >= results.sent, within=60)
    for service in (*others, first):
        await service.shutdown()
    return results


async def test_rebalances_under_load_lose_no_message(kafka_url: str, name: str) -> None:
    results = await churn(kafka_url, name, rebalances=4, messages=2_000, slow=1.0)
    assert set(results.handled) == results.sent
    twice = sum(results.handled.values()) - len(results.sent)
    assert twice <= 4 * 50, "a rebalance repeated more than the prefetched messages"
    assert len(results.by_service) > 1, "only one service handled messages"
    assert results.longest_gap <= 15


@pytest.mark.torture
@pytest.mark.timeout(600)
async def test_twenty_rebalances_with_twenty_thousand_messages_lose_no_message(
    kafka_url: str, name: str
) -> None:
    results = await churn(kafka_url, name, rebalances=20, messages=20_000, slow=3.0)
    twice = sum(results.handled.values()) - len(results.sent)
    print(
        f"{twice} delivered twice, longest gap {results.longest_gap:.1f} s, "
        f"{dict(results.by_service)}"
    )
    assert set(results.handled) == results.sent
    assert twice <= 20 * 50
    assert results.longest_gap <= 15


async def test_a_failed_commit_is_retried(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await publish(backend, name, 10)
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
        assert await received_within(late) == []


async def test_commits_are_combined(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await publish(backend, name, 500)
    async with backend.subscribe(spec(name, prefetch=500)) as subscription:
        commits = record_commits(subscription)
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
    await publish(backend, name, 40)
    async with backend.subscribe(spec(name)) as subscription:
        commits = record_commits(subscription)
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


def record_commits(subscription: KafkaSubscription) -> list[int]:
    """Return a list to which each commit adds the offsets of the queue's partitions."""
    consumer = subscription.membership._consumer
    commit, committed = consumer.commit, list[int]()

    async def recording_commit(offsets: Any) -> None:
        await commit(offsets)
        committed.extend(
            saved.offset
            for partition, saved in offsets.items()
            if partition.topic == subscription.queue
        )

    consumer.commit = recording_commit
    return committed


# Killed worker


def has_output(stream: IO[bytes], seconds: float = 1.0) -> bool:
    """Wait up to ``seconds`` for output, and return whether there is any."""
    return bool(select.select([stream], [], [], seconds)[0])


async def test_a_killed_worker_with_more_handlers_than_partitions_loses_no_message(
    backend: KafkaBackend, kafka_url: str, name: str
) -> None:
    """The worker settles out of order; messages settled after a stuck one are not repeated."""
    await backend.declare(QueueSpec(name=name))
    ids = await publish(backend, name, 200)
    worker = subprocess.Popen(  # noqa: ASYNC220  # starting is fast, and a thread reads the output
        [sys.executable, "-m", "tests.support.kafka_worker", kafka_url, name, str(SESSION)],
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    printed = b""
    try:
        # Read until only stuck handlers run: by then all other messages are settled and committed.
        while await asyncio.to_thread(has_output, worker.stdout) or printed.count(b"\n") < 60:
            some = await asyncio.to_thread(os.read, worker.stdout.fileno(), 1 << 16)
            assert some, "the worker exited"
            printed += some
    finally:
        worker.kill()
        printed += worker.stdout.read()
        worker.stdout.close()
        worker.wait()
    done = printed.decode().split()
    began = time.monotonic()
    async with (
        backend.subscribe(spec(name, prefetch=300)) as successor,
        receiving(successor) as theirs,
    ):
        await eventually(
            lambda: {delivery.envelope.id for delivery in theirs} | set(done) == set(ids),
            within=SESSION + 20,
        )
    got = Counter(delivery.envelope.id for delivery in theirs)
    assert max(got.values()) == 1
    twice = set(done) & set(got)
    print(f"recovered after {time.monotonic() - began:.1f} s, {len(twice)} delivered twice")
    assert len(twice) <= 20, "repeated more than the messages settled after the last commit"
