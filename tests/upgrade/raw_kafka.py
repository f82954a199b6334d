"""Capture and replay of qkit's state on Kafka with plain aiokafka.

The state consists of topics, records and the offsets of groups. Records keep their partitions,
offsets, keys, headers and values. Timestamps are shifted: a record written 5 s before the capture
gets a timestamp 5 s before the replay. Otherwise the broker's retention would delete it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code
from aiokafka.structs import OffsetAndMetadata

from tests.upgrade.raw import as_bytes, as_text

__all__ = ["capture", "remove", "replay"]

SET_FOR_THE_TOPIC = 1  # `config_source` of a value that was set for the topic


@asynccontextmanager
async def _admin(brokers: str) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(bootstrap_servers=brokers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def capture(brokers: str, prefix: str) -> list[Any]:
    """Return the topics with the prefix, their records, and the committed offsets of all groups."""
    found: list[Any] = []
    async with _admin(brokers) as admin:
        names = sorted(name for name in await admin.list_topics() if name.startswith(prefix))
        for topic in await admin.describe_topics(names):
            name, partitions = topic["topic"], len(topic["partitions"])
            found.append(
                {"topic": name, "partitions": partitions, "config": await _config(admin, name)}
            )
        now = round(time.time() * 1000)
        for each in list(found):
            found += await _records(brokers, each["topic"], each["partitions"], now)
        for group in sorted(name for name, *_ in await admin.list_consumer_groups()):
            offsets = await admin.list_consumer_group_offsets(group)
            found += [
                {
                    "group": group,
                    "topic": place.topic,
                    "partition": place.partition,
                    "offset": committed.offset,
                    "metadata": committed.metadata,
                }
                for place, committed in sorted(offsets.items())
                if committed.offset >= 0
            ]
    return found


async def _config(admin: Any, topic: str) -> dict[str, str]:
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    (resource,) = response.resources
    return {entry[0]: entry[1] for entry in resource[4] if entry[3] == SET_FOR_THE_TOPIC}


async def _records(brokers: str, topic: str, partitions: int, now: int) -> list[Any]:
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers, enable_auto_commit=False)
    await consumer.start()
    try:
        places = [TopicPartition(topic, partition) for partition in range(partitions)]
        ends = await consumer.end_offsets(places)
        found: list[Any] = []
        for place in places:
            consumer.assign([place])
            consumer.seek(place, 0)
            while await consumer.position(place) < ends[place]:
                record = await consumer.getone()
                assert record.offset == sum(f["partition"] == record.partition for f in found)
                found.append(
                    {
                        "record": topic,
                        "partition": record.partition,
                        "age": now - record.timestamp,
                        "key": None if record.key is None else as_text(record.key),
                        "headers": [[name, as_text(value)] for name, value in record.headers],
                        "value": None if record.value is None else as_text(record.value),
                    }
                )
        return found
    finally:
        await consumer.stop()


async def replay(brokers: str, commands: list[Any]) -> None:
    """Create the topics, write the records and commit the offsets."""
    async with _admin(brokers) as admin:
        topics = [
            NewTopic(each["topic"], each["partitions"], 1, topic_configs=each["config"])
            for each in commands
            if "config" in each
        ]
        answer = await admin.create_topics(topics)
        for _, code, *_ in answer.topic_errors:
            if code:
                raise for_code(code)
    await _write(brokers, [each for each in commands if "record" in each])
    offsets: dict[str, dict[Any, Any]] = {}
    for each in commands:
        if "group" in each:
            place = TopicPartition(each["topic"], each["partition"])
            committed = OffsetAndMetadata(each["offset"], each["metadata"])
            offsets.setdefault(each["group"], {})[place] = committed
    for group, marks in offsets.items():
        consumer = AIOKafkaConsumer(
            bootstrap_servers=brokers, group_id=group, enable_auto_commit=False
        )
        await consumer.start()
        try:
            consumer.assign(list(marks))
            await consumer.commit(marks)
        finally:
            await consumer.stop()


async def _write(brokers: str, records: list[Any]) -> None:
    now = round(time.time() * 1000)
    producer = AIOKafkaProducer(bootstrap_servers=brokers, acks="all", enable_idempotence=True)
    await producer.start()
    try:
        sent = [
            await producer.send(
                each["record"],
                None if each["value"] is None else as_bytes(each["value"]),
                key=None if each["key"] is None else as_bytes(each["key"]),
                partition=each["partition"],
                timestamp_ms=now - each["age"],
                headers=[(name, as_bytes(value)) for name, value in each["headers"]],
            )
            for each in records
        ]
        await asyncio.gather(*sent)
    finally:
        await producer.stop()


async def remove(brokers: str, prefix: str) -> None:
    """Delete the topics with the prefix."""
    async with _admin(brokers) as admin:
        names = [name for name in await admin.list_topics() if name.startswith(prefix)]
        if names:
            await admin.delete_topics(names)
