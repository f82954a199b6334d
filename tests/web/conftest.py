"""Fixtures of the web tests: a running service, and a client of its web app."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from qkit import QueueService
from tests.support.web import Orders, client_of, make_shop


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest_asyncio.fixture
async def service(orders: Orders) -> AsyncIterator[QueueService]:
    async with make_shop(orders) as service:
        yield service


@pytest_asyncio.fixture
async def client(service: QueueService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service) as client:
        yield client
