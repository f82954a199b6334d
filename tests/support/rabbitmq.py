"""RabbitMQ helpers: aiormq channels, conditions, and cleanup after tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiormq
import pytest

from qkit.backend import (
    Delivery,
    QueueSpec,
    SubscriptionSpec,
)
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.subscription import RabbitSubscription
from qkit.backends.rabbitmq.topology import group_queue
from qkit.message import DeadLetter
from tests.support.waiting import eventually

__all__ = [
    "bare_channel",
    "consumers",
    "dead",
    "declare",
    "delete_declared",
    "has_depth",
    "is_",
    "ready",
    "refused",
    "spec",
    "take",
]


@asynccontextmanager
async def bare_channel(url: str) -> AsyncIterator[aiormq.Channel]:
    """Open an aiormq channel with publisher confirms."""
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        assert isinstance(channel, aiormq.Channel)
        yield channel
    finally:
        await connection.close()


async def delete_declared(url: str, backends: Iterable[RabbitMQBackend]) -> None:
    """Delete all queues and topics that these backends declared, to free memory in the broker."""
    names = {name: spec for backend in backends for name, spec in backend._specs.items()}
    groups = {
        group_queue(topic, group)
        for backend in backends
        for topic, known in backend._groups.items()
        for group in known
    }
    async with bare_channel(url) as channel:
        for name, spec in names.items():
            if spec.broadcast:
                await channel.exchange_delete(name)
            else:
                await channel.queue_delete(name)
        for name in groups:
            await channel.queue_delete(name)


def spec(name: str, **options: Any) -> SubscriptionSpec:
    values: dict[str, Any] = {"group": "g", "consumer": "c", "prefetch": 10, **options}
    return SubscriptionSpec(queue=name, **values)


async def declare(backend: RabbitMQBackend, name: str, **options: Any) -> None:
    """Declare a queue and its dead-letter queue, as a service does."""
    await backend.declare(QueueSpec(name=f"{name}.dlq", max_depth=100, drop_oldest=True))
    await backend.declare(QueueSpec(name=name, dead_letter=f"{name}.dlq", **options))


async def take(subscription: RabbitSubscription, count: int = 1) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found


async def ready(raw: aiormq.Channel, name: str) -> int:
    return (await raw.queue_declare(name, passive=True)).message_count or 0


async def consumers(raw: aiormq.Channel, name: str) -> int:
    return (await raw.queue_declare(name, passive=True)).consumer_count or 0


async def refused(url: str, name: str, **options: Any) -> str:
    """Declare a queue with conflicting options and return the broker's error message."""
    async with bare_channel(url) as channel:
        with pytest.raises(aiormq.exceptions.ChannelPreconditionFailed) as caught:
            await channel.queue_declare(name, durable=True, **options)
    return str(caught.value)


async def dead(backend: RabbitMQBackend, name: str) -> DeadLetter:
    """Wait for the only dead letter of a queue and return it."""
    await eventually(lambda: backend.peek(f"{name}.dlq", 1))
    (envelope,) = await backend.peek(f"{name}.dlq", 10)
    return DeadLetter.from_envelope(envelope)


async def is_(number: Awaitable[int], wanted: int) -> bool:
    """Return whether an awaited number has the wanted value, as a condition."""
    return await number == wanted


async def has_depth(backend: RabbitMQBackend, name: str, wanted: int) -> bool:
    """Return whether a queue has the wanted depth, as a condition."""
    return (await backend.stats(name)).depth == wanted
