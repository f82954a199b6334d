"""Sending and receiving: cancellations, prefetch, acks in any order, crashes and expiry."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from typing import Any

import aiormq
import pytest

from qkit import QueueService, Settings, consume
from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit.backend import (
    Delivery,
    QueueSpec,
)
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq import subscription as subscription_module
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.subscription import RabbitSubscription
from qkit.errors import (
    BackendUnavailable,
    InvalidHeader,
    PartialSend,
    QueueNotFound,
    SubscriptionLost,
)
from qkit.message import Envelope, Reason, Sent
from tests.support.rabbitmq import (
    dead,
    declare,
    has_depth,
    is_,
    ready,
    spec,
    take,
)
from tests.support.waiting import eventually


async def test_an_invalid_header_fails_only_its_message(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    bad = {"content-type": "x" * 256}
    wanted = {"a": {}, "b": bad, "c": bad, "d": {}}
    with pytest.raises(PartialSend) as caught:
        await backend.publish(name, [Envelope(id, b"x", headers) for id, headers in wanted.items()])
    first, second, third, last = caught.value.results
    assert (first, last) == (Sent("a"), Sent("d"))
    assert isinstance(second, InvalidHeader)
    assert isinstance(third, InvalidHeader)
    with pytest.raises(InvalidHeader):
        await backend.publish(name, [Envelope("e", b"x", bad)])
    assert [item.id for item in await backend.peek(name, 9)] == ["a", "d"]


async def test_a_cancelled_receive_loses_no_message(backend: RabbitMQBackend, name: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    await declare(backend, name)
    got: list[str] = []
    sent: list[str] = []
    async with (
        backend.subscribe(spec(name, prefetch=3)) as one,
        backend.subscribe(spec(name, prefetch=3)) as two,
    ):

        async def settle(subscription: RabbitSubscription, found: list[Delivery]) -> None:
            for delivery in found:
                assert delivery.envelope.attempt == 1
                got.append(delivery.envelope.id)
                await subscription.ack(delivery)

        for _ in range(50):
            subscription = rng.choice([one, two])
            receiving = asyncio.ensure_future(subscription.receive(5))
            await asyncio.sleep(rng.choice([0, 0.0005, 0.002]))
            envelope = Envelope(new_id(), b"x")
            sending = asyncio.ensure_future(backend.publish(name, [envelope]))
            await asyncio.sleep(rng.choice([0, 0.0003, 0.001, 0.003]))
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await settle(subscription, await receiving)
            await sending
            sent.append(envelope.id)

        async def drain(subscription: RabbitSubscription) -> None:
            while len(got) < 50:
                await settle(subscription, await subscription.receive(50))

        draining = [asyncio.ensure_future(drain(each)) for each in (one, two)]
        await asyncio.wait(draining, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for task in draining:
            task.cancel()
    assert sorted(got) == sorted(sent)
    assert (await backend.stats(name)).depth == 0


async def test_the_confirmation_of_a_cancelled_send_does_not_reach_the_next_send(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    for number in range(40):
        sending = asyncio.ensure_future(backend.publish(name, [Envelope(f"c{number}", b"x")]))
        for _ in range(number % 12):
            await asyncio.sleep(0)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        # Send the same id to a missing queue, so that the outcome differs.
        with pytest.raises(QueueNotFound):
            await backend.publish(f"{name}-missing", [Envelope(f"c{number}", b"x")])
    assert await backend.publish(name, [Envelope("last", b"x")]) == [Sent("last")]


async def test_messages_with_the_same_id_get_separate_outcomes(
    backend: RabbitMQBackend, name: str
) -> None:
    """The driver would swap the outcomes of two unconfirmed messages on one channel."""
    await declare(backend, name)
    for _ in range(10):
        good, bad = await asyncio.gather(
            backend.publish(name, [Envelope("same", b"x")] * 3),
            backend.publish(f"{name}-missing", [Envelope("same", b"x")]),
            return_exceptions=True,
        )
        assert good == [Sent("same")] * 3
        assert isinstance(bad, QueueNotFound)
    assert (await backend.stats(name)).depth == 30


async def test_an_unroutable_message_raises_queue_not_found_and_later_messages_arrive(
    backend: RabbitMQBackend, rabbitmq_url: str, name: str
) -> None:
    await declare(backend, name)
    with pytest.raises(QueueNotFound) as caught:
        await backend.publish(f"{name}-missing", [Envelope("a", b"x")])
    assert (caught.value.queue, caught.value.message_id) == (f"{name}-missing", "a")
    assert isinstance(caught.value.cause, aiormq.exceptions.PublishError)
    assert await backend.publish(name, [Envelope("b", b"x")]) == [Sent("b")]


async def test_a_send_to_a_deleted_topic_does_not_fail_other_sends_permanently(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    """An unknown exchange closes the channel and fails all its unconfirmed messages."""
    await declare(backend, name)
    await backend.declare(QueueSpec(name=f"{name}-topic", broadcast=True))
    await raw.exchange_delete(f"{name}-topic")
    to_topic, others = await asyncio.gather(
        backend.publish(f"{name}-topic", [Envelope("t", b"x")]),
        backend.publish(name, [Envelope(str(number), b"x") for number in range(50)]),
        return_exceptions=True,
    )
    assert isinstance(to_topic, QueueNotFound)
    failed = others.results if isinstance(others, PartialSend) else [others]
    for other in failed:
        assert isinstance(other, list | Sent | BackendUnavailable), "the error is not retriable"

    async def sent(queue: str) -> bool:
        with contextlib.suppress(BackendUnavailable):  # the driver may have lost its connection
            return await backend.publish(queue, [Envelope("again", b"x")]) == [Sent("again")]
        return False

    await eventually(lambda: sent(name))
    await backend.declare(QueueSpec(name=f"{name}-topic", broadcast=True))
    await eventually(lambda: sent(f"{name}-topic"))


async def test_prefetched_messages_are_returned_when_a_consumer_stops(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope(str(number), b"x") for number in range(10)])
    async with backend.subscribe(spec(name, prefetch=8)) as subscription:
        (held,) = await take(subscription)
        await eventually(lambda: len(subscription._arrivals) == 7)
        await subscription.stop()
        await eventually(lambda: is_(ready(raw, name), 9))
        await subscription.ack(held)
    async with backend.subscribe(spec(name, prefetch=20)) as again:
        found = await take(again, 9)
        assert {delivery.envelope.attempt for delivery in found} == {1}, "an attempt was counted"
        wanted = [str(number) for number in range(1, 10)]
        assert sorted(delivery.envelope.id for delivery in found) == wanted
        if not backend._quorum:
            assert [delivery.envelope.id for delivery in found] == wanted, "the order changed"


async def test_a_paused_consumer_does_not_keep_messages_from_other_consumers(
    backend: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "UNRECEIVED_RETURN_SECONDS", 0.2)
    await declare(backend, name)
    async with (
        backend.subscribe(spec(name)) as paused,
        backend.subscribe(spec(name)) as other,
    ):
        waiting = asyncio.ensure_future(paused.receive(1))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await backend.publish(name, [Envelope(str(number), b"x") for number in range(6)])
        found = await take(other, 6)
        assert {delivery.envelope.attempt for delivery in found} == {1}
        for delivery in found:
            await other.ack(delivery)
        await backend.publish(name, [Envelope("late", b"x")])
        receiving = [asyncio.ensure_future(take(each)) for each in (paused, other)]
        done, pending = await asyncio.wait(
            receiving, timeout=60, return_when=asyncio.FIRST_COMPLETED
        )
        assert done, "neither consumer received the message"
        for task in pending:
            task.cancel()


async def test_prefetched_messages_count_no_attempt_if_stop_was_cancelled(
    quorum: RabbitMQBackend, name: str
) -> None:
    await declare(quorum, name)
    await quorum.publish(name, [Envelope(str(number), b"x") for number in range(5)])
    async with quorum.subscribe(spec(name)) as subscription:
        await eventually(lambda: len(subscription._arrivals) == 5)
        stopping = asyncio.ensure_future(subscription.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
    async with quorum.subscribe(spec(name)) as again:
        found = await take(again, 5)
        assert [delivery.envelope.id for delivery in found] == list("01234")
        assert {delivery.envelope.attempt for delivery in found} == {1}


async def test_an_unreceived_message_is_requeued_if_no_copy_can_be_sent(
    quorum: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message must not stay with a paused consumer."""
    monkeypatch.setattr(subscription_module, "UNRECEIVED_RETURN_SECONDS", 0.05)
    monkeypatch.setattr(subscription_module, "REQUEUE_DELAY_SECONDS", 0.05)
    await declare(quorum, name)
    failed = 0

    async def fail(*arguments: object) -> None:
        nonlocal failed
        failed += 1
        raise BackendUnavailable("no copy can be sent")

    async with quorum.subscribe(spec(name)) as paused:
        paused._republish = fail
        await quorum.publish(name, [Envelope("a", b"x")])
        await eventually(lambda: failed)
        async with quorum.subscribe(spec(name)) as other:
            (delivery,) = await take(other)
            assert delivery.envelope.id == "a"
            await other.ack(delivery)


@pytest.mark.proves("003-speed-2")
@pytest.mark.parametrize("prefetch", [2, 5])
async def test_the_broker_delivers_no_more_unacknowledged_messages_than_the_prefetch(
    rabbitmq_url: str, raw: aiormq.Channel, name: str, prefetch: int
) -> None:
    running = 0
    gate = asyncio.Event()

    @consume(name, concurrency=2)
    async def handle(number: int) -> None:
        nonlocal running
        running += 1
        await gate.wait()

    service = QueueService(Settings(type="rabbitmq", url=rabbitmq_url, prefetch=prefetch))
    service.register(handle)
    async with service:
        await service.send_many(name, range(30))
        await eventually(lambda: running == 2)
        await eventually(lambda: is_(ready(raw, name), 30 - prefetch))
        await asyncio.sleep(0.3)
        assert await ready(raw, name) == 30 - prefetch, "more than the prefetch left the queue"
        gate.set()
        await eventually(lambda: running == 30)
    for queue in (name, f"{name}.dlq"):
        await raw.queue_delete(queue)


def test_the_default_prefetch_is_one(rabbitmq_url: str) -> None:
    assert Settings(type="rabbitmq", url=rabbitmq_url).effective_prefetch == 1


async def test_a_slow_message_does_not_delay_the_acks_of_later_messages(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope(str(number), b"x") for number in range(20)])
    async with backend.subscribe(spec(name, prefetch=2)) as subscription:
        (slow,) = await take(subscription)
        for number in range(1, 20):
            (delivery,) = await take(subscription)
            assert delivery.envelope.id == str(number)
            await subscription.ack(delivery)
        await subscription.ack(slow)
    assert (await backend.stats(name)).depth == 0


async def test_acks_in_any_order_settle_exactly_the_acked_messages(
    backend: RabbitMQBackend, name: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    await declare(backend, name)
    await backend.publish(name, [Envelope(str(number), b"x") for number in range(200)])
    kept: set[str] = set()
    async with backend.subscribe(spec(name, prefetch=200)) as subscription:
        found = await take(subscription, 200)
        rng.shuffle(found)
        for delivery in found:
            choice = rng.random()
            if choice < 0.2:
                kept.add(delivery.envelope.id)
                await subscription.release(delivery, 0.0, count_attempt=False)
            elif choice < 0.3:
                kept.add(delivery.envelope.id)  # unsettled when the subscription ends
            else:
                await subscription.ack(delivery)
            if rng.random() < 0.1:
                await asyncio.sleep(0)
    assert {envelope.id for envelope in await backend.peek(name, 300)} == kept


async def test_a_message_that_crashed_every_consumer_is_dead_lettered_by_the_service(
    quorum: RabbitMQBackend, rabbitmq_url: str, name: str
) -> None:
    await declare(quorum, name)
    await quorum.publish(name, [Envelope("killer", b"1")])
    for attempt in (1, 2, 3):
        async with quorum.subscribe(spec(name)) as subscription:
            (delivery,) = await take(subscription)
            assert delivery.envelope.attempt == attempt
            assert subscription._channel is not None
            await subscription._channel.close()  # as if the process had crashed
            with pytest.raises(SubscriptionLost):
                await subscription.receive(1)
    async with service_without_calls(rabbitmq_url, name, retry={"max_attempts": 3}) as service:
        letter = await dead(quorum, name)
        await eventually(lambda: has_depth(quorum, name, 0))
        assert service.metrics().messages_dead_lettered == 1
    assert (letter.reason, letter.attempts) == (Reason.MAX_RETRIES_EXCEEDED, 3)
    assert (letter.message_id, letter.error_type) == ("killer", "LeaseExpired")


async def test_an_expired_message_is_delivered_even_if_it_is_delayed(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    """The service can then write the dead letter immediately."""
    await declare(backend, name)
    now = SystemClock().time()
    expired = Envelope("a", b"1", expires_at=now - 1)
    properties = codec.encode(expired, now=now, priority=None, expire=False, due=now + 3600)
    await raw.basic_publish(b"1", routing_key=name, properties=properties)
    async with backend.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        assert delivery.envelope.attempt == 1
        assert delivery.envelope.expires_at == pytest.approx(now - 1, abs=0.01)
        await subscription.ack(delivery)


async def test_a_deleted_dead_letter_queue_is_recreated_for_an_expired_message(
    backend: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    await declare(backend, name)
    backend._topology.expiring.clear()  # or the broker would remove it from a quorum queue
    async with service_without_calls(rabbitmq_url, name, quorum=backend._quorum) as service:
        await raw.queue_delete(f"{name}.dlq")
        await backend.publish(name, [Envelope("a", b"1", expires_at=SystemClock().time() - 1)])
        await eventually(lambda: service.metrics().messages_dead_lettered == 1)
        letter = await dead(backend, name)
    assert (letter.reason, letter.attempts) == (Reason.TTL_EXPIRED, 0)


@contextlib.asynccontextmanager
async def service_without_calls(
    url: str, name: str, *, quorum: bool = True, **settings: Any
) -> AsyncGenerator[QueueService, None]:
    """Run a service and fail if its handler is called."""
    called: list[int] = []

    @consume(name)
    async def handle(number: int) -> None:
        called.append(number)

    service = QueueService(
        Settings(type="rabbitmq", url=url, **settings), backend=RabbitMQBackend(url, quorum=quorum)
    )
    service.register(handle)
    async with service:
        yield service
    assert called == []
