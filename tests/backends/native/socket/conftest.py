"""Fixtures for an owner and its clients in one event loop."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.server.server import SocketServer
from qkit.native import Engine


class Owner:
    """Engine that is served on a socket, and its client connections."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "socket"
        self._stack = AsyncExitStack()

    async def start(self, **options: Any) -> None:
        self.engine = await self._stack.enter_async_context(Engine())
        self.backend = NativeBackend(engine=self.engine)
        self.server = SocketServer(self.backend, self.engine, self.path, **options)
        await self.server.start()
        self._stack.push_async_callback(self.server.aclose)

    async def client(self) -> SocketBackend:
        backend = SocketBackend(self.path)
        await backend.start()
        self._stack.push_async_callback(backend.aclose)
        return backend

    async def json_client(self) -> JsonClient:
        reader, writer = await asyncio.open_unix_connection(self.path, limit=1 << 24)
        client = JsonClient(reader, writer)
        self._stack.push_async_callback(client.aclose)
        return client

    async def aclose(self) -> None:
        await self._stack.aclose()


class JsonClient:
    """Client that sends JSON commands, as a user does with ``nc -U``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def line(self, line: bytes) -> Any:
        """Send a line and return the decoded reply."""
        self.writer.write(line + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        line = await self.reader.readline()
        assert line.endswith(b"\n"), f"disconnected after {line!r}"
        return json.loads(line)

    async def run(self, command: str, /, **payload: Any) -> Any:
        """Run a command and return the decoded reply."""
        return await self.line(json.dumps({"command": command, "payload": payload}).encode())

    async def aclose(self) -> None:
        self.writer.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory with a short path, because a socket address has a length limit."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest_asyncio.fixture
async def owner(directory: Path) -> AsyncIterator[Owner]:
    owner = Owner(directory)
    await owner.start()
    yield owner
    await owner.aclose()
