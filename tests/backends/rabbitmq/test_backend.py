"""RabbitMQ backend as used by a service: shutdown, protocols and settings."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import aiormq
import pytest

from qkit import ConfigError, QueueService, Settings, backends, consume
from qkit._internal.clock import SystemClock
from qkit.backend import (
    Admin,
    DeadLetterSource,
    DroppedLetterSource,
    QueueSpec,
)
from qkit.backends.factory import open_backend
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.errors import LifecycleError
from qkit.message import Envelope
from tests.support.proxy import Proxy
from tests.support.rabbitmq import bare_channel, declare, ready
from tests.support.waiting import eventually


@pytest.mark.proves("003-shutdown-5", "003-shutdown-6", "003-shutdown-7", "003-shutdown-8")
async def test_shutdown_stops_consuming_closes_connections_and_then_emits_its_event(
    rabbitmq_url: str,
) -> None:
    name = f"s-{uuid.uuid4().hex[:10]}"
    backend = RabbitMQBackend(rabbitmq_url)
    started, finish = asyncio.Event(), asyncio.Event()
    handled: list[str] = []
    closed_at_event: list[list[bool]] = []

    @consume(name)
    async def handle(body: str) -> None:
        started.set()
        await finish.wait()
        handled.append(body)

    settings = Settings(type="rabbitmq", url=rabbitmq_url)
    service = QueueService(settings, backend=backend)
    service.register(handle)
    await service.start()
    await service.send_many(name, ["running", "waiting"])
    await started.wait()
    connections = [backend._sending._shared.value, backend._consuming._shared.value]
    channels = [
        channel
        for connection in connections
        if connection is not None
        for channel in connection.channels.values()
        if isinstance(channel, aiormq.Channel)
    ]
    assert len(channels) >= 3, "expected channels for publishing, consuming and control"
    service.on(
        "shutdown",
        lambda event: closed_at_event.append(
            [item is None or item.is_closed for item in connections]
        ),
    )
    stopping = asyncio.ensure_future(service.shutdown())
    await eventually(lambda: not service.ready)
    finish.set()
    await stopping
    assert handled == ["running"], "a message was delivered after the shutdown began"
    assert closed_at_event == [[True, True]]
    assert all(channel.is_closed for channel in channels)
    async with bare_channel(rabbitmq_url) as raw:
        assert await ready(raw, name) == 1
        for queue in (name, f"{name}.dlq"):
            await raw.queue_delete(queue)


def test_the_backend_implements_admin_and_dropped_letter_source() -> None:
    backend = RabbitMQBackend("amqp://localhost/")
    for protocol in (Admin, DroppedLetterSource):
        assert isinstance(backend, protocol)
    assert not isinstance(backend, DeadLetterSource), "the backend itself writes no dead letters"


def test_settings_open_the_backend() -> None:
    settings = Settings(type="rabbitmq", url="amqp://localhost/")
    backend = open_backend(settings, SystemClock())
    assert isinstance(backend, RabbitMQBackend)
    assert backend.capabilities.priority
    assert not backend.capabilities.replicas


@pytest.mark.proves("000-replication-1")
def test_replicas_above_one_select_quorum_queues() -> None:
    settings = Settings(type="rabbitmq", url="amqp://localhost/", replicas=3)
    backend = open_backend(settings, SystemClock())
    assert isinstance(backend, RabbitMQBackend)
    assert (bool(backend.capabilities.replicas), bool(backend.capabilities.priority)) == (
        True,
        False,
    )
    arguments = backend._topology.arguments(QueueSpec(name="q", dead_letter="d", replicas=3))
    assert arguments["x-quorum-initial-group-size"] == 3
    assert arguments["x-dead-letter-strategy"] == "at-least-once"
    assert arguments["x-overflow"] == "reject-publish"
    # So high that the service always dead-letters a message before the broker removes it.
    assert arguments["x-delivery-limit"] == 1_000_000_000


def test_a_missing_client_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # The failed import replaces this attribute of the parent package; restore it afterwards.
    monkeypatch.setattr(backends, "rabbitmq", sys.modules["qkit.backends.rabbitmq"])
    for module in [item for item in sys.modules if item.startswith("qkit.backends.rabbitmq")]:
        monkeypatch.delitem(sys.modules, module)
    for module in [item for item in sys.modules if item.partition(".")[0] in {"aiormq", "pamqp"}]:
        monkeypatch.setitem(sys.modules, module, None)
    settings = Settings(type="rabbitmq", url="amqp://localhost/")
    with pytest.raises(ConfigError, match="install the extra 'rabbitmq'"):
        open_backend(settings, SystemClock())


async def test_use_in_a_second_event_loop_is_rejected_before_anything_is_sent(
    backend: RabbitMQBackend, name: str
) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope("a", b"x")])  # opens the channel

    def use_in_another_loop(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        with pytest.raises(LifecycleError, match="another event loop"):
            asyncio.run(call())

    for call in (
        lambda: backend.publish(name, [Envelope("b", b"x")]),
        lambda: backend.stats(name),
        lambda: backend.peek(name, 1),
        lambda: backend.ping(),
        lambda: backend.declare(QueueSpec(name=name)),
    ):
        await asyncio.to_thread(use_in_another_loop, call)
    assert [item.id for item in await backend.peek(name, 9)] == ["a"]


async def test_an_outage_is_logged_in_single_lines(
    rabbitmq_url: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    @consume(name)
    async def handle(number: int) -> None:
        pass

    port = urlsplit(rabbitmq_url).port
    assert port is not None
    with Proxy(port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}/"
        service = QueueService(Settings(type="rabbitmq", url=url))
        service.register(handle)
        async with service:
            proxy.refuse()
            await eventually(lambda: caplog.text.count("subscribing again") >= 2)
            proxy.heal()
            await eventually(lambda: service.ready)
            await service.delete(name)
            await service.delete(service.settings.dead_letter_name(name))
    records = [record for record in caplog.records if record.levelno > logging.INFO]
    assert {record.name for record in records} == {"qkit"}, "the driver must not log it as well"
    assert not [record for record in records if record.exc_info or "\n" in record.getMessage()]
