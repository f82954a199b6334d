"""Closed channels, deleted queues and failed releases."""

from __future__ import annotations

import asyncio

import aiormq
import pytest
from aiormq.abc import ChannelFrame
from pamqp.heartbeat import Heartbeat
from yarl import URL

from qkit import QueueService, Sent, Settings, consume
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.subscription import RabbitSubscription
from qkit.errors import (
    BackendUnavailable,
    MessageNotFound,
    SubscriptionLost,
    Unsupported,
)
from qkit.message import Envelope
from tests.support.proxy import Proxy
from tests.support.rabbitmq import (
    consumers,
    declare,
    is_,
    spec,
    take,
)
from tests.support.waiting import eventually


async def test_a_channel_closed_by_the_broker_ends_the_subscription_with_the_reason(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope("a", b"x")])
    async with backend.subscribe(spec(name)) as subscription:
        (held,) = await take(subscription)
        receiving = asyncio.ensure_future(subscription.receive(1))
        assert subscription._channel is not None
        await subscription._channel.basic_ack(4711)  # 406: an unknown delivery tag
        with pytest.raises(SubscriptionLost, match="unknown delivery tag") as caught:
            await receiving
        assert isinstance(caught.value.cause, aiormq.exceptions.ChannelPreconditionFailed)
        with pytest.raises(SubscriptionLost):
            await subscription.ack(held)
    async with backend.subscribe(spec(name)) as again:
        (delivery,) = await take(again)
        assert delivery.envelope.id == "a"


async def test_a_service_consumes_again_after_its_channel_is_closed(
    rabbitmq_url: str, raw: aiormq.Channel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RabbitSubscription] = []
    got: asyncio.Queue[int] = asyncio.Queue()
    original_open = RabbitSubscription.open

    async def record(subscription: RabbitSubscription) -> None:
        await original_open(subscription)
        opened.append(subscription)

    @consume(name)
    async def handle(number: int) -> None:
        got.put_nowait(number)

    monkeypatch.setattr(RabbitSubscription, "open", record)
    service = QueueService(Settings(type="rabbitmq", url=rabbitmq_url))
    service.register(handle)

    async def received(number: int) -> None:
        while (other := await got.get()) != number:
            assert other == number - 1  # redelivered, as its ack was lost with the channel

    async with service, asyncio.timeout(60):
        await service.send(name, 1)
        await received(1)
        assert opened[0]._channel is not None
        await opened[0]._channel.basic_ack(4711)
        await eventually(lambda: len(opened) == 2)
        await eventually(lambda: is_(consumers(raw, name), 1))
        await service.send(name, 2)
        await received(2)
        await raw.queue_delete(name)
        await eventually(lambda: len(opened) == 3)
        await eventually(lambda: is_(consumers(raw, name), 1))
        await service.send(name, 3)
        await received(3)
    for queue in (name, f"{name}.dlq"):
        await raw.queue_delete(queue)


async def test_a_handler_whose_channel_was_closed_is_cancelled_while_no_receive_is_waiting(
    rabbitmq_url: str, raw: aiormq.Channel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is redelivered, so the handler must not continue."""
    opened: list[RabbitSubscription] = []
    original_open = RabbitSubscription.open
    began: list[int] = []
    cancelled = asyncio.Event()

    async def record(subscription: RabbitSubscription) -> None:
        await original_open(subscription)
        opened.append(subscription)

    @consume(name, prefetch=1)
    async def handle(number: int) -> None:
        began.append(number)
        if len(began) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    monkeypatch.setattr(RabbitSubscription, "open", record)
    service = QueueService(Settings(type="rabbitmq", url=rabbitmq_url))
    service.register(handle)
    async with service, asyncio.timeout(60):
        await service.send(name, 1)
        await eventually(lambda: began == [1])
        assert not opened[0]._arrivals.receivers, "a receive is waiting despite prefetch=1"
        assert opened[0]._channel is not None
        await opened[0]._channel.basic_ack(4711)
        await cancelled.wait()
        await eventually(lambda: began == [1, 1])
    for queue in (name, f"{name}.dlq"):
        await raw.queue_delete(queue)


async def test_a_deleted_queue_ends_its_subscriptions(backend: RabbitMQBackend, name: str) -> None:
    await declare(backend, name)
    async with backend.subscribe(spec(name)) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(1))
        await asyncio.sleep(0.05)
        await backend.delete(name)
        with pytest.raises(SubscriptionLost, match="deleted"):
            await receiving
    assert name not in await backend.queues()


async def test_a_message_whose_release_failed_is_requeued(
    classic: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declare(classic, name)
    await classic.publish(name, [Envelope("a", b"x")])
    async with classic.subscribe(spec(name, prefetch=1)) as subscription:
        (first,) = await take(subscription)

        async def fail(*arguments: object) -> None:
            raise BackendUnavailable("cannot publish")

        monkeypatch.setattr(subscription, "_republish", fail)
        with pytest.raises(BackendUnavailable):
            await subscription.release(first, 1.0)
        (again,) = await take(subscription)
        assert (again.envelope.id, again.envelope.attempt) == ("a", 1)


async def test_a_delivery_can_be_settled_only_once_and_only_by_its_subscription(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope("a", b"x"), Envelope("b", b"x")])
    async with (
        backend.subscribe(spec(name, prefetch=1)) as one,
        backend.subscribe(spec(name, prefetch=1)) as two,
    ):
        (first,), (second,) = await take(one), await take(two)
        with pytest.raises(MessageNotFound):
            await one.ack(second)
        with pytest.raises(Unsupported):
            await one.extend(first, 1.0)
        await one.ack(first)
        with pytest.raises(MessageNotFound):
            await one.release(first, 0.0)


@pytest.mark.parametrize("count", [1, 3])
async def test_sends_that_wait_for_a_full_write_queue_fail_when_the_connection_is_lost(
    rabbitmq_url: str, name: str, count: int
) -> None:
    with Proxy(URL(rabbitmq_url).port or 0) as proxy:
        backend = RabbitMQBackend(str(URL(rabbitmq_url).with_port(proxy.port)))
        await backend.start()
        await declare(backend, name)
        await backend.publish(name, [Envelope("first", b"x")])
        current = backend._publisher._shared.value
        assert current is not None
        queue = current.channel.write_queue
        beat = ChannelFrame.marshall(0, [Heartbeat()])
        proxy.black_hole()
        stuck = current.channel.create_future()
        await queue.put(ChannelFrame(beat.payload * 3_000_000, False, stuck))
        await eventually(queue.empty)
        while not queue.full():
            queue.put_nowait(beat)
        sends = [
            asyncio.ensure_future(
                backend.publish(name, [Envelope(f"{number}-{at}", b"x") for at in range(count)])
            )
            for number in range(3)
        ]
        await eventually(lambda: bool(queue._putters))  # type: ignore[attr-defined]
        proxy.reset()
        proxy.heal()
        async with asyncio.timeout(30):
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [BackendUnavailable] * 3
        await backend.publish(name, [Envelope("last", b"x")])
        await backend.delete(name)
        await backend.aclose()


async def test_a_send_that_is_cancelled_while_connecting_does_not_affect_other_sends(
    rabbitmq_url: str, name: str
) -> None:
    with Proxy(URL(rabbitmq_url).port or 0) as proxy:
        backend = RabbitMQBackend(str(URL(rabbitmq_url).with_port(proxy.port)))
        await backend.start()
        await declare(backend, name)
        before = len(proxy.connections)
        proxy.black_hole()
        first, second = (
            asyncio.ensure_future(backend.publish(name, [Envelope(id, b"x")]))
            for id in ("first", "second")
        )
        await eventually(lambda: len(proxy.connections) > before)
        first.cancel()
        await asyncio.wait([first])
        proxy.heal()
        (sent,) = await second
        assert isinstance(sent, Sent)
        assert first.cancelled()
        assert len(proxy.connections) == before + 1
        await backend.delete(name)
        await backend.aclose()
