"""A subscription when things fail or come at a bad moment: nothing is lost, or out of turn."""

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
    """One queue with one partition."""
    backend = KafkaBackend(kafka_url, heartbeat=0.2)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    yield backend
    await backend.aclose()


async def nothing_comes(subscription: KafkaSubscription, seconds: float = 0.5) -> None:
    found: list[Delivery] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not found:
                found = await subscription.receive(100)
    assert ids(found) == []


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.envelope.id for delivery in deliveries]


# A release that fails


@pytest.mark.parametrize("counts", [True, False])
async def test_what_could_not_be_sent_back_comes_again_and_keeps_no_slot(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    await backend.publish(name, [Envelope("a", b"")])
    async with backend.subscribe(spec(name, prefetch=1)) as subscription:
        (delivery,) = await take(subscription)

        async def refuse(*arguments: object) -> Any:
            raise SendTimeout("not confirmed")

        with monkeypatch.context() as patch:
            patch.setattr(backend._publisher, "send", refuse)
            with pytest.raises(SendTimeout):
                await subscription.release(delivery, 0.1, count_attempt=counts)
        with pytest.raises(MessageNotFound):
            await subscription.ack(delivery)
        (again,) = await take(subscription)
        assert (again.envelope.id, again.envelope.attempt) == ("a", 1 + counts)
        await subscription.ack(again)
        await nothing_comes(subscription)
    async with backend.subscribe(spec(name)) as heir:
        await nothing_comes(heir)


async def test_what_was_being_sent_back_when_time_ran_out_comes_again(
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


def owner_and_heir(
    name: str, one: KafkaSubscription, two: KafkaSubscription
) -> tuple[KafkaSubscription, KafkaSubscription]:
    """Who has the only partition of the queue, and who waits for it."""
    has_it = any(partition.topic == name for partition in one.membership.trackers)
    return (one, two) if has_it else (two, one)


async def test_a_stopping_consumer_lets_nothing_overtake_in_its_key(
    backend: KafkaBackend, name: str
) -> None:
    """While the first is worked on its successors wait for it, whoever handles them."""
    await backend.publish(name, [Envelope(id, b"", key="same") for id in "abc"])
    async with (
        backend.subscribe(spec(name)) as subscription,
        backend.subscribe(spec(name)) as other,
    ):
        owner, heir = owner_and_heir(name, subscription, other)
        first, second, third = await take(owner, 3)
        await owner.release(third, 0.0, count_attempt=False)  # before the end: it waits here
        await owner.stop()
        await owner.release(second, 0.0, count_attempt=False)
        await nothing_comes(heir, 1.0)
        await owner.ack(first)
        assert ids(await take(heir, 2)) == ["b", "c"]


async def test_a_stopping_consumer_passes_on_what_has_no_key(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, [Envelope(id, b"") for id in "abc"])
    async with (
        backend.subscribe(spec(name)) as subscription,
        backend.subscribe(spec(name)) as other,
    ):
        owner, heir = owner_and_heir(name, subscription, other)
        _, second, third = await take(owner, 3)
        await owner.release(third, 0.0, count_attempt=False)
        await owner.stop()
        await owner.release(second, 0.0, count_attempt=False)
        assert sorted(ids(await take(heir, 2))) == ["b", "c"]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
async def test_what_is_given_back_keeps_its_order(
    backend: KafkaBackend, name: str, order: tuple[str, ...]
) -> None:
    await backend.publish(name, [Envelope(each, b"", key="k") for each in "abcd"])
    async with backend.subscribe(spec(name)) as subscription:
        held = {delivery.envelope.id: delivery for delivery in await take(subscription, 3)}
        for each in order:
            await subscription.release(held[each], 0.0, count_attempt=False)
        assert ids(await take(subscription, 4)) == ["a", "b", "c", "d"]


async def test_a_consumer_that_holds_something_of_every_tier_can_still_give_back(
    backend: KafkaBackend, name: str
) -> None:
    retry = await backend._need_retry_topic(name)
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
    async with backend.subscribe(spec(name)) as heir:
        assert ids(await take(heir)) == ids(held[:1])


# Purging


class InAnHour(SystemClock):
    def time(self) -> float:
        return super().time() + 3_600


async def test_a_purge_takes_what_waits_for_its_time_out_of_memory(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, [Envelope("late", b"", not_before=time.time() + 60)])
    async with backend.subscribe(spec(name)) as subscription:
        delays = subscription._retry_consumer
        await eventually(lambda: len(delays._due))
        assert await backend.purge(name) == 1
        delays._clock = InAnHour()
        await delays._let_go()
        assert len(delays._due) == 0
        await nothing_comes(subscription)


async def test_a_purge_leaves_what_was_sent_after_it_began(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, [Envelope("before", b"")])
    async with backend.subscribe(spec(name)) as subscription:
        ends = dict((await backend._admin._log(name, "purge")).ends)
        await backend.publish(name, [Envelope("after", b"")])
        for delivery in reversed(await take(subscription, 2)):
            await subscription.release(delivery, 0.0, count_attempt=False)
        assert subscription.purge(ends) == 1
        assert ids(await take(subscription)) == ["after"]
        await nothing_comes(subscription)
