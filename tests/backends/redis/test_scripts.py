"""Lua scripts: all keys that a script uses are in KEYS, as Redis Cluster requires."""

from __future__ import annotations

import asyncio
import re
import uuid
from importlib.resources import files
from typing import Any

import pytest
import redis.asyncio
from redis import exceptions

from qkit.backend import Delivery, QueueSpec, SubscriptionSpec
from qkit.backends.redis.connection import ConnectionParameters, ReconnectingConnection
from qkit.backends.redis.driver import PipelinedConnection
from qkit.backends.redis.keys import QueueKeys
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.backends.redis.queue_scripts import QueueScripts
from qkit.backends.redis.scripts import admin, lifecycle
from qkit.backends.redis.scripts.script import Script
from qkit.errors import SubscriptionLost
from qkit.message import GROUP, Envelope
from tests.support.private_brokers import private_broker
from tests.support.redis_tour import tour
from tests.support.waiting import eventually

FILES = {
    item.name.removesuffix(".lua"): item.read_text()
    for item in files("qkit.backends.redis.scripts").iterdir()
    if item.name.endswith(".lua")
}
SCRIPTS: dict[str, Script] = {
    name: getattr(module, name) for module in (lifecycle, admin) for name in module.__all__
}

# Lua code that is prepended to a script, so that redis.call fails for any key that is not in KEYS.
GUARD = """
local redis = (function(server)
  local declared = {}
  for _, key in ipairs(KEYS) do declared[key] = true end
  local function call(command, ...)
    local last = command == 'TIME' and 0 or command == 'UNLINK' and select('#', ...) or 1
    for i = 1, last do
      local key = tostring((select(i, ...)))
      if not declared[key] then
        error('undeclared key ' .. key .. ' in ' .. command)
      end
    end
    return server.call(command, ...)
  end
  return setmetatable({call = call}, {__index = server})
end)(redis)
"""
ONE_KEY = {
    *("HDEL", "HGET", "HGETALL", "HINCRBY", "HMGET", "HSET", "HSETNX", "LLEN", "LPOP", "LPUSH"),
    *("LRANGE", "LREM", "LTRIM", "RPOP", "RPUSH", "SADD", "SMEMBERS", "ZADD", "ZCARD", "ZRANGE"),
    *("ZRANGEBYLEX", "ZRANGEBYSCORE", "ZREM", "ZREVRANGEBYLEX", "ZREVRANGEBYSCORE", "ZSCORE"),
}


@pytest.fixture
def name() -> str:
    return f"keys-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Prepend the guard to every script; return a set that collects the names of those that ran."""
    ran: set[str] = set()
    by_sha: dict[str, str] = {}
    for constant, script in SCRIPTS.items():
        strict = Script(GUARD + script.source)
        monkeypatch.setattr(script, "source", strict.source)
        monkeypatch.setattr(script, "sha", strict.sha)
        by_sha[strict.sha] = constant
    call, call_all = PipelinedConnection.call, PipelinedConnection.call_all

    def record(words: Any) -> None:
        if words[0] == "EVALSHA":
            ran.add(by_sha[words[1]])

    def recorded_call(connection: PipelinedConnection, *words: Any, **options: Any) -> Any:
        record(words)
        return call(connection, *words, **options)

    def recorded_call_all(connection: PipelinedConnection, commands: Any, **options: Any) -> Any:
        for words in commands:
            record(words)
        return call_all(connection, commands, **options)

    monkeypatch.setattr(PipelinedConnection, "call", recorded_call)
    monkeypatch.setattr(PipelinedConnection, "call_all", recorded_call_all)
    return ran


def spec(queue: str, group: str = "g", *, ordered: bool = False) -> SubscriptionSpec:
    return SubscriptionSpec(queue=queue, group=group, consumer="c", prefetch=100, ordered=ordered)


async def take(subscription: Any, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found


async def ordered_tour(backend: RedisListBackend, name: str) -> None:
    """Hold a key, set its messages aside, settle, unlock, and return what was set aside."""
    keyed = [Envelope(f"{key}{n}", b"", key=key) for n in range(3) for key in ("a", "b" * 200)]
    async with backend.subscribe(spec(name, ordered=True)) as one:
        await backend.publish(name, keyed[:2])
        first, second = await take(one, 2)
        await backend.publish(name, [*keyed[2:], Envelope("c", b"")])
        async with backend.subscribe(spec(name, ordered=True)) as two:
            (free,) = await take(two, 1)
            assert free.envelope.id == "c"
            await one.release(first, 0.0)
            await one.ack_many([second])
            assert len(await take(two, 5)) == 5
    assert (await backend.stats(name)).depth == 6


async def test_every_script_uses_only_declared_keys(
    redis_url: str, name: str, guarded: set[str]
) -> None:
    await tour(ConnectionParameters(redis_url), name)
    backend = RedisListBackend(redis_url)
    await backend.start()
    raw: Any = redis.asyncio.Redis.from_url(redis_url)
    topic = f"{name}-topic"
    await backend.declare(QueueSpec(name=name, max_priority=200, max_deliveries=2))
    await backend.declare(QueueSpec(name=topic, broadcast=True, max_priority=12))
    try:
        async with (
            backend.subscribe(spec(name)) as queue,
            backend.subscribe(spec(topic, "one")) as one,
            backend.subscribe(spec(topic, "two")) as two,
        ):
            for subscription, at in ((queue, name), (one, topic)):
                sent = [Envelope(f"{p}", b"", priority=p) for p in (0, 5, 9, 12, 200)]
                await backend.publish(at, [*sent, Envelope("late", b"", not_before=1.0)])
                await raw.rpush(at, b"foreign", b"qk1 urgent 11 0 0 0 -\n\n")
                found = await take(subscription, 8)
                assert len(await backend.peek(at, 100)) == (0 if at == name else 8)
                await subscription.extend(found[0], 5.0)
                for delivery in found[:4]:
                    await subscription.release(delivery, 0.0)
                await subscription.release(found[4], 0.01)
                await subscription.ack_many(found[5:])
                for delivery in await take(subscription, 5):
                    await subscription.ack(delivery)
            assert len(await take(two, 8)) == 8
            replayed = Envelope("again", b"", {GROUP: "three"}, priority=11)
            await backend.publish(topic, [replayed, Envelope("all", b"")])
            assert (await backend.stats(topic)).depth == 4
            assert await backend.remove(topic, ["again"]) == 1
            assert await backend.purge(topic) == 3
        await ordered_tour(backend, name)
    finally:
        await backend.delete(name)
        await backend.delete(topic)
        left = [key async for key in raw.scan_iter(f"*{name}*")]
        await raw.aclose()
        await backend.aclose()
    assert left == []
    assert guarded == set(SCRIPTS), "the test must run every script"


async def test_the_guard_detects_an_undeclared_key(redis_url: str, name: str) -> None:
    connection = ReconnectingConnection(ConnectionParameters(redis_url))
    connection.connect()
    script = Script(GUARD + "return redis.call('LLEN', KEYS[1] .. ':in')")
    with pytest.raises(exceptions.ResponseError, match=f"undeclared key {name}:in in LLEN"):
        await connection.run(script, [name])
    await connection.aclose()


@pytest.mark.parametrize("name", FILES)
def test_a_script_does_not_build_key_names(name: str) -> None:
    code = re.sub(r"--[^\n]*", "", FILES[name])
    assert "':" not in code, "the script adds a suffix to a key"
    assert "'{" not in code, "the script builds the hash tag of a key"
    for arguments in re.findall(r"redis\.call\(([^\n]*)", code):
        command, _, rest = arguments.partition(", ")
        if command != "'TIME')":
            assert ".." not in rest
            literals = re.findall(r"'([A-Z]+)'", command)
            assert set(literals) <= ONE_KEY | {"UNLINK"}, "the guard must support the command"


def test_every_lua_file_is_a_script_or_the_library() -> None:
    sources = [script.source for script in SCRIPTS.values()]
    assert len(FILES) == len(SCRIPTS) + 2
    for name, text in FILES.items():
        users = sum(text in source for source in sources)
        assert users > 1 if name in ("library", "order") else users == 1


async def test_groups_added_by_another_process_receive_messages(redis_url: str, name: str) -> None:
    mine, other = RedisListBackend(redis_url), RedisListBackend(redis_url)
    await mine.start()
    await other.start()
    await mine.declare(QueueSpec(name=name, broadcast=True))
    async with mine.subscribe(spec(name, "one")):
        await mine.publish(name, [Envelope("a", b"")])
        async with other.subscribe(spec(name, "two")) as two:
            await mine.publish(name, [Envelope("b", b"")])
            assert [item.envelope.id for item in await take(two, 1)] == ["b"]
    await mine.delete(name)
    # A queue with the same name must work although the topic's layout is cached.
    await other.declare(QueueSpec(name=name))
    await mine.publish(name, [Envelope("c", b"", priority=1)])
    assert (await mine.stats(name)).depth == 1
    await mine.delete(name)
    await mine.aclose()
    await other.aclose()


async def test_a_known_layout_needs_no_extra_round_trip(
    redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = ReconnectingConnection(ConnectionParameters(redis_url))
    connection.connect()
    scripts = QueueScripts(connection)
    await connection.run(lifecycle.DECLARE, QueueKeys.of(name).declaration_keys, "topic", 0, "")
    for group in ("one", "two"):
        await scripts.run_whole(lifecycle.JOIN, name, group)
    assert await scripts.run_whole(admin.STATS, name) == [0, 0, 0]
    read: list[Any] = []
    monkeypatch.setattr(connection, "commands", read.append)
    assert await scripts.run_whole(admin.STATS, name) == [0, 0, 0]
    assert read == []
    monkeypatch.undo()
    await scripts.run_whole(admin.DELETE, name)
    await connection.aclose()


async def test_a_claim_during_a_slot_migration_loses_no_message(name: str) -> None:
    with (
        private_broker("redis", settings=["cluster-enabled yes"]) as node,
        private_broker("redis", settings=["cluster-enabled yes"]) as target,
    ):
        raw: Any = redis.asyncio.Redis.from_url(node.url)
        other: Any = redis.asyncio.Redis.from_url(target.url)
        await raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await raw.execute_command("CLUSTER", "MEET", target.host, target.port)
        mover = (await other.execute_command("CLUSTER", "MYID")).decode()

        async def ready() -> bool:
            nodes = str(await raw.execute_command("CLUSTER", "NODES"))
            state = await raw.execute_command("CLUSTER", "INFO")
            return b"cluster_state:ok" in state and mover in nodes and "handshake" not in nodes

        await eventually(ready)
        backend = RedisListBackend(node.url)
        await backend.start()
        await backend.declare(QueueSpec(name=name))
        # All keys except the arrivals list now exist. A claim reads the ready list first.
        sent = [Envelope(f"{n}", b"", priority=5) for n in range(8)]
        await backend.publish(name, [*sent, Envelope("late", b"", not_before=4e9)])
        slot = await raw.execute_command("CLUSTER", "KEYSLOT", name)
        async with backend.subscribe(spec(name)) as holder, backend.subscribe(spec(name)) as second:
            (held,) = await take(holder, 1)
            await raw.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", mover)
            with pytest.raises(SubscriptionLost, match="TRYAGAIN"):
                await second.receive(100)
            await raw.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
            assert (await backend.stats(name)).depth == 7
            await holder.ack(held)
        async with backend.subscribe(spec(name)) as subscription:
            assert len(await take(subscription, 7)) == 7
        await backend.aclose()
        await raw.aclose()
        await other.aclose()
