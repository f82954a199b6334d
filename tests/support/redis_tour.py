"""Smoke test of all Redis backend operations, for other server products and versions."""

from __future__ import annotations

import asyncio
from typing import Any

from qkit._internal.clock import SystemClock
from qkit.backend import Delivery, QueueSpec, SubscriptionSpec
from qkit.backends.redis.connection import ConnectionParameters
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.backends.redis.pubsub_backend import RedisPubSubBackend
from qkit.message import Envelope

__all__ = ["tour"]


async def tour(parameters: ConnectionParameters, name: str) -> None:
    """Send, consume, settle, peek and delete on queues whose names start with ``name``."""
    await _lists(parameters, name)
    await _without_leases(parameters, name)
    await _pubsub(parameters, f"{name}-heard")


async def _lists(parameters: ConnectionParameters, name: str) -> None:
    backend = RedisListBackend(parameters)
    await backend.start()
    letters, topic, later = f"{name}.dlq", f"{name}-topic", SystemClock().time() + 0.2
    await backend.declare(QueueSpec(name=letters, max_depth=2, drop_oldest=True))
    await backend.declare(QueueSpec(name=name, dead_letter=letters))
    await backend.declare(QueueSpec(name=name, passive=True))
    await backend.publish(name, [Envelope("plain", b"x")])
    await backend.publish(
        name,
        [
            Envelope("urgent", b"x", {"a": "b"}, priority=9),
            Envelope("late", b"x", not_before=later),
        ],
    )
    async with backend.subscribe(_spec(name)) as subscription:
        found = await _take(subscription, 3)
        found.sort(key=lambda item: item.envelope.id)
        assert [item.envelope.id for item in found] == ["late", "plain", "urgent"]
        await subscription.extend(found[0], 5.0)
        await subscription.ack_many(found[:1])
        await subscription.release(found[1], 0.0)
        await subscription.release(found[2], 0.05)
        for item in await _take(subscription, 2):
            await subscription.ack(item)
    await backend.publish(name, [Envelope("fatal", b"x"), Envelope("old", b"x", expires_at=1.0)])
    async with backend.subscribe(_spec(name, ack_deadline=0.05)) as subscription:
        for attempt in (1, 2):  # the leases expire
            found = await _take(subscription, 2)
            assert {item.envelope.id for item in found} == {"fatal", "old"}
            assert {item.envelope.attempt for item in found} == {attempt}
    await backend.publish(letters, [Envelope(id, b"x") for id in ("dropped", "first", "second")])
    assert [item.id for item in await backend.peek(letters, 10)] == ["first", "second"]
    await backend.publish(letters, [Envelope("one more", b"x", priority=1)])
    assert await backend.remove(letters, ["one more"]) == 1
    assert await backend.purge(letters) == 1
    await backend.declare(QueueSpec(name=topic, broadcast=True))
    async with (
        backend.subscribe(_spec(topic, group="one")) as one,
        backend.subscribe(_spec(topic, group="two")) as two,
    ):
        await backend.publish(topic, [Envelope("copy", b"x")])
        assert [item.envelope.id for item in [*await _take(one), *await _take(two)]] == ["copy"] * 2
        assert (await backend.stats(topic)).in_flight == 2
    assert {name, letters, topic} <= set(await backend.queues())
    for queue in (name, letters, topic):
        await backend.delete(queue)
    await backend.aclose()


async def _without_leases(parameters: ConnectionParameters, name: str) -> None:
    backend = RedisListBackend(parameters, reliable=False)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("a", b"x")])
    async with backend.subscribe(_spec(name)) as subscription:
        (delivery,) = await _take(subscription)
        await subscription.release(delivery, 0.0)
        await subscription.ack((await _take(subscription))[0])
    await backend.delete(name)
    await backend.aclose()


async def _pubsub(parameters: ConnectionParameters, name: str) -> None:
    backend = RedisPubSubBackend(parameters)
    await backend.start()
    await backend.declare(QueueSpec(name=name, broadcast=True))
    async with backend.subscribe(_spec(name, broadcast=True)) as subscription:
        await backend.publish(name, [Envelope("a", b"x"), Envelope("b", b"y")])
        assert [item.envelope.id for item in await _take(subscription, 2)] == ["a", "b"]
    await backend.aclose()


def _spec(name: str, **options: Any) -> SubscriptionSpec:
    values: dict[str, Any] = {"group": "g", "consumer": "c", "prefetch": 10, **options}
    return SubscriptionSpec(queue=name, **values)


async def _take(subscription: Any, count: int = 1) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found
