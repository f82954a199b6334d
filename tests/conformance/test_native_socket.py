"""Conformance suite on a client that reaches the native engine through a Unix socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from qkit._internal.clock import Clock, SystemClock
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.server.server import SocketServer
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.native import Engine
from qkit.testing import VirtualClock


class TestNativeSocket(Conformance):
    column = MATRIX["native-memory"]
    virtual_time = True  # client and owner share one loop, so replies take no virtual time

    async def open(self, directory: str, clock: Clock) -> Engine:
        return Engine(clock=clock)

    @pytest_asyncio.fixture
    async def clock(  # type: ignore[override]  # fixtures may have more arguments
        self, request: pytest.FixtureRequest
    ) -> AsyncGenerator[Clock, None]:
        """Virtual clock, or the system clock for scenarios that block the loop."""
        if "blocks_the_loop" in request.node.name:  # a thread renews the lease
            yield SystemClock()
            return
        with VirtualClock() as clock:
            yield clock

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "socket"
            async with await self.open(directory, clock) as engine:
                server = SocketServer(NativeBackend(engine=engine), engine, path)
                await server.start()
                yield lambda: SocketBackend(path, clock=clock)
                await server.aclose()


class TestDurableSocket(TestNativeSocket):
    column = MATRIX["native-durable"]

    async def open(self, directory: str, clock: Clock) -> Engine:
        return await Engine.open(directory, clock=clock)
