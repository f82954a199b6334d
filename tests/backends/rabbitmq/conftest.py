"""Fixtures for RabbitMQ tests: backends with classic and quorum queues, and an aiormq channel."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import aiormq
import pytest
import pytest_asyncio

from qkit.backends.rabbitmq.backend import RabbitMQBackend
from tests.support.rabbitmq import bare_channel, delete_declared


@pytest.fixture
def name() -> str:
    return f"r-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def raw(rabbitmq_url: str) -> AsyncIterator[aiormq.Channel]:
    async with bare_channel(rabbitmq_url) as channel:
        yield channel


@pytest_asyncio.fixture(params=["classic", "quorum"])
async def backend(
    request: pytest.FixtureRequest, rabbitmq_url: str
) -> AsyncIterator[RabbitMQBackend]:
    backend = RabbitMQBackend(rabbitmq_url, quorum=request.param == "quorum")
    await backend.start()
    yield backend
    await backend.aclose()
    await delete_declared(rabbitmq_url, [backend])


@pytest_asyncio.fixture
async def classic(rabbitmq_url: str) -> AsyncIterator[RabbitMQBackend]:
    backend = RabbitMQBackend(rabbitmq_url)
    await backend.start()
    yield backend
    await backend.aclose()
    await delete_declared(rabbitmq_url, [backend])


@pytest_asyncio.fixture
async def quorum(rabbitmq_url: str) -> AsyncIterator[RabbitMQBackend]:
    backend = RabbitMQBackend(rabbitmq_url, quorum=True)
    await backend.start()
    yield backend
    await backend.aclose()
    await delete_declared(rabbitmq_url, [backend])
