"""Benchmarks of RabbitMQ against plain aio-pika and FastStream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

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
    expired_rate,
    median_latencies,
    order_bytes,
    sending_service,
    sequential_rate,
    unique,
)
from qkit import Settings
from qkit.backends.rabbitmq.backend import RabbitMQBackend

__all__ = ["SUITES"]

PERSISTENT = aio_pika.DeliveryMode.PERSISTENT


def _settings() -> Settings:
    return Settings(type="rabbitmq", url=address("rabbitmq"))


async def _send(scale: Scale) -> Mapping[str, float]:
    name, raw = unique("send"), unique("raw")
    count, few = scale.count // 2, max(100, scale.count // 20)
    async with (
        await aio_pika.connect(address("rabbitmq")) as connection,
        sending_service(_settings(), name) as service,
    ):
        channel = await connection.channel()
        queue = await channel.declare_queue(raw, durable=True)

        async def publish() -> None:
            message = aio_pika.Message(order_bytes(), delivery_mode=PERSISTENT)
            await channel.default_exchange.publish(message, raw)

        def send() -> Awaitable[object]:
            return service.send(name, ORDER)

        raw_single, single = await alternate(sequential_rate, few, publish, send)
        raw_many, many = await alternate(concurrent_rate, count, publish, send)
        await queue.delete(if_unused=False, if_empty=False)
    return {
        "rabbitmq.send_one": single / raw_single,
        "rabbitmq.send": many / raw_many,
        "rabbitmq.send_rate": many,
    }


async def _fill(name: str, count: int) -> None:
    body = order_bytes()
    async with await aio_pika.connect(address("rabbitmq")) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True)
        for _ in range(0, count, 100):
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(
                        aio_pika.Message(body, delivery_mode=PERSISTENT), name
                    )
                    for _ in range(100)
                )
            )


async def _delete(name: str) -> None:
    async with await aio_pika.connect(address("rabbitmq")) as connection:
        channel = await connection.channel()
        await channel.queue_delete(name)


async def _raw_consume(count: int) -> float:
    """Measure the usual aio-pika consumer: a callback that acks each message."""
    name, countdown = unique("raw"), Countdown(count)
    await _fill(name, count)
    async with await aio_pika.connect(address("rabbitmq")) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.declare_queue(name, durable=True)

        async def handle(message: AbstractIncomingMessage) -> None:
            async with message.process():
                Order.model_validate_json(message.body)
            countdown.hit()

        await queue.consume(handle)
        rate = await countdown.rate()
    await _delete(name)
    return rate


async def _faststream(count: int) -> float:
    rabbit = peer("faststream.rabbit")
    name, countdown = unique("faststream"), Countdown(count)
    await _fill(name, count)
    broker = rabbit.RabbitBroker(address("rabbitmq"), logger=None)
    queue = rabbit.RabbitQueue(name, durable=True)

    async def handle(order: Order) -> None:
        countdown.hit()

    broker.subscriber(queue, channel=rabbit.Channel(prefetch_count=PREFETCH))(handle)
    await broker.start()
    try:
        return await countdown.rate()
    finally:
        await broker.stop()
        await _delete(name)


async def _consume(scale: Scale) -> Mapping[str, float]:
    count = max(200, scale.count // 2 // 100 * 100)
    raw = await _raw_consume(count)
    faststream = await _faststream(max(200, count // 4 // 100 * 100))
    own = await consume_rate(_settings(), unique("consume"), count)
    return {
        "rabbitmq.consume": own / raw,
        "rabbitmq.consume_faststream": own / faststream,
        "rabbitmq.consume_rate": own,
    }


async def _expired(scale: Scale) -> Mapping[str, float]:
    """Measure a topic's quorum queue; from other quorum queues the broker removes such messages."""
    backend = RabbitMQBackend(address("rabbitmq"), quorum=True)
    name, count = unique("expired"), scale.of(10_000, 200)
    rate = await expired_rate(_settings(), backend, name, count, broadcast=True)
    return {"rabbitmq.expired_rate": rate}


async def _latency(scale: Scale) -> Mapping[str, float]:
    name, timer = unique("latency"), LatencyTimer()
    async with await aio_pika.connect(address("rabbitmq")) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1)
        queue = await channel.declare_queue(name, durable=True)

        async def handle(message: AbstractIncomingMessage) -> None:
            Order.model_validate_json(message.body)
            timer.end()
            await message.ack()

        def publish() -> Awaitable[object]:
            message = aio_pika.Message(order_bytes(), delivery_mode=PERSISTENT)
            return channel.default_exchange.publish(message, name)

        await queue.consume(handle)
        plain, own = await median_latencies(_settings(), scale.of(1_000, 40), timer, publish)
        await queue.delete(if_unused=False, if_empty=False)
    return {"rabbitmq.latency": own / plain, "rabbitmq.latency_p50": own}


SUITES = (
    Suite(
        "rabbitmq.send",
        (
            Figure("rabbitmq.send_one", "RabbitMQ: one send at a time / aio-pika", 0.9),
            Figure("rabbitmq.send", "RabbitMQ: 100 sends in flight / aio-pika", 1.0),
            Figure("rabbitmq.send_rate", "RabbitMQ: 100 sends in flight", None, "/s"),
        ),
        _send,
    ),
    Suite(
        "rabbitmq.consume",
        (
            Figure("rabbitmq.consume", "RabbitMQ: consume / aio-pika", 1.3),
            Figure("rabbitmq.consume_faststream", "RabbitMQ: consume / FastStream", 2.0),
            Figure("rabbitmq.consume_rate", "RabbitMQ: consume", None, "/s"),
        ),
        _consume,
    ),
    Suite(
        "rabbitmq.expired",
        (
            Figure(
                "rabbitmq.expired_rate",
                "RabbitMQ, quorum: expired messages, concurrency=1",
                None,
                "/s",
            ),
        ),
        _expired,
    ),
    Suite(
        "rabbitmq.latency",
        (
            Figure("rabbitmq.latency", "RabbitMQ: latency p50 / aio-pika", 1.25, at_most=True),
            Figure("rabbitmq.latency_p50", "RabbitMQ: latency p50", None, "ms"),
        ),
        _latency,
    ),
)
