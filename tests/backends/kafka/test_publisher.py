"""Publishing: partitions are independent and ordered, and unconfirmed batches fail in time."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from qkit import PublishGroups, QueueService, Settings
from qkit._internal.ids import new_id
from qkit.backend import QueueSpec
from qkit.backends.kafka.backend import RETRY_TOPIC_GROUP, KafkaBackend
from qkit.backends.kafka.driver import Partition, partition_of
from qkit.message import GROUP, Envelope, Sent
from tests.support.waiting import eventually

PARTITIONS = 4


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def backend(kafka_url: str, name: str) -> AsyncIterator[KafkaBackend]:
    """Yield a backend whose producer has sent one message to each partition of a queue."""
    backend = KafkaBackend(kafka_url, partitions=PARTITIONS, heartbeat=0.2)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    for key in KEYS:
        await backend.publish(name, [Envelope(new_id(), b"0", key=key)])
    yield backend
    await backend.aclose()


def key_for(partition: int) -> str:
    keys = (f"key-{number}" for number in range(1_000))
    return next(key for key in keys if partition_of(key.encode(), PARTITIONS) == partition)


KEYS = [key_for(partition) for partition in range(PARTITIONS)]


def producer_of(backend: KafkaBackend) -> Any:
    producer = backend._publisher._shared.value
    assert producer is not None
    return producer


class Stall:
    """Partitions that have no known leader, so that their batches wait in the driver."""

    def __init__(self, backend: KafkaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.partitions: set[int] = set()
        cluster = producer_of(backend).client.cluster
        real: Callable[[Partition], Any] = cluster.leader_for_partition
        monkeypatch.setattr(
            cluster,
            "leader_for_partition",
            lambda target: None if target.partition in self.partitions else real(target),
        )


@pytest.fixture
def stall(backend: KafkaBackend, monkeypatch: pytest.MonkeyPatch) -> Stall:
    return Stall(backend, monkeypatch)


async def bodies(backend: KafkaBackend, queue: str, partition: int) -> list[int]:
    first, after = (await backend.bounds(queue))[partition]
    found = await backend.read_range(queue, partition, first, after)
    return [int(envelope.body) for _, envelope in found]


async def test_a_stalled_partition_does_not_delay_others_and_keys_keep_their_order(
    backend: KafkaBackend, name: str, stall: Stall
) -> None:
    async with QueueService(
        Settings(type="kafka", url="unused:1", send_timeout=60), backend=backend
    ) as service:
        stall.partitions = {0}
        sends = {
            key: [asyncio.create_task(service.send(name, number, key=key)) for number in range(50)]
            for key in KEYS
        }
        async with asyncio.timeout(5):  # much shorter than the timeout of the stalled sends
            for key in KEYS[1:]:
                await asyncio.gather(*sends[key])
        assert not any(send.done() for send in sends[KEYS[0]])
        await service.send_many(name, [50, 51], key=KEYS[1])
        stall.partitions = set()
        await asyncio.gather(*sends[KEYS[0]])
        for partition in range(PARTITIONS):
            expected = [0, *range(52 if partition == 1 else 50)]
            assert await bodies(backend, name, partition) == expected


async def test_other_batches_can_be_confirmed_after_one_batch_timed_out(
    backend: KafkaBackend, name: str, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = backend._publisher
    producer = publisher._shared.value
    await eventually(lambda: publisher._watching is None)
    monkeypatch.setattr(publisher._parameters, "timeout", 1.0)
    stall.partitions = {0, 1}
    lost = asyncio.create_task(backend.publish(name, [Envelope(new_id(), b"1", key=KEYS[0])]))
    await asyncio.sleep(0.6)
    late = asyncio.create_task(backend.publish(name, [Envelope(new_id(), b"1", key=KEYS[1])]))
    await eventually(lambda: publisher._shared.value is not producer)
    stall.partitions = {0}
    (sent,) = await late
    assert isinstance(sent, Sent)
    with pytest.raises(TimeoutError):
        await lost


async def test_a_partition_added_after_the_producer_loaded_metadata_accepts_messages(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_url)
    await admin.start()
    try:
        await admin.create_partitions({name: NewPartitions(total_count=PARTITIONS + 2)})
    finally:
        await admin.close()

    async def has_new_partitions() -> bool:  # the broker applies the change asynchronously
        return await backend._cluster.count_partitions(name) == PARTITIONS + 2

    await eventually(has_new_partitions)
    await backend.declare(QueueSpec(name=name))
    key = next(
        key
        for key in (f"new-{number}" for number in range(1_000))
        if partition_of(key.encode(), PARTITIONS + 2) == PARTITIONS + 1
    )
    envelope = Envelope(new_id(), b"7", key=key)
    assert backend.publish_group(name, envelope) == PARTITIONS + 1
    await backend.publish(name, [envelope])
    assert await bodies(backend, name, PARTITIONS + 1) == [7]


# Publish groups


async def test_a_message_goes_to_the_partition_of_its_publish_group(
    backend: KafkaBackend, name: str
) -> None:
    assert isinstance(backend, PublishGroups)
    for partition in range(PARTITIONS):
        without_key = Envelope(new_id(), b"1")
        await backend.publish_in_group(name, partition, [without_key])
        assert await bodies(backend, name, partition) == [0, 1]


async def test_messages_without_a_key_change_their_publish_group_every_16_kib(
    backend: KafkaBackend, name: str
) -> None:
    groups = [backend.publish_group(name, Envelope(new_id(), bytes(1_000))) for _ in range(68)]
    assert [groups.count(partition) for partition in range(PARTITIONS)] == [17] * PARTITIONS
    assert sum(a != b for a, b in itertools.pairwise(groups)) == PARTITIONS - 1


async def test_a_new_partition_is_chosen_if_that_of_the_publish_group_no_longer_exists(
    backend: KafkaBackend, name: str
) -> None:
    """A topic may be deleted and created with fewer partitions while a message waits."""
    await backend.publish_in_group(name, 99, [Envelope(new_id(), b"5", key=KEYS[2])])
    assert await bodies(backend, name, 2) == [0, 5]


async def test_messages_for_the_retry_topic_have_a_separate_publish_group(
    backend: KafkaBackend, name: str
) -> None:
    delayed = Envelope(new_id(), b"1", key=KEYS[0], not_before=time.time() + 60)
    assert backend.publish_group(name, delayed) == RETRY_TOPIC_GROUP
    due = Envelope(new_id(), b"2", key=KEYS[0], not_before=time.time() - 1)
    assert backend.publish_group(name, due) == 0
    replayed = Envelope(new_id(), b"3", {GROUP: "billing"}, key=KEYS[0])
    assert backend.publish_group(name, replayed) == 0  # a queue has only one consumer group
    await backend.publish_in_group(name, RETRY_TOPIC_GROUP, [delayed])
    assert (await backend.stats(name)).scheduled == 1
    assert await bodies(backend, name, 0) == [0]


async def test_an_unknown_topic_and_a_queue_with_max_depth_have_no_publish_groups(
    backend: KafkaBackend, name: str
) -> None:
    envelopes = [Envelope(new_id(), b"1", key=key) for key in KEYS]
    assert {backend.publish_group(f"{name}-other", each) for each in envelopes} == {None}
    assert {backend.publish_group(name, each) for each in envelopes} == set(range(PARTITIONS))
    await backend.declare(QueueSpec(name=name, max_depth=100))
    assert {backend.publish_group(name, each) for each in envelopes} == {None}


async def test_a_foreign_key_that_is_not_utf_8_keeps_its_partition(
    backend: KafkaBackend, name: str
) -> None:
    """The text of such a key hashes differently from its bytes."""
    raw = next(
        key
        for key in (bytes([255, number]) for number in range(256))
        if partition_of(key, PARTITIONS)
        != partition_of(key.decode(errors="backslashreplace").encode(), PARTITIONS)
    )
    producer = producer_of(backend)
    partition = partition_of(raw, PARTITIONS)
    await producer.send_and_wait(name, b"9", key=raw, partition=partition)
    _, after = (await backend.bounds(name))[partition]
    ((_, envelope),) = await backend.read_range(name, partition, after - 1, after)
    assert backend.publish_group(name, envelope) == partition
