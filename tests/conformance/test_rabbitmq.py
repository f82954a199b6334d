"""Conformance suite on a real RabbitMQ server, with classic and quorum queues."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.settings.model import SettingsValues
from tests.support.rabbitmq import delete_declared


@asynccontextmanager
async def _backends(url: str, clock: Clock, *, quorum: bool = False) -> AsyncIterator[NewBackend]:
    made: list[RabbitMQBackend] = []

    def new_backend() -> RabbitMQBackend:
        made.append(RabbitMQBackend(url, clock=clock, quorum=quorum))
        return made[-1]

    yield new_backend
    await delete_declared(url, made)


class TestRabbitMQClassic(Conformance):
    column = MATRIX["rabbitmq-classic"]
    settings: ClassVar[SettingsValues] = {
        "type": "rabbitmq",
        "url": "amqp://localhost/",  # unused: the fixture creates the backends
    }

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
        self, clock: Clock, rabbitmq_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        async with _backends(rabbitmq_url, clock) as new_backend:
            yield new_backend


class TestRabbitMQQuorum(Conformance):
    """Conformance of quorum queues with one replica each, on a single node."""

    column = MATRIX["rabbitmq-quorum"]
    settings: ClassVar[SettingsValues] = TestRabbitMQClassic.settings

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
        self, clock: Clock, rabbitmq_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        async with _backends(rabbitmq_url, clock, quorum=True) as new_backend:
            yield new_backend
