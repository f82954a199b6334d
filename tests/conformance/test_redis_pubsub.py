"""Conformance suite on Redis pub/sub, with a real server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import ClassVar

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backends.redis.pubsub_backend import RedisPubSubBackend
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.settings.model import SettingsValues


class TestRedisPubSub(Conformance):
    column = MATRIX["redis-pubsub"]
    settings: ClassVar[SettingsValues] = {
        "type": "redis",
        "mode": "pubsub",
        "url": "redis://localhost/",  # unused: the fixture creates the backends
    }

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
        self, clock: Clock, redis_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        yield lambda: RedisPubSubBackend(redis_url, clock=clock)
