"""The Redis keys of qkit d324538 under the current version."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from qkit import Settings
from tests.upgrade import raw_redis
from tests.upgrade.raw import DATA, read
from tests.upgrade.takeover import Expected, Takeover, consume_two, unique_prefix

OLD_SETTINGS: dict[str, Any] = {"retry": {"initial_delay": 0.05, "jitter": 0}}


@pytest_asyncio.fixture
async def prefix(redis_url: str) -> AsyncIterator[str]:
    """Of the names under which the state was replayed."""
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
async def test_everything_arrives(redis_url: str, prefix: str, values: dict[str, Any]) -> None:
    await Takeover(settings(redis_url, prefix, **values), Expected("redis")).run()


@pytest.mark.slow
async def test_a_lease_of_the_old_version_is_kept_until_it_ends(
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
async def test_a_channel_that_had_options(redis_url: str, prefix: str, channel: str) -> None:
    await consume_two(settings(redis_url, prefix), Expected("redis"), channel)
