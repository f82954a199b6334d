"""What is declared on RabbitMQ, and what becomes of a queue that others declared differently."""

from __future__ import annotations

import aiormq
import pytest
from pamqp.commands import Basic

from qkit import ConfigError, QueueService, Settings, consume
from qkit.backend import (
    QueueSpec,
)
from qkit.backends.rabbit.topology import DEAD_LETTERS, group_queue
from qkit.backends.rabbitmq import RabbitMQBackend
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
)


async def test_dead_letters_have_an_exchange_a_binding_and_an_argument(
    backend: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    await declare(backend, name)
    await raw.exchange_declare(DEAD_LETTERS, exchange_type="direct", durable=True)
    answer = await raw.basic_publish(
        b"x", exchange=DEAD_LETTERS, routing_key=f"{name}.dlq", mandatory=True
    )
    assert isinstance(answer, Basic.Ack), "the queue is bound"
    assert await ready(raw, f"{name}.dlq") == 1
    arguments = backend._topology.arguments(backend._specs[name])
    assert arguments["x-dead-letter-exchange"] == DEAD_LETTERS
    del arguments["x-dead-letter-exchange"]
    said = await refused(rabbitmq_url, name, arguments=arguments)
    assert "x-dead-letter-exchange" in said
    assert DEAD_LETTERS in said, "that is what it has"


async def test_queues_and_messages_survive_a_restart_of_the_broker(
    classic: RabbitMQBackend, raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    """As far as it is declared; the restart itself is in test_rabbitmq_outages."""
    await declare(classic, name)
    await classic.publish(name, [Envelope("a", b"x")])
    message = await raw.basic_get(name, no_ack=True)
    assert message.header.properties.delivery_mode == 2
    async with bare_channel(rabbitmq_url) as channel:
        with pytest.raises(aiormq.exceptions.ChannelPreconditionFailed, match="durable"):
            await channel.queue_declare(name, durable=False)


async def test_a_queue_declared_elsewhere_with_other_arguments_names_the_difference(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await raw.queue_declare(name, durable=True, arguments={"x-max-priority": 3})
    with pytest.raises(ConfigError) as caught:
        await classic.declare(QueueSpec(name=name, max_priority=9))
    assert "x-max-priority: '3' there, '9' here" in str(caught.value)
    with pytest.raises(ConfigError, match="x-max-priority: '3' there, none here"):
        await classic.declare(QueueSpec(name=name))
    await raw.queue_delete(name)
    await raw.queue_declare(name, durable=False, auto_delete=True)
    with pytest.raises(ConfigError, match=r"durable: 'false' there, 'true' here"):
        await classic.declare(QueueSpec(name=name))
    await raw.queue_delete(name)
    await classic.declare(QueueSpec(name=name))


async def test_a_service_does_not_come_up_on_such_a_queue(
    raw: aiormq.Channel, rabbitmq_url: str, name: str
) -> None:
    await raw.queue_declare(name, durable=True, arguments={"x-max-length": 7})

    @consume(name)
    async def handle(body: str) -> None: ...

    service = QueueService(Settings(type="rabbitmq", url=rabbitmq_url))
    service.register(handle)
    try:
        with pytest.raises(ConfigError, match="exists with another x-"):
            await service.start()
    finally:
        await service.shutdown()
        for queue in (name, f"{name}.dlq"):
            await raw.queue_delete(queue)


async def test_passive_creates_nothing(
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


async def test_a_passive_group_is_not_created(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await raw.exchange_declare(name, exchange_type="fanout", durable=True)
    await classic.declare(QueueSpec(name=name, passive=True, broadcast=True))
    with pytest.raises(QueueNotFound):
        async with classic.subscribe(spec(name, broadcast=True)):
            pass


async def test_a_queue_is_no_topic(classic: RabbitMQBackend, name: str) -> None:
    await classic.declare(QueueSpec(name=name))
    with pytest.raises(ConfigError, match="topic"):
        await classic.declare(QueueSpec(name=name, broadcast=True))


async def test_no_priorities_on_quorum_queues(quorum: RabbitMQBackend, name: str) -> None:
    with pytest.raises(ConfigError, match="priorities"):
        await quorum.declare(QueueSpec(name=name, max_priority=9))


async def test_more_copies_than_the_backend_keeps_are_refused(
    classic: RabbitMQBackend, name: str
) -> None:
    with pytest.raises(ConfigError, match="3 copies"):
        await classic.declare(QueueSpec(name=name, replicas=3))


async def test_a_name_that_the_broker_keeps_for_itself_is_refused(
    classic: RabbitMQBackend, name: str
) -> None:
    with pytest.raises(ConfigError, match="may not"):
        await classic.declare(QueueSpec(name=f"amq.{name}"))
    await classic.declare(QueueSpec(name=name))  # the channel for questions is whole again


def test_group_queues_have_names_of_their_own_however_long() -> None:
    long = [group_queue("t" * 232, f"{'g' * 199}{letter}") for letter in "ab"]
    assert len(set(long)) == 2
    assert all(len(queue) <= 255 for queue in long)
    assert group_queue("a", "b") == "a:b"
