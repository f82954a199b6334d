"""Benchmarks of Kafka against plain aiokafka, FastStream and Repid."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks._in_memory import Order, peer
from benchmarks._measure import Figure, Scale, Suite
from benchmarks._service import (
    IN_FLIGHT,
    ORDER,
    Countdown,
    address,
    alternate,
    batch_consume_rate,
    concurrent_rate,
    consume_rate,
    order_bytes,
    sending_service,
    sequential_rate,
    unique,
)
from qkit import Settings

__all__ = ["SUITES"]


def _settings() -> Settings:
    return Settings(type="kafka", url=address("kafka"))


@asynccontextmanager
async def _topic(name: str) -> AsyncGenerator[str, None]:
    """Create a topic with one partition, as qkit does, and delete it afterwards."""
    admin = AIOKafkaAdminClient(bootstrap_servers=address("kafka"))
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1)])
        yield name
        await admin.delete_topics([name])
    finally:
        await admin.close()


@asynccontextmanager
async def _producer() -> AsyncGenerator[AIOKafkaProducer, None]:
    producer = AIOKafkaProducer(
        bootstrap_servers=address("kafka"), acks="all", enable_idempotence=True
    )
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def _send(scale: Scale) -> Mapping[str, float]:
    name, few = unique("send"), max(100, scale.count // 20)
    async with (
        _topic(unique("raw")) as topic,
        _producer() as producer,
        sending_service(_settings(), name) as service,
    ):

        async def publish() -> None:
            await producer.send_and_wait(topic, order_bytes())

        def send() -> Awaitable[object]:
            return service.send(name, ORDER)

        await publish()
        raw_single, single = await alternate(sequential_rate, few, publish, send)
        raw_many, many = await alternate(concurrent_rate, scale.count, publish, send)
    return {
        "kafka.send_one": single / raw_single,
        "kafka.send": many / raw_many,
        "kafka.send_rate": many,
    }


async def _fill(name: str, count: int, headers: list[tuple[str, bytes]] | None = None) -> None:
    body = order_bytes()
    async with _producer() as producer:
        futures = [await producer.send(name, body, headers=headers) for _ in range(count)]
        for future in futures:
            await future


async def _raw_consume(count: int) -> float:
    """Measure the practical limit without message loss: large batches, each with one commit."""
    countdown = Countdown(count)
    async with _topic(unique("raw")) as name:
        await _fill(name, count)
        consumer = AIOKafkaConsumer(
            name,
            bootstrap_servers=address("kafka"),
            group_id=unique("group"),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        handled = 0
        while handled < count:
            for records in (await consumer.getmany(timeout_ms=500, max_records=500)).values():
                for record in records:
                    Order.model_validate_json(record.value)
                    countdown.hit()
                handled += len(records)
            await consumer.commit()
        await consumer.stop()
    return await countdown.rate()


async def _faststream(count: int) -> float:
    """Measure FastStream's default: it commits on a timer, so a crash loses messages in flight."""
    kafka = peer("faststream.kafka")
    countdown = Countdown(count)
    async with _topic(unique("faststream")) as name:
        await _fill(name, count)
        broker = kafka.KafkaBroker(address("kafka"), logger=None)

        async def handle(order: Order) -> None:
            countdown.hit()

        broker.subscriber(name, group_id=unique("group"), auto_offset_reset="earliest")(handle)
        await broker.start()
        try:
            return await countdown.rate()
        finally:
            await broker.stop()


async def _repid(count: int) -> float:
    repid = peer("repid")
    countdown = Countdown(count)
    async with _topic(unique("repid")) as name:
        await _fill(name, count, [("topic", b"handle")])
        server = repid.KafkaServer(address("kafka"), group_id=unique("group"))
        application, router = repid.Repid(), repid.Router()
        application.servers.register_server("default", server, is_default=True)

        async def handle(id: int, total: float, note: str) -> None:
            countdown.hit()

        router.actor(channel=name, name="handle")(handle)
        application.include_router(router)
        async with server.connection():
            await application.run_worker(messages_limit=count, register_signals=())
            return countdown.rate_until_now()


async def _consume(scale: Scale) -> Mapping[str, float]:
    few = max(IN_FLIGHT, scale.count // 10)
    raw = await _raw_consume(scale.count)
    faststream = await _faststream(few)
    repid = await _repid(few)
    rate = await consume_rate(_settings(), unique("consume"), scale.count, prefetch=500)
    batches = await batch_consume_rate(_settings(), unique("batches"), scale.count, 100)
    return {
        "kafka.consume": rate / raw,
        "kafka.consume_faststream": rate / faststream,
        "kafka.consume_repid": rate / repid,
        "kafka.batches": batches / rate,
        "kafka.consume_rate": rate,
    }


SUITES = (
    Suite(
        "kafka.send",
        (
            Figure("kafka.send_one", "Kafka: one send at a time / aiokafka", 0.9),
            Figure("kafka.send", "Kafka: 100 sends in flight / aiokafka", 0.7),
            Figure("kafka.send_rate", "Kafka: 100 sends in flight", None, "/s"),
        ),
        _send,
    ),
    Suite(
        "kafka.consume",
        (
            Figure("kafka.consume", "Kafka: consume / getmany of 500 with a commit", 0.25),
            Figure("kafka.consume_faststream", "Kafka: consume / FastStream (lossy)", 4.0),
            Figure("kafka.consume_repid", "Kafka: consume / Repid"),
            Figure("kafka.batches", "Kafka: handler of batches of 100 / of single messages"),
            Figure("kafka.consume_rate", "Kafka: consume", None, "/s"),
        ),
        _consume,
    ),
)
