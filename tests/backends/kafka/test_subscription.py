"""Releases, stops and purges: no message is lost, and keyed messages stay in order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from qkit._internal.clock import SystemClock
from qkit.backend import Delivery, QueueSpec
from qkit.backends.kafka.backend import KafkaBackend
from qkit.backends.kafka.codec import NO_ATTRIBUTES
from qkit.backends.kafka.retry_tiers import TIERS
from qkit.backends.kafka.retry_topic import retry_record
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import MessageNotFound, SendTimeout
from qkit.message import Envelope
from tests.support.kafka import spec, take
from tests.support.waiting import eventually


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def backend(kafka_url: str, name: str) -> AsyncIterator[KafkaBackend]:
    """Yield a backend with one queue that has one partition."""
    backend = KafkaBackend(kafka_url, heartbeat=0.2)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    yield backend
    await backend.aclose()


async def assert_no_delivery(subscription: KafkaSubscription, seconds: float = 0.5) -> None:
    found: list[Delivery] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not found:
                found = await subscription.receive(100)
    assert ids(found) == []


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.envelope.id for delivery in deliveries]


# Failed releases


@pytest.mark.parametrize("counts", [True, False])
async def test_a_message_whose_release_failed_is_redelivered_and_no_longer_counts_as_held(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    await backend.publish(name, [Envelope("a", b"")])
    async with backend.subscribe(spec(name, prefetch=1)) as subscription:
        (delivery,) = await take(subscription)

        async def fail(*arguments: object) -> Any:
            raise SendTimeout("not confirmed")

        with monkeypatch.context() as patch:
            patch.setattr(backend._publisher, "send", fail)
            with pytest.raises(SendTimeout):
                await subscription.release(delivery, 0.1, count_attempt=counts)
        with pytest.raises(MessageNotFound):
            await subscription.ack(delivery)
        (again,) = await take(subscription)
        assert (again.envelope.id, again.envelope.attempt) == ("a", 1 + counts)
        await subscription.ack(again)
        await assert_no_delivery(subscription)
    async with backend.subscribe(spec(name)) as successor:
        await assert_no_delivery(successor)


async def test_a_message_whose_release_was_cancelled_is_delivered_again(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish(name, [Envelope("a", b"")])
    async with backend.subscribe(spec(name, prefetch=1)) as subscription:
        (delivery,) = await take(subscription)

        async def hang(*arguments: object) -> Any:
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(backend._publisher, "send", hang)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await subscription.release(delivery, 0.1)
        assert ids(await take(subscription)) == ["a"]


# Stopping


def owner_and_other(
    name: str, one: KafkaSubscription, two: KafkaSubscription
) -> tuple[KafkaSubscription, KafkaSubscription]:
    """Return the subscription that has the queue's only partition, and then the other one."""
    has_it = any(partition.topic == name for partition in one.membership.trackers)
    return (one, two) if has_it else (two, one)


async def test_a_stopping_consumer_preserves_the_order_of_a_key(
    backend: KafkaBackend, name: str
) -> None:
    """Later messages with the key wait until the first is settled, on every consumer."""
    await backend.publish(name, [Envelope(id, b"", key="same") for id in "abc"])
    async with (
        backend.subscribe(spec(name)) as subscription,
        backend.subscribe(spec(name)) as other,
    ):
        owner, successor = owner_and_other(name, subscription, other)
        first, second, third = await take(owner, 3)
        await owner.release(third, 0.0, count_attempt=False)  # stays in memory, as not yet stopped
        await owner.stop()
        await owner.release(second, 0.0, count_attempt=False)
        await assert_no_delivery(successor, 1.0)
        await owner.ack(first)
        assert ids(await take(successor, 2)) == ["b", "c"]


async def test_messages_without_a_key_move_from_a_stopping_consumer_to_another(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, [Envelope(id, b"") for id in "abc"])
    async with (
        backend.subscribe(spec(name)) as subscription,
        backend.subscribe(spec(name)) as other,
    ):
        owner, successor = owner_and_other(name, subscription, other)
        _, second, third = await take(owner, 3)
        await owner.release(third, 0.0, count_attempt=False)
        await owner.stop()
        await owner.release(second, 0.0, count_attempt=False)
        assert sorted(ids(await take(successor, 2))) == ["b", "c"]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
async def test_released_messages_keep_their_order(
    backend: KafkaBackend, name: str, order: tuple[str, ...]
) -> None:
    await backend.publish(name, [Envelope(each, b"", key="k") for each in "abcd"])
    async with backend.subscribe(spec(name)) as subscription:
        held = {delivery.envelope.id: delivery for delivery in await take(subscription, 3)}
        for each in order:
            await subscription.release(held[each], 0.0, count_attempt=False)
        assert ids(await take(subscription, 4)) == ["a", "b", "c", "d"]


async def test_a_stopped_consumer_that_holds_a_message_of_every_tier_can_release_one(
    backend: KafkaBackend, name: str
) -> None:
    retry = await backend._ensure_retry_topic(name)
    now = time.time()
    await backend._publisher.send(
        retry,
        [
            retry_record(Envelope(f"tier {tier}", b""), 0, now - 1, now, NO_ATTRIBUTES)._replace(
                partition=tier
            )
            for tier in range(TIERS)
        ],
    )
    async with backend.subscribe(spec(name)) as subscription:
        held = await take(subscription, TIERS)
        await subscription.stop()
        await subscription.release(held[0], 0.0, count_attempt=False)
        for delivery in held[1:]:
            await subscription.ack(delivery)
    async with backend.subscribe(spec(name)) as successor:
        assert ids(await take(successor)) == ids(held[:1])


# Purging


class ClockInAnHour(SystemClock):
    def time(self) -> float:
        return super().time() + 3_600


async def test_a_purge_removes_delayed_messages_from_memory(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, [Envelope("late", b"", not_before=time.time() + 60)])
    async with backend.subscribe(spec(name)) as subscription:
        retry_consumer = subscription._retry_consumer
        await eventually(lambda: len(retry_consumer._due))
        assert await backend.purge(name) == 1
        retry_consumer._clock = ClockInAnHour()
        await retry_consumer._process_due()
        assert len(retry_consumer._due) == 0
        await assert_no_delivery(subscription)


async def test_a_purge_keeps_messages_sent_after_it_began(backend: KafkaBackend, name: str) -> None:
    await backend.publish(name, [Envelope("before", b"")])
    async with backend.subscribe(spec(name)) as subscription:
        ends = dict((await backend._admin._log(name, "purge")).ends)
        await backend.publish(name, [Envelope("after", b"")])
        for delivery in reversed(await take(subscription, 2)):
            await subscription.release(delivery, 0.0, count_attempt=False)
        assert subscription.purge(ends) == 1
        assert ids(await take(subscription)) == ["after"]
        await assert_no_delivery(subscription)
