"""The RabbitMQ backend as a service opens it."""

from __future__ import annotations

import sys

import pytest

from qkit import ConfigError, Settings
from qkit.backend import (
    Admin,
    DeadLetterSource,
    DroppedLetterSource,
    QueueSpec,
)
from qkit.backends.rabbitmq import RabbitMQBackend
from qkit.clock import SystemClock
from qkit.opening import open_backend


def test_it_offers_the_whole_boundary() -> None:
    backend = RabbitMQBackend("amqp://localhost/")
    for protocol in (Admin, DeadLetterSource, DroppedLetterSource):
        assert isinstance(backend, protocol)


def test_settings_choose_it() -> None:
    settings = Settings(type="rabbitmq", url="amqp://localhost/")
    backend = open_backend(settings, SystemClock())
    assert isinstance(backend, RabbitMQBackend)
    assert backend.capabilities.priority
    assert not backend.capabilities.replicas


def test_replicas_choose_quorum_queues() -> None:
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


def test_without_the_client_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [item for item in sys.modules if item.startswith("qkit.backends.rabbit")]:
        monkeypatch.delitem(sys.modules, module)
    for module in [item for item in sys.modules if item.partition(".")[0] in {"aiormq", "pamqp"}]:
        monkeypatch.setitem(sys.modules, module, None)
    settings = Settings(type="rabbitmq", url="amqp://localhost/")
    with pytest.raises(ConfigError, match=r"pip install 'qkit\[rabbitmq\]'"):
        open_backend(settings, SystemClock())
