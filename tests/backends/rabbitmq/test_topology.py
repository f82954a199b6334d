"""Declarations in RabbitMQ, including those of queues that exist with other arguments."""

from __future__ import annotations

import time
from typing import Any

import aiormq
import pytest
from pamqp.commands import Basic

from qkit import ConfigError, QueueService, Settings, consume
from qkit.backend import (
    QueueSpec,
)
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.topology import DEAD_LETTERS, group_queue
from qkit.errors import (
    QueueNotFound,
)
from qkit.message import Envelope
from tests.support.rabbitmq import (
    bare_channel,
    declare,
    ready,
    refused,
    spec,
    take,
)
from tests.support.waiting import eventually


@pytest.mark.proves("003-dlq-2", "003-dlq-3", "003-dlq-4")
async def test_a_queue_is_declared_with_its_dead_letter_exchange_and_binding(
    backend: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    await declare(backend, name)
    await raw.exchange_declare(DEAD_LETTERS, exchange_type="direct", durable=True)
    answer = await raw.basic_publish(
        b"x", exchange=DEAD_LETTERS, routing_key=f"{name}.dlq", mandatory=True
    )
    assert isinstance(answer, Basic.Ack), "the queue is not bound"
    assert await ready(raw, f"{name}.dlq") == 1
    arguments = backend._topology.arguments(backend._specs[name])
    assert arguments["x-dead-letter-exchange"] == DEAD_LETTERS
    del arguments["x-dead-letter-exchange"]
    error = await refused(rabbitmq_url, name, arguments=arguments)
    assert "x-dead-letter-exchange" in error
    assert DEAD_LETTERS in error, "the queue has another dead-letter exchange"


async def test_queues_are_durable_and_messages_persistent(
    classic: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    """``test_outages`` tests a restart of the broker."""
    await declare(classic, name)
    await classic.publish(name, [Envelope("a", b"x")])
    message = await raw.basic_get(name, no_ack=True)
    assert message.header.properties.delivery_mode == 2
    async with bare_channel(rabbitmq_url) as channel:
        with pytest.raises(aiormq.exceptions.ChannelPreconditionFailed, match="durable"):
            await channel.queue_declare(name, durable=False)


# Queues that exist with other arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"x-max-priority": 3},
        {"x-max-length": 7, "x-overflow": "reject-publish", "x-message-ttl": 60_000},
        {"x-dead-letter-exchange": "theirs", "x-queue-mode": "lazy"},
        {"x-dead-letter-exchange": "it's 'theirs'", "x-single-active-consumer": True},
    ],
    ids=["none", "fewer-priorities", "limits", "other-exchange", "quotes-and-bool"],
)
async def test_a_queue_that_exists_with_other_arguments_is_used_as_it_is(
    classic: RabbitMQBackend,
    raw: aiormq.Channel,
    name: str,
    arguments: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await raw.queue_declare(name, durable=True, arguments=arguments)
    await declare(classic, name)
    (warning,) = [text for text in caplog.messages if "used as it is" in text]
    wanted = classic._topology.arguments(classic._specs[name])
    for argument in (wanted.keys() | arguments.keys()) - {"x-queue-type"}:
        text = f"{argument} is {arguments.get(argument)!r}, qkit declares {wanted.get(argument)!r}"
        assert text in warning
    await declare(classic, name)
    assert len([text for text in caplog.messages if "used as it is" in text]) == 1
    await classic.publish(name, [Envelope("a", b"x")])
    async with classic.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        await subscription.release(delivery, 0.1)
        (delivery,) = await take(subscription)
        await subscription.ack(delivery)


async def test_a_queue_with_other_arguments_is_used_as_it_is_if_the_broker_truncates_its_error(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RabbitMQ's error text has at most 255 bytes, of which a channel name may use up to 200."""
    long = f"{name}-".ljust(200, "x")
    await raw.queue_declare(long, durable=True, arguments={"x-max-priority": 3})
    await classic.declare(QueueSpec(name=long))
    assert "RabbitMQ does not report which" in caplog.text
    await classic.publish(long, [Envelope("a", b"x")])
    assert await ready(raw, long) == 1


async def test_a_queue_that_is_not_durable_is_rejected(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await raw.queue_declare(name, durable=False, auto_delete=True)
    with pytest.raises(ConfigError, match=r"durable: 'false' there, 'true' here"):
        await classic.declare(QueueSpec(name=name))


async def test_a_queue_with_too_few_priorities_is_rejected(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await raw.queue_declare(name, durable=True, arguments={"x-max-priority": 3})
    with pytest.raises(
        ConfigError, match=r"created with a maximum priority of 3.*delete the queue"
    ):
        await classic.declare(QueueSpec(name=name, max_priority=9))
    await raw.queue_delete(name)
    await classic.declare(QueueSpec(name=name))
    with pytest.raises(ConfigError, match="created with a maximum priority of 9"):
        await classic.declare(QueueSpec(name=name, max_priority=20))


async def test_a_queue_of_another_type_is_rejected(
    classic: RabbitMQBackend, quorum: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await classic.declare(QueueSpec(name=name))
    with pytest.raises(ConfigError, match=r"exists as a classic queue.*set replicas=1"):
        await quorum.declare(QueueSpec(name=name))
    for queue in (name, f"{name}.dlq"):
        await raw.queue_delete(queue)
    await quorum.declare(QueueSpec(name=name))
    with pytest.raises(ConfigError, match=r"exists as a quorum queue.*set replicas above 1"):
        await classic.declare(QueueSpec(name=name))


async def test_a_queue_with_too_few_copies_is_rejected(
    quorum: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    await quorum.declare(QueueSpec(name=name))
    three = RabbitMQBackend(rabbitmq_url, replicas=3)
    await three.start()
    try:
        with pytest.raises(ConfigError, match="created with x-quorum-initial-group-size=1"):
            await three.declare(QueueSpec(name=name))
    finally:
        await three.aclose()


async def test_messages_carry_an_expiration_only_if_the_queue_dead_letters_without_loss(
    quorum: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    soon = Envelope("a", b"x", expires_at=time.time() + 60)
    await raw.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    await declare(quorum, name)
    await quorum.publish(name, [soon])
    message = await raw.basic_get(name, no_ack=True)
    assert message.header.properties.expiration is None
    await raw.queue_delete(name)
    await declare(quorum, name)
    await quorum.publish(name, [soon])
    message = await raw.basic_get(name, no_ack=True)
    assert message.header.properties.expiration is not None


async def test_a_ttl_above_the_limit_of_the_broker_is_sent_only_in_a_header(
    quorum: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    """RabbitMQ closes the connection on an expiration above 2**32 - 1 ms (49 days)."""
    await declare(quorum, name)
    for days in (49, 50, 20 * 365):
        await quorum.publish(name, [Envelope("a", b"x", expires_at=time.time() + days * 86_400)])
        message = await raw.basic_get(name, no_ack=True)
        assert (message.header.properties.expiration is None) is (days > 49)


@pytest.mark.parametrize("first", ["sender", "worker"])
async def test_queue_arguments_are_the_same_if_a_channel_disables_dead_letters(
    classic: RabbitMQBackend, quorum: RabbitMQBackend, name: str, first: str
) -> None:
    """Messages that the broker itself dead-letters go to the dead-letter queue of the settings."""
    for backend in (classic, quorum):
        queue = f"{name}-{'quorum' if backend is quorum else 'classic'}"
        sender = QueueSpec(name=queue, dead_letter=f"{queue}.dlq")
        worker = QueueSpec(name=queue, consumed=True)
        for declaration in (sender, worker) if first == "sender" else (worker, sender):
            await backend.declare(declaration)
        assert (await backend.stats(f"{queue}.dlq")).depth == 0
        arguments = backend._topology.arguments(worker)
        assert arguments == backend._topology.arguments(sender)
        assert arguments["x-dead-letter-routing-key"] == f"{queue}.dlq"


async def test_an_existing_dead_letter_queue_keeps_its_limit(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    dropped: list[str] = []
    classic.on_dropped_letter(lambda letter: dropped.append(letter.message_id))
    await raw.queue_declare(
        name, durable=True, arguments={"x-max-length": 1, "x-overflow": "drop-head"}
    )
    await classic.declare(QueueSpec(name=name, drop_oldest=True, max_depth=100))
    await classic.publish(name, [Envelope("a", b"")])
    await classic.publish(name, [Envelope("b", b"")])
    assert dropped == ["a"]


# Passive declarations


@pytest.mark.parametrize("topic", [False, True])
async def test_retries_without_a_delay_cascade_are_rejected_at_start(
    raw: aiormq.Channel, rabbitmq_url: str, name: str, topic: bool
) -> None:
    """Queues with seven replicas need a separate cascade, which no test creates."""
    queues = [name, f"{name}.dlq"]
    kind: dict[str, Any] = {"x-queue-type": "quorum"}
    for queue in queues:
        await raw.queue_declare(queue, durable=True, arguments=kind)
    if topic:
        queues.append(group_queue(name, "g"))
        await raw.queue_declare(queues[-1], durable=True, arguments=kind)
        await raw.exchange_declare(name, exchange_type="fanout", durable=True)
        await raw.queue_bind(queues[-1], name)
    got: list[str] = []

    def service(**retry: Any) -> QueueService:
        @consume(name, group="g", broadcast=topic)
        async def handle(body: str) -> None:
            got.append(body)
            raise RuntimeError("planted")

        settings = Settings(
            type="rabbitmq", url=rabbitmq_url, replicas=7, declare="passive", retry=retry
        )
        created = QueueService(settings)
        created.register(handle)
        return created

    delayed = service()
    try:
        with pytest.raises(ConfigError, match=r"retries need qkit.delay.*retry.mode='inline'"):
            await delayed.start()
    finally:
        await delayed.shutdown()
    inline = service(mode="inline", initial_delay=0.01)
    async with inline:
        await (inline.publish(name, "x") if topic else inline.send(name, "x"))
        await eventually(lambda: inline.dead_letters(name).list())
        assert got == ["x"] * 3
    for queue in queues:
        await raw.queue_delete(queue)


async def test_a_passive_declaration_creates_nothing(
    classic: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    for passive in (
        QueueSpec(name=name, passive=True),
        QueueSpec(name=name, passive=True, broadcast=True),
    ):
        with pytest.raises(QueueNotFound):
            await classic.declare(passive)
    await raw.queue_declare(name, durable=True, arguments={"x-max-length": 7})
    await classic.declare(QueueSpec(name=name, passive=True))
    await classic.publish(name, [Envelope("a", b"x")])
    assert await ready(raw, name) == 1


async def test_a_subscription_to_a_passive_topic_does_not_create_its_group(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await raw.exchange_declare(name, exchange_type="fanout", durable=True)
    await classic.declare(QueueSpec(name=name, passive=True, broadcast=True))
    with pytest.raises(QueueNotFound):
        async with classic.subscribe(spec(name, broadcast=True)):
            pass


async def test_a_queue_cannot_be_declared_as_a_topic(classic: RabbitMQBackend, name: str) -> None:
    await classic.declare(QueueSpec(name=name))
    with pytest.raises(ConfigError, match="topic"):
        await classic.declare(QueueSpec(name=name, broadcast=True))


async def test_priorities_on_a_quorum_queue_are_rejected(
    quorum: RabbitMQBackend, name: str
) -> None:
    with pytest.raises(ConfigError, match="priorities"):
        await quorum.declare(QueueSpec(name=name, max_priority=9))


async def test_more_copies_than_the_backend_keeps_are_rejected(
    classic: RabbitMQBackend, name: str
) -> None:
    with pytest.raises(ConfigError, match="needs replicas=3"):
        await classic.declare(QueueSpec(name=name, replicas=3))


async def test_a_name_that_the_broker_reserves_is_rejected(
    classic: RabbitMQBackend, name: str
) -> None:
    with pytest.raises(ConfigError, match="denied access"):
        await classic.declare(QueueSpec(name=f"amq.{name}"))
    await classic.declare(QueueSpec(name=name))  # uses a new control channel


def test_group_queues_with_long_names_are_distinct_and_short_enough() -> None:
    long = [group_queue("t" * 232, f"{'g' * 199}{letter}") for letter in "ab"]
    assert len(set(long)) == 2
    assert all(len(queue) <= 255 for queue in long)
    assert group_queue("a", "b") == "a:b"
