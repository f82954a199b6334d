"""Capture and replay of qkit's state on Redis, as commands, with plain redis-py."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from tests.upgrade.raw import as_bytes, as_text

__all__ = ["capture", "remove", "replay"]


def _client(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url)


async def capture(url: str) -> list[list[Any]]:
    """Return a command for each key of the server, which must contain nothing else."""
    async with _client(url) as client:
        commands = [await _command(client, key) for key in sorted(await client.keys())]
    return [[part if isinstance(part, str) else as_text(part) for part in c] for c in commands]


async def _command(client: Any, key: bytes) -> list[str | bytes]:
    kind = (await client.type(key)).decode()
    match kind:
        case "list":
            return ["RPUSH", key, *await client.lrange(key, 0, -1)]
        case "set":
            return ["SADD", key, *sorted(await client.smembers(key))]
        case "hash":
            pairs = sorted((await client.hgetall(key)).items())
            return ["HSET", key, *(part for pair in pairs for part in pair)]
        case "zset":
            members = await client.zrange(key, 0, -1, withscores=True)
            return ["ZADD", key, *(p for member, score in members for p in (repr(score), member))]
        case _:
            raise AssertionError(f"{key!r} has an unexpected type: {kind}")


async def replay(url: str, commands: list[list[Any]]) -> None:
    """Run the commands, which add to the keys of other tests without overwriting them."""
    async with _client(url) as client:
        for command in commands:
            await client.execute_command(*map(as_bytes, command))


async def remove(url: str, prefix: str) -> None:
    """Delete every key with the prefix, and the names in the set of queues."""
    async with _client(url) as client:
        keys = [key async for key in client.scan_iter(match=f"*{prefix}*")]
        if keys:
            await client.delete(*keys)
        names = await client.smembers("qkit:queues")
        if ours := [name for name in names if name.startswith(prefix.encode())]:
            await client.srem("qkit:queues", *ours)
