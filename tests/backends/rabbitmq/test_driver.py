"""Batch publish: messages are sent in order, and each has a separate outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import aiormq
import pytest
import pytest_asyncio
from pamqp.commands import Basic

from qkit.backends.rabbitmq import driver
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.driver import (
    BACKPRESSURE_BYTES,
    OutgoingMessage,
    publish_batch,
    supports_batch_publish,
)
from qkit.message import Envelope, Sent
from tests.support.rabbitmq import declare


def outgoing(queue: str, number: int, body: bytes = b"x", priority: Any = None) -> OutgoingMessage:
    properties = Basic.Properties(message_id=f"m{number}", priority=priority)
    return OutgoingMessage(queue, "", queue, properties, body)


@pytest_asyncio.fixture
async def queue(raw: aiormq.Channel, name: str) -> Any:
    await raw.queue_declare(name)
    yield name
    await raw.queue_delete(name)


async def bodies(channel: aiormq.Channel, queue: str) -> list[bytes]:
    found: list[bytes] = []
    while (message := await channel.basic_get(queue, no_ack=True)).delivery_tag:
        found.append(message.body)
    return found


def kinds(failures: Sequence[BaseException | None]) -> list[str]:
    return [type(failure).__name__ for failure in failures]


async def test_messages_of_all_sizes_arrive_in_order(raw: aiormq.Channel, queue: str) -> None:
    frame: int = raw.max_content_size
    sizes = [1, 0, BACKPRESSURE_BYTES, 5, frame - 1, frame, frame + 1, 3 * frame, *[700] * 200, 2]
    sent = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    messages = [outgoing(queue, number, body) for number, body in enumerate(sent)]
    assert await publish_batch(raw, messages) == [None] * len(sent)
    assert await bodies(raw, queue) == sent
    assert raw.delivery_tag == len(sent)
    assert not raw.confirmations
    assert not raw.message_id_delivery_tag


async def test_large_messages_are_encoded_one_group_at_a_time(
    raw: aiormq.Channel, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[int] = []
    encode = driver._encode

    def recording_encode(channel: aiormq.Channel, message: OutgoingMessage) -> bytes:
        content = encode(channel, message)
        ahead.append(int(message.id[1:]) - channel.delivery_tag)
        return content

    monkeypatch.setattr(driver, "_encode", recording_encode)
    messages = [outgoing(queue, at, b"x" * BACKPRESSURE_BYTES) for at in range(20)]
    assert await publish_batch(raw, messages) == [None] * 20
    assert ahead == [0] * 20


async def test_a_returned_or_invalid_message_does_not_fail_the_others(
    raw: aiormq.Channel, queue: str
) -> None:
    failures = await publish_batch(
        raw,
        [
            outgoing(queue, 0, b"a"),
            outgoing(f"{queue}-missing", 1),
            outgoing(queue, 2, priority="high"),
            outgoing("q" * 256, 3),
            outgoing(queue, 4, b"b"),
        ],
    )
    assert kinds(failures) == ["NoneType", "PublishError", "TypeError", "ValueError", "NoneType"]
    assert await bodies(raw, queue) == [b"a", b"b"]


async def test_all_messages_fail_on_a_closed_channel(raw: aiormq.Channel, queue: str) -> None:
    other = await raw.connection.channel()
    assert isinstance(other, aiormq.Channel)
    await other.close()
    failures = await publish_batch(other, [outgoing(queue, at) for at in range(3)])
    assert kinds(failures) == ["ChannelInvalidStateError"] * 3


async def test_a_channel_closed_during_a_batch_fails_its_messages(
    raw: aiormq.Channel, queue: str
) -> None:
    other = await raw.connection.channel()
    assert isinstance(other, aiormq.Channel)
    unroutable = OutgoingMessage(
        "t", f"{queue}-no-exchange", "t", Basic.Properties(message_id="t"), b"x"
    )
    failures = await publish_batch(other, [unroutable, outgoing(queue, 1)])
    assert kinds(failures) == ["ChannelNotFoundEntity"] * 2


async def test_a_publish_cancelled_before_the_write_keeps_the_delivery_tags_correct(
    raw: aiormq.Channel, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: asyncio.Queue[object] = asyncio.Queue(1)
    full.put_nowait("something")
    with monkeypatch.context() as patched:
        patched.setattr(raw, "write_queue", full)
        waiting = asyncio.ensure_future(publish_batch(raw, [outgoing(queue, 1)]))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert raw.delivery_tag == 0
    assert not raw.confirmations
    messages = [outgoing(f"{queue}-missing", 1), outgoing(queue, 2, b"b")]
    returned, confirmed = await publish_batch(raw, messages)
    assert isinstance(returned, aiormq.exceptions.PublishError)
    assert confirmed is None


async def test_the_confirmations_of_a_cancelled_batch_do_not_reach_the_next_batch(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    for number in range(30):
        ids = [f"c{number}-{at}" for at in range(5)]
        sending = asyncio.ensure_future(backend.publish(name, [Envelope(id, b"x") for id in ids]))
        for _ in range(number % 10):
            await asyncio.sleep(0)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        again = [Envelope(id, b"x") for id in ids]
        assert await backend.publish(name, again) == [Sent(id) for id in ids]


async def test_messages_are_sent_one_by_one_if_the_driver_lacks_an_attribute(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supports_batch_publish(raw)
    monkeypatch.setattr(driver, "CHANNEL_ATTRIBUTES", (*driver.CHANNEL_ATTRIBUTES, "something_new"))
    assert not supports_batch_publish(raw)
    await declare(classic, name)
    envelopes = [Envelope(f"m{at}", b"%d" % at) for at in range(20)]
    assert await classic.publish(name, envelopes) == [Sent(item.id) for item in envelopes]
    assert await bodies(raw, name) == [item.body for item in envelopes]
