"""Conformance suite on the native engine in a directory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from tempfile import TemporaryDirectory

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.native import Engine


class TestNativeDurable(Conformance):
    column = MATRIX["native-durable"]
    virtual_time = True

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        with TemporaryDirectory() as path:
            async with await Engine.open(path, clock=clock) as engine:
                yield lambda: NativeBackend(engine=engine)
