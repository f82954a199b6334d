"""Kafka backend, beyond the conformance suite: topics, delays, dead letters, errors, settings."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, errors
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from pydantic import BaseModel

from qkit import ConfigError, Message, QueueService, Sent, Settings, consume
from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit.backend import Admin, DeadLetterSource, DroppedLetterSource, QueueSpec
from qkit.backends.factory import open_backend
from qkit.backends.kafka import driver
from qkit.backends.kafka.backend import KafkaBackend
from qkit.backends.kafka.driver import partition_of
from qkit.backends.kafka.errors import DRIVER_ERRORS, to_queue_error, translate_errors
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    LifecycleError,
    PayloadTooLarge,
    QueueError,
    QueueNotFound,
    Reject,
    SendTimeout,
)
from qkit.message import DeadLetter, Envelope, Reason
from tests.support.kafka import spec, take
from tests.support.waiting import eventually

MAX_LATENESS_SECONDS = 5.0  # on a busy machine


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def backend(kafka_url: str) -> AsyncIterator[KafkaBackend]:
    backend = KafkaBackend(kafka_url, partitions=4, heartbeat=0.2)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture
async def admin(kafka_url: str) -> AsyncIterator[Any]:
    """Yield an aiokafka admin client, to act as another program."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_url)
    await admin.start()
    yield admin
    await admin.close()


@pytest_asyncio.fixture
async def raw(kafka_url: str) -> AsyncIterator[Any]:
    """Yield an aiokafka producer, to send foreign messages."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka_url)
    await producer.start()
    yield producer
    await producer.stop()


async def read(kafka_url: str, topic: str, count: int) -> list[Any]:
    """Return the first ``count`` records of a topic, read without a consumer group."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka_url, auto_offset_reset="earliest", group_id=None
    )
    await consumer.start()
    try:
        async with asyncio.timeout(60):
            return [await consumer.getone() for _ in range(count)]
    finally:
        await consumer.stop()


# Other programs


class Order(BaseModel):
    id: int
    total: float = 0.0


async def test_a_foreign_message_reaches_a_typed_handler(
    kafka_url: str, backend: KafkaBackend, raw: Any, name: str
) -> None:
    got: list[tuple[Order, Message]] = []

    @consume(name)
    async def handle(order: Order, message: Message) -> None:
        got.append((order, message))

    service = QueueService(Settings(type="kafka", url=kafka_url), backend=backend)
    service.register(handle)
    async with service:
        headers = [("tenant", b"acme"), ("tenant", b"twice"), ("none", None)]
        sent = await raw.send_and_wait(name, b'{"id": 7}', key=b"customer-7", headers=headers)
        await eventually(lambda: got)
    order, message = got[0]
    assert order == Order(id=7)
    assert message.id == f"{name}-{sent.partition}-{sent.offset}"
    assert (message.key, message.attempt) == ("customer-7", 1)
    assert dict(message.headers) == {"tenant": "twice", "none": ""}


async def test_another_client_reads_what_qkit_sent(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("0190", b'{"id":1}', {"tenant": "acme"}, key="c-7")])
    (record,) = await read(kafka_url, name, 1)
    assert (record.key, record.value) == (b"c-7", b'{"id":1}')
    assert record.headers == (("qkit-id", b"0190"), ("tenant", b"acme"))
    assert record.partition == partition_of(b"c-7", 4), "not the partition of other clients"


async def test_a_record_above_the_size_limit_is_dead_lettered_and_does_not_block_the_queue(
    kafka_url: str, admin: Any, name: str
) -> None:
    """The topic allows larger records than qkit; the dead-letter topic must accept them too."""
    await admin.create_topics(
        [NewTopic(name, 1, 1, topic_configs={"max.message.bytes": "8000000"})]
    )
    got: list[int] = []

    @consume(name)
    async def handle(number: int) -> None:
        got.append(number)

    service = QueueService(Settings(type="kafka", url=kafka_url))
    service.register(handle)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_url, max_request_size=8_000_000)
    await producer.start()
    async with service:
        await producer.send_and_wait(name, b"x" * 3_000_000)
        await producer.stop()
        await service.send(name, 1)
        await eventually(lambda: got == [1])
        (letter,) = await service.dead_letters(name).list()
        assert len(letter.body) == 3_000_000


async def test_a_retried_foreign_message_keeps_its_id_and_origin(
    kafka_url: str, backend: KafkaBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    sent = await raw.send_and_wait(name, b"{}", key=b"\xff\xfe")
    async with backend.subscribe(spec(name)) as subscription:
        (first,) = await take(subscription)
        await subscription.release(first, 0.0)
        (second,) = await take(subscription)
        assert (second.envelope.id, second.envelope.attempt) == (first.envelope.id, 2)
        await subscription.ack(second)
    (retried,) = await read(kafka_url, f"{name}.retry", 1)
    assert retried.key == b"\xff\xfe"
    headers = dict(retried.headers)
    assert headers["qkit-original-topic"] == name.encode()
    assert headers["qkit-original-partition"] == str(sent.partition).encode()
    assert headers["qkit-original-offset"] == str(sent.offset).encode()


async def test_keyed_messages_keep_their_order_and_keyless_ones_are_spread(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    keyed = [Envelope(new_id(), b"%d" % number, key=f"k{number % 5}") for number in range(50)]
    for start in range(0, 50, 10):
        await backend.publish(name, keyed[start : start + 10])
    large = [Envelope(new_id(), b"x" * 4_096) for _ in range(40)]
    await asyncio.gather(*(backend.publish(name, [envelope]) for envelope in large))
    records = await read(kafka_url, name, 90)
    for key in range(5):
        mine = [record for record in records if record.key == f"k{key}".encode()]
        assert [int(record.value) for record in mine] == list(range(key, 50, 5))
        assert len({record.partition for record in mine}) == 1
    keyless = Counter(record.partition for record in records if record.key is None)
    assert set(keyless) == {0, 1, 2, 3}


# Topics


async def test_in_another_event_loop_nothing_is_sent(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("a", b"")])

    async def misuse() -> None:
        calls = [
            backend.publish(name, [Envelope("b", b"")]),
            backend.publish(name, [Envelope("c", b"", not_before=9e9)]),
            backend.declare(QueueSpec(name=f"{name}-other")),
            backend.stats(name),
            backend.purge(name),
            backend.ping(),
            backend.subscribe(spec(name)).__aenter__(),
        ]
        for call in calls:
            with pytest.raises(LifecycleError, match="another event loop"):
                await call

    await asyncio.to_thread(asyncio.run, misuse())
    async with backend.subscribe(spec(name)) as subscription:
        assert [item.envelope.id for item in await take(subscription)] == ["a"]
    assert f"{name}-other" not in await backend.queues()
    assert (await backend.bounds(name))[0][1] + (await backend.bounds(name))[1][1] <= 1


@pytest.mark.proves("003-dlq-5")
async def test_topics_are_created_as_configured_and_existing_ones_are_not_changed(
    kafka_url: str, backend: KafkaBackend, admin: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.declare(QueueSpec(name=f"{name}.dlq", drop_oldest=True, max_depth=100))
    other = KafkaBackend(kafka_url, partitions=9)
    await other.start()
    await other.declare(QueueSpec(name=name))
    await other.aclose()
    async with backend.subscribe(spec(name)):
        described = await admin.describe_topics([name, f"{name}.dlq", f"{name}.retry"])
    assert {topic["topic"]: len(topic["partitions"]) for topic in described} == {
        name: 4,
        f"{name}.dlq": 1,
        f"{name}.retry": 13,
    }
    found = await configuration(admin, f"{name}.dlq")
    assert found["retention.ms"] == "-1"
    assert int(found["max.message.bytes"]) > 1 << 20


async def configuration(admin: Any, topic: str) -> dict[str, str]:
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {item[0]: item[1] for item in answer.resources[0][4]}


async def test_requests_about_an_undeclared_topic_do_not_create_it(
    backend: KafkaBackend, admin: Any, name: str
) -> None:
    """By default, a broker creates a topic when a client requests its metadata."""
    for call in (
        lambda: backend.publish(name, [Envelope(new_id(), b"")]),
        lambda: backend.stats(name),
        lambda: backend.peek(name, 1),
        lambda: backend.declare(QueueSpec(name=name, passive=True)),
        lambda: backend.subscribe(spec(name)).__aenter__(),
    ):
        with pytest.raises(QueueNotFound):
            await call()
    assert name not in await admin.list_topics()


async def test_a_deleted_topic_is_not_created_again_by_a_send(
    kafka_url: str, backend: KafkaBackend, admin: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(new_id(), b"")])
    await admin.delete_topics([name])
    began = time.monotonic()
    with pytest.raises(QueueNotFound):
        await backend.publish(name, [Envelope(new_id(), b"lost")])
    assert time.monotonic() - began < 20
    assert name not in await admin.list_topics()
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(new_id(), b"kept")])
    assert [envelope.body for envelope in await backend.peek(name, 10)] == [b"kept"]


@pytest.mark.proves("000-replication-1")
async def test_more_replicas_than_brokers_are_rejected(backend: KafkaBackend, name: str) -> None:
    with pytest.raises(ConfigError, match="replicas") as caught:
        await backend.declare(QueueSpec(name=name, replicas=5))
    assert isinstance(caught.value.cause, errors.InvalidReplicationFactorError)
    assert name not in await backend.queues()


async def test_colliding_names_are_rejected_with_an_error_that_contains_both(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=f"{name}.a_b"))
    with pytest.raises(ConfigError) as caught:
        await backend.declare(QueueSpec(name=f"{name}_a.b"))
    assert f"{name}.a_b" in str(caught.value)
    assert f"{name}_a.b" in str(caught.value)


async def test_a_retry_topic_is_not_a_channel(backend: KafkaBackend, name: str) -> None:
    with pytest.raises(ConfigError, match="retry"):
        await backend.declare(QueueSpec(name=f"{name}.retry"))
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)):
        assert name in (found := await backend.queues())
        assert f"{name}.retry" not in found


async def test_a_passive_declaration_creates_nothing_and_reports_what_is_missing(
    backend: KafkaBackend, admin: Any, name: str
) -> None:
    await admin.create_topics([NewTopic(name, 2, 1)])
    await eventually(lambda: backend._cluster.count_partitions(name))
    await backend.declare(QueueSpec(name=name, passive=True))
    await backend.publish(name, [Envelope(new_id(), b"now")])
    with pytest.raises(ConfigError, match="retry"):
        await backend.publish(name, [Envelope(new_id(), b"", not_before=time.time() + 60)])
    with pytest.raises(ConfigError, match="retry"):
        await backend.subscribe(spec(name)).__aenter__()
    await admin.create_topics([NewTopic(f"{name}.retry", 5, 1)])
    await eventually(lambda: backend._cluster.count_partitions(f"{name}.retry"))
    with pytest.raises(ConfigError, match="13 partitions"):
        await backend.subscribe(spec(name)).__aenter__()


async def test_a_group_receives_messages_sent_after_its_first_subscription(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    await backend.publish(name, [Envelope(new_id(), b"before")])
    async with backend.subscribe(spec(name, group="mail", broadcast=True)):
        pass  # receives nothing
    await backend.publish(name, [Envelope(new_id(), b"without members")])
    async with backend.subscribe(spec(name, group="mail", broadcast=True)) as subscription:
        (delivery,) = await take(subscription)
        assert delivery.envelope.body == b"without members"


async def test_the_depth_of_a_topic_without_groups_is_zero(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    await backend.publish(name, [Envelope(new_id(), b"a")])
    assert (await backend.stats(name)).depth == 0


async def test_a_body_above_the_limit_of_the_topic_raises_payload_too_large(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    largest = b"x" * (1 << 20)
    await backend.publish(name, [Envelope(new_id(), largest)])
    with pytest.raises(PayloadTooLarge) as caught:
        await backend.publish(name, [Envelope(new_id(), largest * 2)])
    assert isinstance(caught.value.cause, errors.MessageSizeTooLargeError)
    await backend.publish(name, [Envelope(new_id(), b"small")])
    async with backend.subscribe(spec(name)) as subscription:
        found = await take(subscription, 2)
        assert sorted(len(delivery.envelope.body) for delivery in found) == [5, 1 << 20]


# Delays


async def test_messages_with_short_and_long_delays_arrive_neither_early_nor_late(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    delays = [0.05, 0.3, 0.95, 1.0, 1.2, 1.9, 2.6, 3.4, 4.1, 5.3] * 3
    due: dict[str, tuple[float, float]] = {}
    waited: dict[float, float] = {}

    async def receive_all(subscription: KafkaSubscription) -> None:
        for _ in delays:
            (delivery,) = await take(subscription)
            sent, delay = due[delivery.envelope.id]
            waited[delay] = max(waited.get(delay, 0.0), time.time() - sent)
            assert delay - 0.002 <= time.time() - sent, "delivered early"
            await subscription.ack(delivery)

    async with backend.subscribe(spec(name)) as subscription:
        receiving = asyncio.create_task(receive_all(subscription))
        for delay in delays:
            now = time.time()
            envelope = Envelope(new_id(), b"", not_before=now + delay)
            due[envelope.id] = now, delay
            await backend.publish(name, [envelope])
        await receiving
    print({delay: round(time - delay, 3) for delay, time in waited.items()})
    for delay, longest in waited.items():
        assert longest <= delay + MAX_LATENESS_SECONDS, delay
    assert (await backend.stats(name)).scheduled == 0


async def test_a_long_delay_moves_from_tier_to_tier(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        began = time.time()
        await backend.publish(name, [Envelope("far", b"{}", not_before=began + 3.5)])
        (delivery,) = await take(subscription)
        assert 3.5 - 0.002 <= time.time() - began <= 3.5 + MAX_LATENESS_SECONDS
        assert (delivery.envelope.id, delivery.envelope.attempt) == ("far", 1)
        await subscription.ack(delivery)
    records = await read(kafka_url, f"{name}.retry", 3)
    records.sort(key=lambda record: record.timestamp)
    assert [record.partition for record in records] == [1, 0, 0]


async def test_a_delayed_message_outlives_the_consumer_that_read_it(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    began = time.time()
    delay = 5.0
    await backend.publish(name, [Envelope("a", b"{}", not_before=began + delay)])
    assert (await backend.stats(name)).scheduled == 1
    async with backend.subscribe(spec(name)) as first:
        trackers = first.membership.trackers
        await eventually(lambda: any(each.pending for each in trackers.values()))  # was read
    async with backend.subscribe(spec(name)) as second:
        (delivery,) = await take(second)
        assert delay - 0.002 <= time.time() - began <= delay + MAX_LATENESS_SECONDS
        await second.ack(delivery)
    async with backend.subscribe(spec(name)) as third:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await third.receive(1)


async def test_a_delayed_message_of_a_topic_is_delivered_once_to_each_group(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    groups = ("mail", "audit")
    specs = [spec(name, group=group, broadcast=True) for group in groups]
    async with backend.subscribe(specs[0]) as one, backend.subscribe(specs[1]) as two:
        await backend.publish(name, [Envelope("a", b"{}", not_before=time.time() + 1.4)])
        for subscription in (one, two):
            (delivery,) = await take(subscription)
            assert (delivery.envelope.id, delivery.envelope.headers) == ("a", {})
            await subscription.ack(delivery)
        for subscription in (one, two):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await subscription.receive(1)


# Dead letters


@pytest.mark.proves("003-dlq-5", "003-dlq-6", "003-dlq-7")
async def test_a_dead_letter_has_the_origin_of_its_message_and_the_error(
    kafka_url: str, backend: KafkaBackend, raw: Any, name: str
) -> None:
    attempts: list[int] = []

    @consume(name)
    async def fail(body: dict[str, int], message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("not yet")
        raise Reject("negative total")

    service = QueueService(
        Settings(type="kafka", url=kafka_url, retry={"initial_delay": 0.05}), backend=backend
    )
    service.register(fail)
    async with service:
        sent = await raw.send_and_wait(name, b'{"id": 1}', key=b"k")
        await eventually(lambda: service.metrics().messages_dead_lettered == 1)
        (letter,) = await service.dead_letters(name).list()
    assert attempts == [1, 2]
    assert letter.headers == {}, "the origin must be only in the record, for other programs"
    (record,) = await read(kafka_url, f"{name}.dlq", 1)
    assert (record.key, record.value) == (b"k", b'{"id": 1}')
    headers = {header: value.decode() for header, value in record.headers}
    assert headers["qkit-original-topic"] == name
    assert headers["qkit-original-partition"] == str(sent.partition)
    assert headers["qkit-original-offset"] == str(sent.offset)
    assert headers["qkit-dead-channel"] == name
    assert headers["qkit-dead-reason"] == Reason.EXPLICIT_NACK
    assert headers["qkit-dead-error"] == "negative total"
    assert headers["qkit-dead-attempts"] == "2"


async def dead_letter(backend: KafkaBackend, name: str, *ids: str, **options: Any) -> str:
    """Write dead letters with these ids and return the name of their queue."""
    letters = f"{name}.dlq"
    values: dict[str, Any] = {"max_depth": 100, **options}
    await backend.declare(QueueSpec(name=letters, drop_oldest=True, **values))
    for id in ids:
        letter = DeadLetter.of(
            Envelope(id, id.encode()), channel=name, reason=Reason.UNDECODABLE, at=1.0
        )
        await backend.publish(letters, [letter.to_envelope()])
    return letters


async def test_remove_hides_a_letter_with_a_marker_and_deletes_the_oldest_removed_letters(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    letters = await dead_letter(backend, name, "a", "b", "c", "b", "d")

    async def remaining() -> str:
        found = await backend.peek(letters, 100)
        assert (await backend.stats(letters)).depth == len(found)
        return "".join(envelope.id for envelope in found)

    assert await remaining() == "abcbd"
    assert await backend.remove(letters, ["b", "unknown"]) == 1
    assert await remaining() == "acbd", "only the older of the two letters must be removed"
    other = KafkaBackend(kafka_url)
    await other.start()
    assert len(await other.peek(letters, 100)) == 4, "another backend must respect the marker"
    assert (await other.stats(letters)).depth == 4
    await other.aclose()
    assert await backend.remove(letters, ["d", "a"]) == 2
    assert await remaining() == "cb"
    await backend.publish(letters, [Envelope("e", b"")])
    assert await remaining() == "cbe"
    assert await backend.remove(letters, ["b", "c", "e"]) == 3
    assert await remaining() == ""
    assert await backend.remove(letters, ["c"]) == 0
    assert await backend.purge(letters) == 0


async def test_a_consumer_of_dead_letters_receives_no_markers(
    backend: KafkaBackend, name: str
) -> None:
    letters = await dead_letter(backend, name, "a", "b", "c")
    await backend.remove(letters, ["b"])
    async with backend.subscribe(spec(letters)) as subscription:
        found = [delivery.envelope.id for delivery in await take(subscription, 3)]
        assert found == ["a", "b", "c"], "a marker must hide a letter only from ``Admin``"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await subscription.receive(1)


async def test_the_oldest_letters_above_the_limit_are_dropped_and_reported(
    backend: KafkaBackend, name: str
) -> None:
    dropped: list[str] = []
    backend.on_dropped_letter(lambda letter: dropped.append(letter.message_id))
    letters = await dead_letter(backend, name, "a", "b", "c", max_depth=3)
    assert dropped == []
    await backend.remove(letters, ["b"])
    await dead_letter(backend, name, "d", max_depth=3)
    assert dropped == [], "a hidden letter must not count"
    await dead_letter(backend, name, "e", "f", max_depth=3)
    assert dropped == ["a", "c"]
    assert [envelope.id for envelope in await backend.peek(letters, 10)] == ["d", "e", "f"]


async def test_no_letter_is_dropped_below_the_limit_after_several_were_removed(
    backend: KafkaBackend, name: str
) -> None:
    dropped: list[str] = []
    backend.on_dropped_letter(lambda letter: dropped.append(letter.message_id))
    letters = await dead_letter(backend, name, "a", "b", "c", "d", max_depth=4)
    await backend.remove(letters, ["b", "c"])
    await dead_letter(backend, name, "e", max_depth=4)
    assert dropped == []
    assert [envelope.id for envelope in await backend.peek(letters, 10)] == ["a", "d", "e"]


async def test_a_service_reports_dropped_letters(
    kafka_url: str, backend: KafkaBackend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    @consume(name)
    async def fail(number: int) -> None:
        raise Reject("negative total")

    service = QueueService(
        Settings(type="kafka", url=kafka_url, dead_letter={"max_size": 1}), backend=backend
    )
    service.register(fail)
    dropped: list[str] = []
    service.on(
        "dead_letter",
        lambda event: dropped.append(event.letter.message_id) if not event.kept else None,
    )
    async with service:
        first = await service.send(name, 1)
        await eventually(lambda: service.metrics().messages_dead_lettered == 1)
        await service.send(name, 2)
        await eventually(lambda: dropped == [first.message_id])
    assert "dropped the oldest dead letter" in caplog.text


async def test_a_letter_is_written_once_if_the_oldest_cannot_be_deleted(
    backend: KafkaBackend,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(before: object) -> None:
        raise ConfigError("the user lacks a permission")

    monkeypatch.setattr(backend._cluster, "delete_records", fail)
    letters = await dead_letter(backend, name, "a", "b", max_depth=1)
    assert [envelope.id for envelope in await backend.peek(letters, 10)] == ["a", "b"]
    assert "the user lacks a permission" in caplog.text


# Administration


async def test_the_backend_implements_admin_and_dropped_letter_source(
    backend: KafkaBackend,
) -> None:
    assert isinstance(backend, Admin)
    assert isinstance(backend, DroppedLetterSource)
    assert not isinstance(backend, DeadLetterSource), "Kafka writes no dead letters itself"


async def test_in_flight_is_known_while_no_other_process_consumes(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(new_id(), b"%d" % number) for number in range(10)])
    other = KafkaBackend(kafka_url, heartbeat=0.2)
    await other.start()
    async with backend.subscribe(spec(name)) as subscription:
        held = await take(subscription, 10)
        for delivery in held[2:6]:
            await subscription.ack(delivery)
        stats = await backend.stats(name)
        assert (stats.depth, stats.in_flight, stats.consumers) == (0, 6, 1)
        assert await backend.peek(name, 10) == []
        await asyncio.sleep(0.3)  # until the acks are committed
        stats = await other.stats(name)
        assert (stats.depth, stats.in_flight, stats.consumers) == (6, None, 1)
        await subscription.ack(held[9])
    assert (await backend.stats(name)).depth == 5, "an out-of-order ack was not committed"
    assert len(await other.peek(name, 10)) == 5
    await other.aclose()


async def test_a_purge_deletes_waiting_messages_and_keeps_held_ones_for_the_next_consumer(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(f"m{number}", b"") for number in range(10)])
    await backend.publish(name, [Envelope("late", b"", not_before=time.time() + 60)])
    async with backend.subscribe(spec(name, prefetch=3)) as subscription:
        held = await take(subscription, 3)
        await subscription.ack(held[0])
        assert await backend.purge(name) == 8
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await subscription.receive(1)
    async with backend.subscribe(spec(name)) as successor:
        again = await take(successor, 2)
        assert [delivery.envelope.id for delivery in again] == ["m1", "m2"]
        for delivery in again:
            await successor.ack(delivery)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await successor.receive(1)


async def test_a_queue_that_was_deleted_and_created_again_is_read_from_its_beginning(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(f"old {number}", b"", key="k") for number in range(3)])
    async with backend.subscribe(spec(name)) as subscription:
        for delivery in await take(subscription, 3):
            await subscription.ack(delivery)
    await backend.delete(name)
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(f"new {number}", b"", key="k") for number in range(5)])
    async with backend.subscribe(spec(name)) as subscription:
        found = await take(subscription, 5)
        assert [delivery.envelope.id for delivery in found] == [f"new {n}" for n in range(5)]


async def test_a_send_that_is_cancelled_while_connecting_does_not_affect_other_sends(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[object] = []
    proceed = asyncio.Event()

    class SlowProducer(driver.Producer):  # type: ignore[misc]  # the driver has no types
        async def start(self) -> None:
            created.append(self)
            await proceed.wait()
            await super().start()

    monkeypatch.setattr(driver, "Producer", SlowProducer)
    await backend.declare(QueueSpec(name=name))
    first, second = (
        asyncio.ensure_future(backend.publish(name, [Envelope(new_id(), b"x")])) for _ in range(2)
    )
    await eventually(lambda: bool(created))
    first.cancel()
    await asyncio.wait([first])
    proceed.set()
    (sent,) = await second
    assert isinstance(sent, Sent)
    assert first.cancelled()
    assert len(created) == 1
    await backend.delete(name)


async def test_the_unconfirmed_batch_of_a_cancelled_send_is_dropped_after_the_timeout(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(new_id(), b"x", key="k")])
    publisher = backend._publisher
    producer = publisher._shared.value
    assert producer is not None
    await eventually(lambda: publisher._watching is None)
    monkeypatch.setattr(producer.client.cluster, "leader_for_partition", lambda _: None)
    monkeypatch.setattr(publisher._parameters, "timeout", 1.0)
    large = [Envelope(new_id(), bytes(300_000), key="k") for _ in range(3)]
    publishing = asyncio.ensure_future(backend.publish(name, large))
    await eventually(lambda: bool(publisher._in_flight[producer]))  # the first batch is sent
    publishing.cancel()
    await asyncio.wait([publishing])
    await eventually(lambda: publisher._shared.value is not producer)
    monkeypatch.undo()  # a deletion may take longer than the short timeout
    await backend.delete(name)


# Shutdown


@pytest.mark.proves("003-shutdown-9", "003-shutdown-10", "003-shutdown-11")
async def test_shutdown_commits_offsets_leaves_the_group_and_disconnects(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    """All handled messages are committed, and the group has no members afterwards."""
    handled: list[int] = []
    before = asyncio.all_tasks()

    @consume(name, concurrency=4)
    async def handle(number: int) -> None:
        await asyncio.sleep(0.005)
        handled.append(number)

    service = QueueService(Settings(type="kafka", url=kafka_url))
    service.register(handle)
    await service.start()
    await service.send_many(name, range(300))
    await eventually(lambda: len(handled) > 50)
    await service.shutdown()
    stats = await backend.stats(name)
    assert (stats.depth + (stats.scheduled or 0), stats.consumers) == (300 - len(handled), 0)
    inner = service._backend
    assert isinstance(inner, KafkaBackend)
    assert inner._publisher._shared.value is None
    assert inner._reader._consumer is None
    running = {task.get_name() for task in asyncio.all_tasks() - before if not task.done()}
    assert not {task for task in running if "kafka" in task}


# Errors


def driver_errors() -> list[type[BaseException]]:
    """Return all error types that the driver can raise."""
    found = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    ]
    return [*found, OSError, ConnectionResetError, TimeoutError]


@pytest.mark.parametrize("kind", driver_errors(), ids=lambda kind: kind.__name__)
async def test_every_error_of_the_driver_is_translated(kind: type[BaseException]) -> None:
    error = kind("text") if kind is not errors.CommitFailedError else kind()
    assert isinstance(error, DRIVER_ERRORS)
    with pytest.raises(QueueError) as caught:
        with translate_errors("publish", "orders"):
            raise error
    assert caught.value.cause is error
    assert (caught.value.backend, caught.value.queue) == ("kafka", "orders")
    retriable = getattr(error, "retriable", False)
    known = BackendUnavailable | QueueNotFound | SendTimeout | AckDeadlineExceeded
    assert not retriable or isinstance(caught.value, known), (
        "a retriable error became a permanent one"
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.UnknownTopicOrPartitionError(), QueueNotFound),
        (errors.MessageSizeTooLargeError(), PayloadTooLarge),
        (errors.TopicAuthorizationFailedError("t"), ConfigError),
        (errors.UnsupportedSaslMechanismError(), ConfigError),
        (errors.SaslAuthenticationFailed(), BackendUnavailable),
        (errors.InvalidTopicError(), ConfigError),
        (errors.InconsistentGroupProtocolError(), ConfigError),
        (errors.CommitFailedError(), AckDeadlineExceeded),
        (errors.KafkaTimeoutError(), SendTimeout),
        (errors.NotEnoughReplicasError(), BackendUnavailable),
        (errors.KafkaConnectionError(), BackendUnavailable),
        (errors.RequestTimedOutError(), BackendUnavailable),
        (errors.OutOfOrderSequenceNumber(), BackendUnavailable),
        (errors.NotLeaderForPartitionError(), BackendUnavailable),
        (OSError("reset"), BackendUnavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_are_translated_to_the_expected_types(
    error: Exception, expected: type[QueueError]
) -> None:
    assert type(to_queue_error(error, "publish")) is expected


# Settings


def test_settings_open_the_backend_and_a_missing_client_library_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(
        type="kafka",
        url="a:1,b:2",
        partitions=7,
        group_prefix="staging.",
        sasl_mechanism="PLAIN",
        sasl_username="me",
        sasl_password="secret",
    )
    backend = open_backend(settings, SystemClock())
    assert isinstance(backend, KafkaBackend)
    assert "secret" not in repr(backend.__dict__)
    monkeypatch.setitem(sys.modules, "aiokafka", None)
    for module in [name for name in sys.modules if name.startswith("qkit.backends.kafka")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ConfigError, match=r"install the extra .kafka., see docs/install.md"):
        open_backend(settings, SystemClock())


async def test_an_unreachable_broker_is_reported_in_time() -> None:
    backend = KafkaBackend("127.0.0.1:1", timeout=3.0)
    with pytest.raises(BackendUnavailable):
        await backend.start()
    with pytest.raises(BackendUnavailable):
        await backend.ping()
    await backend.aclose()
