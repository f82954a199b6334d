"""Health of a service whose messages cannot be settled."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import aiormq
import pytest
from pamqp.commands import Basic

from qkit import QueueService, Settings, consume
from qkit.backends.kafka import driver
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.errors import QueueError
from qkit.message import Envelope
from qkit.observability import settlement_failures
from tests.support.rabbitmq import bare_channel
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report failures after half a second instead of ten."""
    monkeypatch.setattr(settlement_failures, "UNHEALTHY_AFTER_SECONDS", 0.5)


@pytest.fixture
def name() -> str:
    return f"s-{uuid.uuid4().hex[:10]}"


def service_of(name: str, got: list[int], **values: Any) -> QueueService:
    @consume(name, concurrency=2)
    async def handle(number: int) -> None:
        got.append(number)

    service = QueueService(Settings(**values))
    service.register(handle)
    return service


async def becomes_unhealthy(service: QueueService, reason: str) -> None:
    await eventually(lambda: reason in str(service.health_check().consumers[0].failing))
    assert not service.ready


async def test_a_rejected_dead_letter_of_an_expired_message_makes_the_service_unhealthy(
    rabbitmq_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    rejecting = True
    publish = RabbitMQBackend.publish

    async def reject(backend: RabbitMQBackend, queue: str, envelopes: Sequence[Envelope]) -> Any:
        if rejecting and queue.endswith(".dlq"):
            raise QueueError("the dead-letter queue is full")
        return await publish(backend, queue, envelopes)

    # Patch the class before the service stores a bound method.
    monkeypatch.setattr(RabbitMQBackend, "publish", reject)
    service = service_of(name, got, type="rabbitmq", url=rabbitmq_url)
    async with service, bare_channel(rabbitmq_url) as raw:
        await _publish(raw, name, {"qkit-expires-at": 1})
        await becomes_unhealthy(service, "the dead-letter queue is full")
        await _publish(raw, name, {})
        await eventually(lambda: got == [7])
        assert not service.ready, "ready with an unsettled message"
        rejecting = False
        await eventually(lambda: service.ready)
        assert len(await service.dead_letters(name).list()) == 1
        for queue in (name, f"{name}.dlq"):
            await raw.queue_delete(queue)


async def _publish(raw: aiormq.Channel, queue: str, headers: dict[str, Any]) -> None:
    await raw.basic_publish(b"7", routing_key=queue, properties=Basic.Properties(headers=headers))


async def test_failed_commits_on_kafka_make_the_service_unhealthy(
    kafka_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    service = service_of(name, got, type="kafka", url=kafka_url)

    async def commit(*arguments: object) -> None:
        raise driver.errors.RequestTimedOutError("no coordinator")

    async with service:
        with monkeypatch.context() as patch:
            patch.setattr(driver.Consumer, "commit", commit)
            await service.send(name, 7)
            await eventually(lambda: got == [7])
            await becomes_unhealthy(service, "no coordinator")
        await eventually(lambda: service.ready)
