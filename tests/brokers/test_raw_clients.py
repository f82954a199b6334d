"""Test brokers used through their client libraries, without qkit."""

from __future__ import annotations

import uuid

import aio_pika
import redis.asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic


def unique_name() -> str:
    return f"qkit-raw-{uuid.uuid4().hex}"


async def test_redis_pops_pushed_items_in_order(redis_url: str) -> None:
    name = unique_name()
    async with redis.asyncio.from_url(redis_url) as client:
        try:
            await client.rpush(name, b"first", b"second")
            assert await client.blpop([name], timeout=60) == (name.encode(), b"first")
            assert await client.blpop([name], timeout=60) == (name.encode(), b"second")
        finally:
            await client.delete(name)


async def test_rabbitmq_confirms_a_publish_and_accepts_an_ack(rabbitmq_url: str) -> None:
    async with await aio_pika.connect(rabbitmq_url, timeout=60) as connection:
        channel = await connection.channel(publisher_confirms=True)
        queue = await channel.declare_queue(unique_name(), durable=True)
        try:
            message = aio_pika.Message(b"first", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, queue.name, mandatory=True, timeout=60)
            received = await queue.get(timeout=60)
            assert received.body == b"first"
            await received.ack()
            assert await queue.get(fail=False) is None
        finally:
            await queue.delete(if_unused=False, if_empty=False)


async def test_kafka_acknowledges_a_record_and_returns_it(kafka_url: str) -> None:
    topic = unique_name()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_url)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
        async with AIOKafkaProducer(bootstrap_servers=kafka_url, acks="all") as producer:
            await producer.send_and_wait(topic, b"first", key=b"key")
        async with AIOKafkaConsumer(
            topic, bootstrap_servers=kafka_url, auto_offset_reset="earliest"
        ) as consumer:
            record = await consumer.getone()
        assert (record.key, record.value, record.offset) == (b"key", b"first", 0)
        await admin.delete_topics([topic])
    finally:
        await admin.close()
