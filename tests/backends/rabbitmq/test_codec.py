"""Message format: foreign messages, headers, and messages that the broker dead-letters."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

import aiormq
import pytest
from aiormq.abc import ChannelFrame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from pydantic import BaseModel

from qkit import Header, Message, QueueService, Settings, consume
from qkit._internal.clock import SystemClock
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.codec import encode
from qkit.message import Envelope, Reason
from tests.support.rabbitmq import (
    dead,
    declare,
    is_,
    ready,
    spec,
    take,
)
from tests.support.waiting import eventually


class Order(BaseModel):
    id: int


async def test_a_foreign_message_reaches_a_typed_handler_with_its_headers(
    raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    got: asyncio.Queue[tuple[Order, int, Message]] = asyncio.Queue()

    @consume(name)
    async def handle(
        order: Order, message: Message, shard: Annotated[int, Header("shard")] = 0
    ) -> None:
        got.put_nowait((order, shard, message))
        if message.attempt == 1:
            raise ValueError("not yet")

    settings = Settings(type="rabbitmq", url=rabbitmq_url, retry={"initial_delay": 0.1}, prefetch=5)
    service = QueueService(settings)
    service.register(handle)
    headers: dict[str, Any] = {
        "shard": 7,
        "big": 2**40,
        "flag": True,
        "price": 1.5,
        "raw": bytearray(b"\xff\x00"),
        "when": datetime(2024, 2, 29, tzinfo=UTC),
        "nested": {"a": [1, "two"]},
        "nothing": None,
    }
    async with service, asyncio.timeout(60):
        await raw.basic_publish(
            b'{"id": 1}',
            routing_key=name,
            mandatory=True,
            properties=Basic.Properties(
                headers=headers,
                correlation_id="c-1",
                reply_to="answers",
                message_type="order.placed",
                app_id="legacy",
            ),
        )
        for attempt in (1, 2):
            order, shard, message = await got.get()
            assert (order.id, shard, message.attempt) == (1, 7, attempt)
            found = {k: v for k, v in message.headers.items() if not k.startswith("qkit-")}
            assert found == {
                "shard": "7",
                "big": str(2**40),
                "flag": "true",
                "price": "1.5",
                "raw": "\\xff\x00",
                "when": "2024-02-29T00:00:00+00:00",
                "nested": '{"a": [1, "two"]}',
                "nothing": "",
                "correlation-id": "c-1",
                "reply-to": "answers",
                "type": "order.placed",
                "app-id": "legacy",
            }
        await service.delete(name)
        await service.delete(f"{name}.dlq")


async def test_a_released_foreign_message_keeps_the_types_of_its_headers(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(backend, name)
    sent = Basic.Properties(
        headers={"n": 7, "deep": {"a": 1}},
        correlation_id="c",
        reply_to="r",
        content_type="text/plain",
        timestamp=datetime(2024, 2, 29, tzinfo=UTC),
        priority=3,
    )
    await raw.basic_publish(b"x", routing_key=name, properties=sent)
    async with backend.subscribe(spec(name)) as subscription:
        (first,) = await take(subscription)
        first.envelope.headers["added"] = "1"
        await subscription.release(first, 0.0)
        await subscription.stop()
    message = await raw.basic_get(name, no_ack=True)
    found = message.header.properties
    headers = dict(found.headers or {})
    headers.pop("x-delivery-count", None)
    assert headers == {"n": 7, "deep": {"a": 1}, "added": "1", "qkit-attempts": 1}
    assert (found.correlation_id, found.reply_to) == ("c", "r")
    assert (found.content_type, found.timestamp, found.priority) == (
        "text/plain",
        sent.timestamp,
        3,
    )
    assert found.message_id == first.envelope.id


async def test_another_program_reads_what_qkit_sent(
    raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    async with QueueService(Settings(type="rabbitmq", url=rabbitmq_url)) as service:
        sent = await service.send(
            name,
            {"id": 1},
            headers={"tenant": "acme", "type": "order.placed", "CC": "x", "x-death": "y"},
            key="k",
            priority=8,
            ttl=60,
        )
        message = await raw.basic_get(name, no_ack=True)
        await service.delete(name)
        await service.delete(f"{name}.dlq")
    found = message.header.properties
    assert json.loads(message.body) == {"id": 1}
    assert (found.message_id, found.content_type, found.priority) == (
        sent.message_id,
        "application/json",
        8,
    )
    assert found.message_type == "order.placed"
    assert found.timestamp is not None
    assert abs(found.timestamp.timestamp() - SystemClock().time()) < 10
    assert found.expiration is None, "a classic queue could lose a message that expires"
    headers = dict(found.headers or {})
    assert headers.pop("qkit-expires-at") == pytest.approx((SystemClock().time() + 60) * 1000, 1e-4)
    assert headers == {
        "tenant": "acme",
        "qkit-key": "k",
        "qkit-header-CC": "x",
        "qkit-header-x-death": "y",
    }


async def test_headers_that_the_broker_interprets_arrive_unchanged(
    backend: RabbitMQBackend, name: str
) -> None:
    headers = {
        "CC": "elsewhere",
        "BCC": "elsewhere",
        "x-death": "no",
        "x-delivery-count": "9",
        "x-first-death-reason": "none",
        "reply-to": "amq.rabbitmq.reply-to",
        "correlation-id": "c" * 300,
        "content-type": "application/json",
        "type": "",
    }
    await declare(backend, name)
    await backend.publish(name, [Envelope("a", b"x", dict(headers))])
    async with backend.subscribe(spec(name)) as subscription:
        for attempt in (1, 2):
            (delivery,) = await take(subscription)
            assert delivery.envelope.headers == headers
            assert delivery.envelope.attempt == attempt
            await subscription.release(delivery, 0.0)


async def test_an_id_that_is_too_long_for_amqp_is_rejected(
    classic: RabbitMQBackend, name: str
) -> None:
    await declare(classic, name)
    with pytest.raises(ValueError, match="255"):
        await classic.publish(name, [Envelope("x" * 256, b"x")])


# Messages that the broker itself dead-letters


async def test_the_broker_and_the_service_write_the_same_dead_letter_for_an_expired_message(
    backend: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    await declare(backend, name)
    soon = SystemClock().time() + 0.3
    expiring = Envelope("a", b"x", {"h": "1"}, key="k", expires_at=soon)
    priority = None if backend._quorum else 5
    sent = encode(expiring, now=SystemClock().time(), priority=priority, expire=True)
    await raw.basic_publish(b"x", routing_key=name, properties=sent)
    by_broker = await dead(backend, name)
    assert await backend.purge(f"{name}.dlq") == 1
    expired = Envelope("a", b"x", {"h": "1"}, key="k", expires_at=SystemClock().time() - 1)
    backend._topology.expiring.clear()  # the broker must not remove this message
    await backend.publish(name, [expired])

    @consume(name)
    async def handle(body: bytes) -> None:
        raise AssertionError("an expired message was handled")

    service = QueueService(
        Settings(type="rabbitmq", url=rabbitmq_url),
        backend=RabbitMQBackend(rabbitmq_url, quorum=backend._quorum),
    )
    service.register(handle)
    async with service:
        by_service = await dead(backend, name)
    without_times = [
        replace(item, first_failed_at=0.0, last_failed_at=0.0) for item in (by_broker, by_service)
    ]
    assert without_times[0] == without_times[1]
    assert by_broker.reason == Reason.TTL_EXPIRED
    assert abs(by_broker.last_failed_at - soon) <= 2  # the broker records whole seconds


async def test_a_message_rejected_by_another_program_becomes_a_dead_letter(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope("a", b"x", {"h": "1"})])
    message = await raw.basic_get(name)
    assert message.delivery_tag is not None
    await raw.basic_reject(message.delivery_tag, requeue=False)
    letter = await dead(backend, name)
    assert (letter.message_id, letter.channel, letter.reason) == ("a", name, Reason.EXPLICIT_NACK)
    assert (letter.error_type, letter.attempts, dict(letter.headers)) == (
        "Rejected",
        1,
        {"h": "1"},
    )


async def test_a_message_dead_lettered_by_the_broker_can_be_replayed_repeatedly(
    rabbitmq_url: str, raw: aiormq.Channel, name: str
) -> None:
    """RabbitMQ would silently drop a copy that still has the ``x-death`` header."""
    async with QueueService(Settings(type="rabbitmq", url=rabbitmq_url)) as service:
        await service.send(name, "a")
        for _ in range(3):
            await eventually(lambda: ready(raw, name))
            message = await raw.basic_get(name)
            assert message.delivery_tag is not None
            await raw.basic_reject(message.delivery_tag, requeue=False)
            await eventually(lambda: service.dead_letters(name).list())
            assert await service.dead_letters(name).replay() == 1
            assert await service.dead_letters(name).list() == []
        assert await ready(raw, name) == 1
        await service.delete(name)
        await service.delete(f"{name}.dlq")


async def test_equal_foreign_messages_without_an_id_are_listed_and_removed_one_by_one(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(classic, name)
    for body in (b"1", b"1", b"2"):
        await _publish_without_id(raw, name, body)
    await eventually(lambda: is_(ready(raw, name), 3))
    for _ in range(2):
        first, second, third = [item.id for item in await classic.peek(name, 10)]
        assert first.startswith("foreign-")
        assert len({first, second, third}) == 3
    assert await classic.remove(name, [second, third]) == 2
    assert [item.body for item in await classic.peek(name, 10)] == [b"1"]


async def test_equal_foreign_messages_without_an_id_get_an_id_at_each_delivery(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(backend, name)
    for _ in range(2):
        await _publish_without_id(raw, name, b"1")
    async with backend.subscribe(spec(name)) as subscription:
        first, second = await take(subscription, 2)
        assert first.envelope.id != second.envelope.id
        assert first.envelope.id.startswith("foreign-")
        await subscription.release(first, 0.0)
        (again,) = await take(subscription)
        assert again.envelope.id == first.envelope.id, "a copy keeps the id"


async def test_equal_dead_letters_without_an_id_are_replayed_with_different_ids(
    raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    async with QueueService(Settings(type="rabbitmq", url=rabbitmq_url)) as service:
        await service.send(name, 0)
        await service.purge(name)
        for _ in range(2):
            await _publish_without_id(raw, name, b"1")
            message = await raw.basic_get(name)
            await raw.basic_reject(message.delivery_tag or 0, requeue=False)
        letters = service.dead_letters(name)

        async def both() -> bool:
            return len(await letters.list()) == 2

        await eventually(both)
        assert await letters.replay() == 2
        assert await letters.list() == []
        assert len({message.id for message in await service.peek(name)}) == 2
        await service.delete(name)
        await service.delete(service.settings.dead_letter_name(name))


async def test_the_expiration_of_a_live_foreign_message_does_not_count_from_its_timestamp(
    raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    """AMQP counts the expiration from the arrival, and applications set any timestamp."""
    handled: list[Message] = []

    @consume(name, prefetch=10)  # a waiting message with the expiration 0 would expire
    async def handle(number: int, message: Message) -> None:
        handled.append(message)

    service = QueueService(Settings(type="rabbitmq", url=rabbitmq_url))
    service.register(handle)
    async with service:
        for expiration in ("60000", "0"):
            properties = Basic.Properties(
                expiration=expiration, timestamp=datetime(2024, 2, 29, tzinfo=UTC)
            )
            await raw.basic_publish(b"7", routing_key=name, properties=properties)
        await eventually(lambda: len(handled) == 2)
        first, second = handled
        assert first.expires_at is not None
        assert first.expires_at > SystemClock().time()
        assert second.expires_at is None
        await service.delete(name)
        await service.delete(service.settings.dead_letter_name(name))


async def _publish_without_id(raw: aiormq.Channel, name: str, body: bytes) -> None:
    """Publish raw frames, because the driver adds an id to a message without one."""
    header = ContentHeader(body_size=len(body), properties=Basic.Properties(delivery_mode=2))
    frames: list[Any] = [Basic.Publish(routing_key=name), header, ContentBody(body)]
    await raw.write_queue.put(ChannelFrame.marshall(raw.number, frames))
    await eventually(lambda: ready(raw, name))


def test_the_size_of_small_headers_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes ten times as long as the rest of encoding."""
    original = Basic.Properties(message_id="1", headers={"tenant": "acme", "number": 7})
    envelope = codec.decode(original, b"")
    measured: list[int] = []
    marshal = Basic.Properties.marshal

    def counted(item: Basic.Properties) -> bytes:
        measured.append(1)
        return marshal(item)

    monkeypatch.setattr(Basic.Properties, "marshal", counted)
    copy = codec.encode_copy(envelope, original, attempts=1)
    assert copy.headers == {"tenant": "acme", "number": 7, "qkit-attempts": 1}
    assert measured == []
    envelope.headers["large"] = "x" * codec.DEFAULT_FRAME_BYTES
    assert codec.encode_copy(envelope, original, attempts=1).marshal()
    assert measured


@pytest.mark.parametrize("before", [None, {}])
def test_many_headers_with_names_of_four_byte_characters_fit_into_a_frame(
    before: dict[str, Any] | None,
) -> None:
    letters = [chr(0x1F300 + number) for number in range(100)]
    headers = {first + second: "" for first in letters for second in letters}
    envelope = Envelope("1", b"", headers)
    if before is None:
        properties = codec.encode(envelope, now=1.0, priority=None, expire=False)
    else:
        original = Basic.Properties(headers=before)
        properties = codec.encode_copy(envelope, original, attempts=1)
    assert len(properties.marshal()) < codec.DEFAULT_FRAME_BYTES
    assert codec.decode(properties, b"").headers == headers


def test_as_few_large_headers_as_possible_are_dropped() -> None:
    noise = random.Random(7)
    small = {f"h{number}": str(number) for number in range(50)}
    large = {f"large{size}": noise.randbytes(size).hex() for size in range(30_000, 34_000, 500)}
    envelope = Envelope("1", b"", small | large)
    properties = codec.encode(envelope, now=1.0, priority=None, expire=False)
    assert len(properties.marshal()) < codec.DEFAULT_FRAME_BYTES
    found = codec.decode(properties, b"").headers
    kept = [f"large{size}" for size in (30_000, 30_500, 31_000)]
    assert found == small | {name: large[name] for name in kept} | {"qkit-dropped-headers": "5"}
