"""Conformance suite on the native engine in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.native import Engine


class TestNativeInMemory(Conformance):
    column = MATRIX["native-memory"]
    virtual_time = True

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        async with Engine(clock=clock) as engine:
            yield lambda: NativeBackend(engine=engine)
