"""Tests that the current version can use the Redis keys of qkit d324538."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from qkit import DeadLetter, Message, QueueService, Settings, consume
from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.message import Envelope
from tests.support.waiting import eventually
from tests.upgrade import raw_redis
from tests.upgrade.raw import DATA, read
from tests.upgrade.takeover import Expected, Takeover, consume_two, unique_prefix

OLD_SETTINGS: dict[str, Any] = {"retry": {"initial_delay": 0.05, "jitter": 0}}


@pytest_asyncio.fixture
async def prefix(redis_url: str) -> AsyncIterator[str]:
    """Prefix of all names in the replayed state."""
    prefix = unique_prefix()
    try:
        await raw_redis.replay(redis_url, read(DATA / "redis.jsonl", prefix))
        yield prefix
    finally:
        await raw_redis.remove(redis_url, prefix)


def settings(url: str, prefix: str, **values: Any) -> Settings:
    return Settings(type="redis", mode="list", url=url, prefix=prefix, **values)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, OLD_SETTINGS], ids=["default", "as-before"])
async def test_every_message_of_the_old_version_arrives(
    redis_url: str, prefix: str, values: dict[str, Any]
) -> None:
    await Takeover(settings(redis_url, prefix, **values), Expected("redis")).run()


@pytest.mark.slow
async def test_a_lease_of_the_old_version_is_kept_until_it_expires(
    redis_url: str, prefix: str
) -> None:
    expected = Expected("redis")
    takeover = Takeover(settings(redis_url, prefix), expected)
    lease = f"{{{prefix}orders}}:lease"
    client: Any = redis.asyncio.Redis.from_url(redis_url)
    async with client:
        ends = time.time() + 4
        held = await client.zrange(lease, 0, -1)
        assert len(held) == 3
        for token in held:
            await client.zadd(lease, {token: ends * 1000})
    await takeover.run()
    for message in expected.of("held", channels=("orders",)):
        assert takeover.handled_at(message) >= ends


@pytest.mark.parametrize("channel", Expected("redis").options)
async def test_a_channel_with_old_options_can_be_consumed(
    redis_url: str, prefix: str, channel: str
) -> None:
    await consume_two(settings(redis_url, prefix), Expected("redis"), channel)


@pytest.mark.parametrize(
    ("max_attempts", "handled", "attempts"), [(3, [], 3), (5, [4, 4], None)], ids=["spent", "more"]
)
async def test_a_frame_marked_as_the_last_delivery_is_handled_or_dead_lettered(
    redis_url: str, prefix: str, max_attempts: int, handled: list[int], attempts: int | None
) -> None:
    """The old version marked a frame with ``!`` if the lease of its last delivery had expired."""
    queue, ready = f"{prefix}marked", f"{{{prefix}marked}}:p5"
    client: Any = redis.asyncio.Redis.from_url(redis_url)
    async with client:
        meta = {"kind": "queue", "max_deliveries": 3, "seq": 1, "levels": "5"}
        meta["dead_letter"] = f"{queue}.dlq"
        await client.hset(f"{{{queue}}}:meta", mapping=meta)
        await client.sadd("qkit:queues", queue)
        await client.rpush(ready, b'qk1 marked1 - 0 0 3! -\n{"a":"b"}\n1')
        await client.rpush(queue, b"qk1 marked2 - 0 0 3! -\n\n2")
    seen: list[int] = []

    @consume("marked")
    async def handle(body: int, message: Message) -> None:
        seen.append(message.attempt)

    service = QueueService(settings(redis_url, prefix, retry={"max_attempts": max_attempts}))
    service.register(handle)
    letters: list[DeadLetter] = []

    async def done() -> bool:
        letters[:] = await service.dead_letters("marked").list()
        return len(seen) + len(letters) == 2

    async with service:
        assert [envelope.attempt for envelope in await service.peek("marked", 10)] in ([], [3, 3])
        await eventually(done)
        await eventually(lambda: _is_empty(service, "marked"))
    assert seen == handled
    assert [letter.attempts for letter in letters] == [attempts] * (2 - len(handled))
    assert {letter.error_type for letter in letters} <= {"LeaseExpired"}


async def _is_empty(service: QueueService, channel: str) -> bool:
    stats = await service.stats(channel)
    return (stats.depth, stats.in_flight) == (0, 0)


async def test_an_expired_lease_of_a_marked_frame_counts_an_attempt(
    redis_url: str, prefix: str
) -> None:
    queue = f"{prefix}marked"
    client: Any = redis.asyncio.Redis.from_url(redis_url)
    backend = RedisListBackend(redis_url)
    await backend.start()
    await backend.declare(QueueSpec(name=queue))
    async with client:
        await client.hset(f"{{{queue}}}:msg", "000000000001", b"qk1 marked - 0 0 3! -\n\n1")
        await client.zadd(f"{{{queue}}}:lease", {"000000000001": 1.0})
    spec = SubscriptionSpec(queue=queue, group="g", consumer="c", prefetch=1)
    async with backend.subscribe(spec) as subscription:
        (delivery,) = await subscription.receive(1)
        assert (delivery.envelope.id, delivery.envelope.attempt) == ("marked", 5)
        await subscription.release(delivery, 0.0)
        assert await backend.peek(queue, 1) == [Envelope("marked", b"1", attempt=5)]
    await backend.aclose()
