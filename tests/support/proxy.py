"""A TCP proxy with faults, for tests of what a network does to a connection.

    with Proxy(redis.port) as proxy:  # connect to 127.0.0.1:proxy.port
        proxy.reset()
        ...

It runs in a thread with a loop of its own, so that it works whatever the test's loop does and a
fixture of any scope can hold it. Every method returns once what it says has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

__all__ = ["Connection", "Proxy"]

T = TypeVar("T")
HOST = "127.0.0.1"
CHUNK = 65_536


@dataclass
class Connection:
    """One client's way through the proxy, and what has passed on it."""

    number: int
    sent: int = 0  # bytes to the server
    received: int = 0  # bytes to the client
    open: bool = True


class Proxy:
    """Forwards to ``127.0.0.1:target`` until told otherwise.

    ``port`` is where clients connect; give one to have it before the server is there, as a Kafka
    must that advertises it.
    """

    def __init__(self, target: int, *, port: int = 0) -> None:
        self.target = target
        self.port = port
        self.connections: list[Connection] = []
        self._ways: set[_Way] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._requests = asyncio.Event()  # set: what clients say is passed on
        self._replies = asyncio.Event()  # set: what the server says is passed on
        self._requests.set()
        self._replies.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def open_connections(self) -> int:
        """How many connections of clients are open now."""
        return sum(connection.open for connection in self.connections)

    # -- faults ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Reset every connection (RST), on both sides; new ones are served."""
        self._call(self._reset)

    def half_close(self) -> None:
        """Tell every client that the server says no more (FIN), and swallow what they say.

        The server is told nothing. New connections are served.
        """
        self._call(self._half_close)

    def black_hole(self) -> None:
        """Pass nothing on, in neither direction; connections stay open and new ones open too."""
        self._call(self._requests.clear, self._replies.clear)

    def hold_replies(self) -> None:
        """Pass on what clients say, and keep the server's answers back: they are in flight."""
        self._call(self._replies.clear)

    def refuse(self) -> None:
        """Reset every connection and refuse new ones: nobody listens."""
        self._run(self._refuse())

    def heal(self, *, forget: bool = False) -> None:
        """Serve again. What was held back is passed on, as TCP does when packets get through.

        With ``forget`` nothing is passed on any more on the connections that were open: the server
        sees them reset, and the clients see nothing at all, as behind a firewall that forgot them.
        """
        self._run(self._heal(forget))

    # -- life --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def _call(self, *functions: Callable[[], object]) -> None:
        async def call() -> None:
            for function in functions:
                function()

        self._run(call())

    # -- in the thread -----------------------------------------------------------------------

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connection = Connection(len(self.connections))
        self.connections.append(connection)
        way = _Way(reader, writer, connection)
        self._ways.add(way)
        # A cancelled task would be reported by the server's callback: closing cancels them all.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            # In a black hole the client's handshake succeeds and the server hears nothing of it.
            await self._requests.wait()
            await way.run(self.target, self._requests, self._replies)
        self._ways.discard(way)
        way.close()

    def _reset(self) -> None:
        for way in self._ways:
            way.reset()

    def _half_close(self) -> None:
        for way in self._ways:
            way.half_close()

    async def _refuse(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._reset()

    async def _heal(self, forget: bool) -> None:
        if forget:
            for way in self._ways:
                way.forget()
        self._requests.set()
        self._replies.set()
        await self._listen()

    async def _close(self) -> None:
        await self._refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Way:
    """The two halves of one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection
    ) -> None:
        self._from_client = reader
        self._to_client = writer
        self._to_server: asyncio.StreamWriter | None = None
        self._connection = connection
        self.forgotten = False  # nothing passes any more, and the client is not told

    async def run(self, target: int, requests: asyncio.Event, replies: asyncio.Event) -> None:
        """Pass on until the client is gone."""
        server: asyncio.StreamReader | None = None
        if not self.forgotten:
            server, self._to_server = await asyncio.open_connection(HOST, target)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(self._pass_requests(requests))
            if server is not None:
                pumps.create_task(self._pass_replies(server, replies))

    async def _pass_requests(self, gate: asyncio.Event) -> None:
        while True:
            chunk = await self._read(self._from_client)
            await gate.wait()  # also before the end is passed on: the server must not hear of it
            if not chunk:
                break
            if self._to_server is not None and not self.forgotten:
                self._connection.sent += len(chunk)
                await self._write(self._to_server, chunk)
        self.reset()

    async def _pass_replies(self, server: asyncio.StreamReader, gate: asyncio.Event) -> None:
        while True:
            chunk = await self._read(server)
            await gate.wait()
            if self.forgotten:
                return
            if not chunk:
                break
            self._connection.received += len(chunk)
            await self._write(self._to_client, chunk)
        self._to_client.close()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(CHUNK)
        except OSError:
            return b""

    @staticmethod
    async def _write(writer: asyncio.StreamWriter, chunk: bytes) -> None:
        with contextlib.suppress(OSError):
            writer.write(chunk)
            await writer.drain()

    def half_close(self) -> None:
        self.forgotten = True
        if self._to_client.can_write_eof():
            self._to_client.write_eof()

    def forget(self) -> None:
        self.forgotten = True
        if self._to_server is not None:
            _reset(self._to_server)

    def reset(self) -> None:
        for writer in (self._to_client, self._to_server):
            if writer is not None:
                _reset(writer)

    def close(self) -> None:
        self._connection.open = False
        self.reset()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection at once, with RST instead of FIN."""
    endpoint: socket.socket | None = writer.get_extra_info("socket")
    if endpoint is not None and endpoint.fileno() >= 0:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
