"""Benchmarks of Redis lists and pub/sub against plain redis-py, FastStream and Repid."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from redis.asyncio import Redis

from benchmarks._in_memory import Order, peer
from benchmarks._measure import Figure, Scale, Suite
from benchmarks._service import (
    ORDER,
    PREFETCH,
    Countdown,
    LatencyTimer,
    address,
    alternate,
    concurrent_rate,
    consume_rate,
    create_service,
    expired_rate,
    median_latencies,
    order_bytes,
    sending_service,
    sequential_rate,
    unique,
)
from qkit import Settings, consume
from qkit.backends.redis.list_backend import RedisListBackend

__all__ = ["SUITES"]


def _client() -> Any:
    """Return a redis-py client as ``Any``: its types mix synchronous and asynchronous results."""
    return Redis.from_url(address("redis"))


def _settings(mode: str = "list") -> Settings:
    return Settings(type="redis", mode=mode, url=address("redis"))  # type: ignore[arg-type]  # list or pubsub


async def _send(scale: Scale) -> Mapping[str, float]:
    name, channel, body = unique("raw"), unique("send"), order_bytes()
    few = max(100, scale.count // 10)
    async with _client() as raw, sending_service(_settings(), channel) as service:

        def push() -> Awaitable[object]:
            return raw.rpush(name, order_bytes())  # type: ignore[no-any-return]  # untyped client

        def send() -> Awaitable[object]:
            return service.send(channel, ORDER)

        raw_single, single = await alternate(sequential_rate, few, push, send)
        raw_many, many = await alternate(concurrent_rate, scale.count, push, send)
        started = time.perf_counter()
        for _ in range(scale.count // 500):
            pipeline = raw.pipeline(transaction=False)
            for _ in range(500):
                pipeline.rpush(name, body)
            await pipeline.execute()
        raw_pipeline = scale.count / (time.perf_counter() - started)
        await raw.delete(name)
        started = time.perf_counter()
        await service.send_many(channel, [ORDER] * scale.count)
        bulk = scale.count / (time.perf_counter() - started)
    return {
        "redis.send_one": single / raw_single,
        "redis.send": many / raw_many,
        "redis.send_many": bulk / raw_pipeline,
        "redis.send_rate": many,
    }


async def _raw_streams(count: int) -> float:
    """Measure the practical limit of redis-py without message loss: a stream in batches of 100."""
    name, body = unique("stream"), order_bytes()
    countdown = Countdown(count)
    async with _client() as raw:
        pipeline = raw.pipeline(transaction=False)
        for _ in range(count):
            pipeline.xadd(name, {"body": body})
        await pipeline.execute()
        await raw.xgroup_create(name, "g", "0")
        handled = 0
        while handled < count:
            answer = await raw.xreadgroup("g", "c", {name: ">"}, count=PREFETCH)
            entries = answer[0][1]
            for _, fields in entries:
                Order.model_validate_json(fields[b"body"])
                countdown.hit()
            await raw.xack(name, "g", *(entry for entry, _ in entries))
            handled += len(entries)
        await raw.delete(name)
    return await countdown.rate()


async def _faststream(count: int) -> float:
    """Measure FastStream on a list, where a killed consumer loses its messages in flight."""
    redis = peer("faststream.redis")
    name, countdown = unique("faststream"), Countdown(count)
    broker = redis.RedisBroker(address("redis"), logger=None)

    async def handle(order: Order) -> None:
        countdown.hit()

    broker.subscriber(list=name)(handle)
    await _fill(name, count)
    await broker.start()
    try:
        return await countdown.rate()
    finally:
        await broker.stop()


async def _repid(count: int) -> float:
    """Measure Repid on a stream, which acks messages one by one."""
    repid = peer("repid")
    name, countdown = unique("repid"), Countdown(count)
    server = repid.RedisServer(address("redis"), batch_size=PREFETCH)
    application, router = repid.Repid(), repid.Router()
    application.servers.register_server("default", server, is_default=True)

    async def handle(id: int, total: float, note: str) -> None:
        countdown.hit()

    router.actor(channel=name, name="handle")(handle)
    application.include_router(router)
    async with server.connection():
        for _ in range(count // 100):
            await asyncio.gather(
                *(
                    application.send_message_json(
                        channel=name, payload=ORDER.model_dump(), headers={"topic": "handle"}
                    )
                    for _ in range(100)
                )
            )
        await application.run_worker(messages_limit=count, register_signals=())
        return countdown.rate_until_now()


async def _fill(name: str, count: int) -> None:
    body = order_bytes()
    async with _client() as raw:
        pipeline = raw.pipeline(transaction=False)
        for _ in range(count):
            pipeline.rpush(name, body)
        await pipeline.execute()


async def _consume(scale: Scale) -> Mapping[str, float]:
    few = max(200, scale.count // 10)
    faststream = await _faststream(few)
    repid = await _repid(few)
    streams = await _raw_streams(scale.count)
    own = await consume_rate(_settings(), unique("consume"), scale.count)
    return {
        "redis.consume_faststream": own / faststream,
        "redis.consume_repid": own / repid,
        "redis.consume": own / streams,
        "redis.consume_rate": own,
    }


async def _expired(scale: Scale) -> Mapping[str, float]:
    backend = RedisListBackend(address("redis"))
    name, count = unique("expired"), scale.of(10_000, 200)
    return {"redis.expired_rate": await expired_rate(_settings(), backend, name, count)}


async def _latency(scale: Scale) -> Mapping[str, float]:
    name, timer = unique("latency"), LatencyTimer()
    async with _client() as raw:

        async def read() -> None:
            while True:
                _, content = await raw.blpop([name])
                Order.model_validate_json(content)
                timer.end()

        reading = asyncio.create_task(read(), name="reader")
        plain, own = await median_latencies(
            _settings(), scale.of(1_000, 40), timer, lambda: raw.rpush(name, order_bytes())
        )
        reading.cancel()
        await asyncio.wait([reading])
    return {"redis.latency": own / plain, "redis.latency_p50": own}


async def _pubsub_sample(name: str) -> bytes:
    """Return a message as qkit publishes it through pub/sub."""
    async with _client() as raw, raw.pubsub() as subscriber:
        await subscriber.subscribe(name)
        async with create_service(_settings("pubsub")) as service:
            await service.publish(name, ORDER)
            while True:
                message = await subscriber.get_message(timeout=5)
                assert message is not None
                if message["type"] == "message":
                    return bytes(message["data"])


async def _broadcast(name: str, content: bytes, count: int) -> None:
    async with _client() as raw:
        for _ in range(count // 500 or 1):
            pipeline = raw.pipeline(transaction=False)
            for _ in range(min(500, count)):
                pipeline.publish(name, content)
            await pipeline.execute()


async def _raw_pubsub(count: int) -> float:
    name, countdown = unique("pubsub"), Countdown(count)
    async with _client() as raw, raw.pubsub() as subscriber:
        await subscriber.subscribe(name)

        async def read() -> None:
            async for message in subscriber.listen():
                if message["type"] == "message":
                    Order.model_validate_json(message["data"])
                    countdown.hit()

        reading = asyncio.create_task(read(), name="reader")
        await asyncio.sleep(0.05)
        await _broadcast(name, order_bytes(), count)
        rate = await countdown.rate()
        reading.cancel()
        await asyncio.wait([reading])
    return rate


async def _pubsub(scale: Scale) -> Mapping[str, float]:
    count = max(500, scale.count // 500 * 500)
    raw = await _raw_pubsub(count)
    name, countdown = unique("pubsub"), Countdown(count)
    content = await _pubsub_sample(name)

    @consume(name, broadcast=True)
    async def handle(order: Order) -> None:
        countdown.hit()

    async with create_service(_settings("pubsub"), handle):
        await _broadcast(name, content, count)
        own = await countdown.rate()
    return {"pubsub.consume": own / raw, "pubsub.consume_rate": own}


SUITES = (
    Suite(
        "redis.send",
        (
            Figure("redis.send_one", "Redis list: one send at a time / RPUSH", 0.9),
            Figure("redis.send", "Redis list: 100 sends in flight / 100 RPUSH", 6.0),
            Figure("redis.send_many", "Redis list: send_many / pipelines of 500", 0.5),
            Figure("redis.send_rate", "Redis list: 100 sends in flight", None, "/s"),
        ),
        _send,
    ),
    Suite(
        "redis.consume",
        (
            Figure("redis.consume_faststream", "Redis list: consume / FastStream (lossy)", 12.0),
            Figure("redis.consume_repid", "Redis list: consume / Repid on streams", 6.0),
            Figure("redis.consume", "Redis list: consume / streams in batches of 100", 1.0),
            Figure("redis.consume_rate", "Redis list: consume", None, "/s"),
        ),
        _consume,
    ),
    Suite(
        "redis.expired",
        (
            Figure(
                "redis.expired_rate",
                "Redis list: expired messages, concurrency=1",
                None,
                "/s",
            ),
        ),
        _expired,
    ),
    Suite(
        "redis.latency",
        (
            Figure("redis.latency", "Redis list: latency p50 / BLPOP", 1.25, "×", at_most=True),
            Figure("redis.latency_p50", "Redis list: latency p50", None, "ms"),
        ),
        _latency,
    ),
    Suite(
        "pubsub",
        (
            Figure("pubsub.consume", "Redis pub/sub: consume / redis-py", 0.6),
            Figure("pubsub.consume_rate", "Redis pub/sub: consume", None, "/s"),
        ),
        _pubsub,
    ),
)
