"""Redis pub/sub keeps the contract as far as it goes, on a real server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import ClassVar

import pytest_asyncio

from qkit.backends.redis_pubsub import RedisPubSubBackend
from qkit.clock import Clock
from qkit.config import SettingsValues
from qkit.conformance import MATRIX, Conformance, NewBackend


class TestRedisPubSub(Conformance):
    column = MATRIX["redis-pubsub"]
    settings: ClassVar[SettingsValues] = {
        "type": "redis",
        "mode": "pubsub",
        "url": "redis://localhost/",  # unused: the backends are given
    }

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # a fixture's arguments are pytest's business
        self, clock: Clock, redis_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        yield lambda: RedisPubSubBackend(redis_url, clock=clock)
