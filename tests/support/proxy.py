"""TCP proxy that injects network faults.

    with Proxy(redis.port) as proxy:  # connect to 127.0.0.1:proxy.port
        proxy.reset()
        ...

The proxy runs in a thread with its own event loop, so that it does not depend on the test's loop
and can be a fixture of any scope. Every method returns once its fault is in effect.
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
    """Client connection with the number of bytes forwarded in each direction."""

    number: int
    sent: int = 0  # bytes to the server
    received: int = 0  # bytes to the client
    open: bool = True


class Proxy:
    """TCP proxy that forwards connections to ``127.0.0.1:target`` and can inject faults.

    Clients connect to ``port``; 0 means any free port. Set it if it must be known before the server
    starts, for example because a Kafka broker advertises it.
    """

    def __init__(self, target: int, *, port: int = 0) -> None:
        self.target = target
        self.port = port
        self.connections: list[Connection] = []
        self._connections: set[_ProxiedConnection] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._requests = asyncio.Event()  # set: requests are forwarded
        self._replies = asyncio.Event()  # set: replies are forwarded
        self._requests.set()
        self._replies.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def open_connections(self) -> int:
        """Number of open client connections."""
        return sum(connection.open for connection in self.connections)

    # -- faults ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Reset every connection (RST) on both sides; accept new ones."""
        self._call(self._reset)

    def half_close(self) -> None:
        """Send a FIN to every client and then discard all data in both directions.

        The connections to the server stay open. New connections are accepted.
        """
        self._call(self._half_close)

    def black_hole(self) -> None:
        """Forward nothing in either direction; open and new connections stay open."""
        self._call(self._requests.clear, self._replies.clear)

    def hold_replies(self) -> None:
        """Forward requests, but hold back the server's replies."""
        self._call(self._replies.clear)

    def refuse(self) -> None:
        """Reset every connection and refuse new ones."""
        self._run(self._refuse())

    def heal(self, *, forget: bool = False) -> None:
        """End the fault and forward everything that was held back, as TCP does.

        With ``forget``, open connections stay dead: the server sees a reset and the clients see
        nothing, as when a firewall loses its state.
        """
        self._run(self._heal(forget))

    # -- context manager ---------------------------------------------------------------------

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

    # -- run in the proxy's thread -----------------------------------------------------------

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
        proxied = _ProxiedConnection(reader, writer, connection)
        self._connections.add(proxied)
        # asyncio would otherwise log an error for each task that ``_close`` cancels.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            # During a black hole, the client can connect but the server sees no connection.
            await self._requests.wait()
            await proxied.run(self.target, self._requests, self._replies)
        self._connections.discard(proxied)
        proxied.close()

    def _reset(self) -> None:
        for proxied in self._connections:
            proxied.reset()

    def _half_close(self) -> None:
        for proxied in self._connections:
            proxied.half_close()

    async def _refuse(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._reset()

    async def _heal(self, forget: bool) -> None:
        if forget:
            for proxied in self._connections:
                proxied.forget()
        self._requests.set()
        self._replies.set()
        await self._listen()

    async def _close(self) -> None:
        await self._refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _ProxiedConnection:
    """Client's connection to the proxy, and the proxy's connection to the server."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection
    ) -> None:
        self._from_client = reader
        self._to_client = writer
        self._to_server: asyncio.StreamWriter | None = None
        self._connection = connection
        self.forgotten = False  # nothing is forwarded, and the client sees no reset

    async def run(self, target: int, requests: asyncio.Event, replies: asyncio.Event) -> None:
        """Forward until the client disconnects."""
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
            await gate.wait()  # at EOF too: the server must not see the close during a fault
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
    """Close a connection immediately, with RST instead of FIN."""
    endpoint: socket.socket | None = writer.get_extra_info("socket")
    if endpoint is not None and endpoint.fileno() >= 0:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
