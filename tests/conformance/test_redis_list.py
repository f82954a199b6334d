"""Conformance suite on Redis lists, with a real server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import ClassVar

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.settings.model import SettingsValues


class TestRedisList(Conformance):
    column = MATRIX["redis-list"]
    settings: ClassVar[SettingsValues] = {
        "type": "redis",
        "mode": "list",
        "url": "redis://localhost/",  # unused: the fixture creates the backends
    }

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
        self, clock: Clock, redis_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        yield lambda: RedisListBackend(redis_url, clock=clock)


class TestRedisListUnreliable(Conformance):
    column = MATRIX["redis-list-unreliable"]
    settings: ClassVar[SettingsValues] = {**TestRedisList.settings, "reliable": False}

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
        self, clock: Clock, redis_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        yield lambda: RedisListBackend(redis_url, clock=clock, reliable=False)
