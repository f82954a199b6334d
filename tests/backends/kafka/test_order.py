"""Ordered subscriptions: the order of a key survives delays, releases and a change of consumer."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from qkit._internal.clock import SystemClock
from qkit.backend import Delivery, QueueSpec
from qkit.backends.kafka import driver
from qkit.backends.kafka.backend import KafkaBackend
from qkit.backends.kafka.fetched_message import FetchedMessage
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import BackendUnavailable, QueueError
from qkit.message import GROUP, Envelope
from tests.support.kafka import spec, take
from tests.support.waiting import eventually


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def backend(kafka_url: str, name: str) -> AsyncIterator[KafkaBackend]:
    """Yield a backend with one queue that has four partitions."""
    backend = KafkaBackend(kafka_url, partitions=4, heartbeat=0.2)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    yield backend
    await backend.aclose()


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.envelope.id for delivery in deliveries]


def keyed(letters: str, key: str = "k", **options: Any) -> list[Envelope]:
    return [Envelope(letter, b"{}", key=key, **options) for letter in letters]


async def written_to_retry_topic(backend: KafkaBackend, name: str) -> int:
    return sum((await backend._cluster.offsets(f"{name}.retry", driver.LATEST)).values())


# Releases


async def test_released_messages_are_delivered_again_in_order_by_the_next_subscription(
    backend: KafkaBackend, name: str
) -> None:
    """A pause, a shutdown and a lost connection all end the subscription."""
    await backend.publish(name, keyed("abcdefghij"))
    async with backend.subscribe(spec(name, ordered=True)) as first:
        a, b, *others = await take(first, 7)
        await first.ack(a)
        await first.stop()
        for delivery in reversed(others):
            await first.release(delivery, 0.0, count_attempt=False)
        await first.ack(b)
    async with backend.subscribe(spec(name, ordered=True)) as second:
        assert ids(await take(second, 8)) == list("cdefghij")
    assert await written_to_retry_topic(backend, name) == 0


async def test_messages_released_before_the_stop_are_delivered_in_order(
    backend: KafkaBackend, name: str
) -> None:
    """A subscription that goes on delivers them next, in order; otherwise its successor does."""
    await backend.publish(name, keyed("abcdef"))
    async with backend.subscribe(spec(name, ordered=True)) as first:
        for delivery in reversed(await take(first, 4)):
            await first.release(delivery, 0.0, count_attempt=False)
        again = await take(first, 6)
        assert ids(again) == list("abcdef")
        for delivery in reversed(again):
            await first.release(delivery, 0.0, count_attempt=False)
    async with backend.subscribe(spec(name, ordered=True)) as second:
        assert ids(await take(second, 6)) == list("abcdef")


async def test_a_release_with_an_attempt_and_a_delay_holds_back_later_messages(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, keyed("ab"))
    async with backend.subscribe(spec(name, ordered=True)) as subscription:
        (delivery,) = await subscription.receive(1)
        released_at = time.monotonic()
        await subscription.release(delivery, 0.3)
        again = await take(subscription, 2)
        assert time.monotonic() - released_at >= 0.3
        assert [(item.envelope.id, item.envelope.attempt) for item in again] == [
            ("a", 2),
            ("b", 1),
        ]
    assert await written_to_retry_topic(backend, name) == 0


async def test_a_stop_copies_nothing_to_the_retry_topic_also_without_a_key(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, [Envelope(letter, b"{}") for letter in "abc"])
    async with backend.subscribe(spec(name, ordered=True)) as first:
        held, returned, waiting = await take(first, 3)
        await first.release(waiting, 0.0, count_attempt=False)
        await first.stop()
        await first.release(returned, 0.0)
        await first.ack(held)
    async with backend.subscribe(spec(name, ordered=True)) as second:
        assert ids(await take(second, 2)) == list("bc")
    assert await written_to_retry_topic(backend, name) == 0


async def test_a_key_moves_to_another_consumer_only_after_its_messages_are_settled(
    backend: KafkaBackend, name: str
) -> None:
    await backend.publish(name, keyed("abc"))
    async with backend.subscribe(spec(name, ordered=True)) as owner:
        a, *rest = await take(owner, 3)
        async with backend.subscribe(spec(name, ordered=True)) as other:
            await owner.stop()
            for delivery in rest:
                await owner.release(delivery, 0.0, count_attempt=False)
            receiving = asyncio.create_task(take(other, 2))
            await asyncio.sleep(1.0)
            assert not receiving.done()
            await owner.ack(a)
            assert ids(await receiving) == list("bc")


# Delays


async def test_a_delayed_message_is_written_to_the_partition_of_its_key_when_due(
    backend: KafkaBackend, name: str
) -> None:
    due = SystemClock().time() + 0.5
    await backend.publish(name, keyed("abc", not_before=due))
    await backend.publish(name, keyed("d"))
    async with backend.subscribe(spec(name, ordered=True)) as subscription:
        (first,) = await take(subscription)
        assert first.envelope.id == "d"
        delayed = await take(subscription, 3)
        assert SystemClock().time() >= due
        assert ids(delayed) == list("abc")
        places = [item.receipt_of(FetchedMessage, "", "") for item in [first, *delayed]]
        assert len({place.partition for place in places}) == 1
        for delivery in [first, *delayed]:
            await subscription.ack(delivery)
    async with backend.subscribe(spec(name)) as unordered:
        assert await no_delivery(unordered), "the retry topic must be settled too"
    assert (await backend.stats(name)).depth == 0


async def no_delivery(subscription: KafkaSubscription, seconds: float = 0.5) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return not await subscription.receive(1)
    except TimeoutError:
        return True


async def test_a_retry_of_an_unordered_consumer_keeps_its_attempt_and_its_expiry(
    backend: KafkaBackend, name: str
) -> None:
    """A channel may become ordered while retries wait."""
    await backend.publish(name, keyed("a", expires_at=9e9))
    async with backend.subscribe(spec(name)) as unordered:
        (delivery,) = await take(unordered)
        delivery.envelope.headers["seen"] = "yes"
        await unordered.release(delivery, 0.1)
    async with backend.subscribe(spec(name, ordered=True)) as subscription:
        (again,) = await take(subscription)
        assert again.envelope == Envelope(
            "a", b"{}", {"seen": "yes"}, key="k", expires_at=9e9, attempt=2
        )


async def test_a_delayed_message_of_a_topic_reaches_each_ordered_group_once(
    backend: KafkaBackend, name: str
) -> None:
    topic = f"{name}-t"
    await backend.declare(QueueSpec(name=topic, broadcast=True))
    one = spec(topic, group="one", broadcast=True, ordered=True)
    two = spec(topic, group="two", broadcast=True, ordered=True)
    async with backend.subscribe(one) as first, backend.subscribe(two) as second:
        due = SystemClock().time() + 0.3
        await backend.publish(topic, keyed("ab", not_before=due))
        for subscription in (first, second):
            found = await take(subscription, 2)
            assert ids(found) == list("ab")
            assert all(GROUP not in item.envelope.headers for item in found)
            for delivery in found:
                await subscription.ack(delivery)
        for subscription in (first, second):
            assert await no_delivery(subscription)


async def test_due_messages_keep_their_order_when_writing_them_fails(
    backend: KafkaBackend,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A later message of the key must not be written before an earlier one that failed."""
    caplog.set_level(logging.WARNING, "qkit")
    send = backend._publisher.send
    failures = [BackendUnavailable("down"), BackendUnavailable("down")]

    async def fail_for_a(topic: str, records: Any, operation: str = "publish") -> Any:
        if topic == name and records[0].headers[0] == ("qkit-id", b"a") and failures:
            error = failures.pop()
            if failures:
                raise error
            results: list[object] = [error] * len(records)
            return results
        return await send(topic, records, operation)

    now = SystemClock().time()
    await backend.publish(name, keyed("a", not_before=now + 0.2))
    await backend.publish(name, keyed("b", not_before=now + 0.9))
    monkeypatch.setattr(backend._publisher, "send", fail_for_a)
    async with backend.subscribe(spec(name, ordered=True)) as subscription:
        assert ids(await take(subscription, 2)) == list("ab")
    lines = [record for record in caplog.records if "due" in record.getMessage()]
    assert len(lines) == 2
    assert all(record.exc_info is None for record in lines)


async def test_a_due_message_that_no_consumer_has_written_is_written_by_the_next_one(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = backend._publisher.send
    tried: list[str] = []

    async def refuse(topic: str, records: Any, operation: str = "publish") -> Any:
        tried.append(topic)
        error: QueueError = BackendUnavailable("down")
        return [error] * len(records)

    await backend.publish(name, keyed("ab", not_before=SystemClock().time() + 0.1))
    with monkeypatch.context() as patch:
        patch.setattr(backend._publisher, "send", refuse)
        async with backend.subscribe(spec(name, ordered=True)):
            await eventually(lambda: tried)
    assert backend._publisher.send == send
    async with backend.subscribe(spec(name, ordered=True)) as successor:
        assert ids(await take(successor, 2)) == list("ab")
