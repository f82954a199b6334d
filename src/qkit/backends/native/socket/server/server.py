"""Server on the owner's socket: accepts connections and detects their protocol.

The first byte that a client sends selects the protocol: frames (``protocol``) for qkit's clients,
JSON lines (``json_commands``) for people and scripts.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast

from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.server.client_session import ClientSession
from qkit.backends.native.socket.server.json_commands import Commands
from qkit.backends.native.socket.server.json_lines import MAX_LINE, JsonLineSession
from qkit.backends.native.socket.server.receive_budget import ReceiveBudget
from qkit.backends.native.socket.server.subscription import ServedBackend
from qkit.backends.native.socket.unix_socket import listen, remove_socket
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import LifecycleError
from qkit.message import DeadLetter
from qkit.native.engine import Engine

__all__ = ["SocketServer"]

CLOSE_GRACE_SECONDS: Final = 1.0  # time for running requests to finish when the owner closes


class ProtocolHandler(Protocol):
    """Handler for the protocol of one connection."""

    def feed(self, data: bytes) -> None:
        """Handle received data."""
        ...

    def end_of_input(self) -> bool:
        """Handle the end of input; return whether responses remain to be written."""
        ...

    def apply_backpressure(self) -> None:
        """Pause or resume reading, depending on whether the client reads its responses."""
        ...

    def lost(self) -> None:
        """Clean up after the connection is lost."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        ...

    async def aclose(self, grace: float) -> None:
        """Wait up to ``grace`` seconds for running requests, then cancel them."""
        ...


class SocketServer:
    """Unix socket server that accepts frames for a backend and JSON lines for its engine.

    Args:
        backend: Backend for clients that send frames.
        engine: Engine for JSON commands.
        path: Path of the socket.
        max_frame: Maximum size in bytes of a frame from a client; 64 MiB by default.
        max_line: Maximum length in bytes of a JSON line from a client; 16 MiB by default.
        max_received: Maximum size in bytes of incomplete and running requests of all clients; four
            times ``max_frame`` by default.

    >>> import tempfile
    >>> from qkit.backends.native import NativeBackend
    >>> async def main() -> None:
    ...     with tempfile.TemporaryDirectory() as directory:
    ...         async with Engine() as engine:
    ...             backend = NativeBackend(engine=engine)
    ...             server = SocketServer(backend, engine, Path(directory) / "socket")
    ...             await server.start()
    ...             reader, writer = await asyncio.open_unix_connection(f"{directory}/socket")
    ...             writer.write(b'{"command": "queue.list"}\\n')
    ...             print(await reader.readline())
    ...             writer.close()
    ...             await server.aclose()
    >>> asyncio.run(main())
    b'{"queues": []}\\n'
    """

    def __init__(
        self,
        backend: ServedBackend,
        engine: Engine,
        path: Path,
        *,
        max_frame: int = protocol.MAX_FRAME,
        max_line: int = MAX_LINE,
        max_received: int | None = None,
    ) -> None:
        self._budget = ReceiveBudget(4 * max_frame if max_received is None else max_received)
        self._ended: list[ProtocolHandler] = []  # of lost connections, with running requests
        self._backend = backend
        self._path = path
        self._max_frame = max_frame
        self._max_line = max_line
        self._commands = Commands(engine)
        self._connections: set[ServerConnection] = set()
        self._sessions: dict[int, ClientSession] = {}
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._listening = False

    async def start(self) -> None:
        """Start listening.

        Raises:
            ConfigError: The path exists and is not a socket.
            LifecycleError: The server is already started.
        """
        if self._server is not None:
            raise LifecycleError("the socket server is already started", backend="native")
        listening = listen(self._path)
        self._inode = listening.inode
        if not self._listening:
            self._listening = True
            self._backend.on_dead_letter(partial(self._send_event, protocol.DEAD_LETTERED))
            self._backend.on_dropped_letter(partial(self._send_event, protocol.DROPPED))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: ServerConnection(self), sock=listening.socket
        )

    async def aclose(self) -> None:
        """Wait briefly for running requests, release all deliveries and disconnect; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        remove_socket(self._path, self._inode)
        server.close()
        await asyncio.gather(
            *[connection.aclose(CLOSE_GRACE_SECONDS) for connection in self._connections]
        )
        ended, self._ended = self._ended, []
        await asyncio.gather(*[handler.aclose(CLOSE_GRACE_SECONDS) for handler in ended])

    def _send_event(self, kind: int, letter: DeadLetter) -> None:
        for session in self._sessions.values():
            session.send_event(kind, letter)

    def add(self, connection: ServerConnection) -> None:
        """Register a connection."""
        self._connections.add(connection)

    def remove(self, connection: ServerConnection, handler: ProtocolHandler | None) -> None:
        """Remove a lost connection; ``aclose`` waits for requests that its handler still runs."""
        self._connections.discard(connection)
        self._ended = [other for other in self._ended if not other.idle]
        if handler is not None and not handler.idle:
            self._ended.append(handler)

    def choose_protocol(
        self, beginning: bytes, transport: asyncio.Transport, write_buffer: WriteBuffer
    ) -> ProtocolHandler | None:
        """Return the handler for a connection's first bytes; ``None`` if more are needed."""
        if not beginning.startswith(protocol.MAGIC[:1]):
            session = self._commands.session()
            return JsonLineSession(
                session.answer,
                transport,
                write_buffer,
                budget=self._budget,
                max_line=self._max_line,
            )
        if len(beginning) < len(protocol.MAGIC):
            return None
        return ClientSession(
            self._backend,
            transport,
            write_buffer,
            sessions=self._sessions,
            max_frame=self._max_frame,
            budget=self._budget,
        )


class ServerConnection(asyncio.Protocol):
    """Server end of one connection, in either protocol."""

    def __init__(self, server: SocketServer) -> None:
        self._server = server
        self._beginning = b""
        self._handler: ProtocolHandler | None = None
        self._disconnected = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection with the server."""
        self._transport = cast("asyncio.Transport", transport)
        self._write_buffer = WriteBuffer(self._transport)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass data to the protocol handler; the first bytes select the handler."""
        if self._handler is None:
            data = self._beginning = self._beginning + data
            self._handler = self._server.choose_protocol(data, self._transport, self._write_buffer)
            if self._handler is None:
                return
        self._handler.feed(data)

    def eof_received(self) -> bool:
        """Return whether to keep the connection open, so that the client can read responses."""
        return self._handler is not None and self._handler.end_of_input()

    def pause_writing(self) -> None:
        """Apply backpressure because the client reads too slowly."""
        self._write_buffer.pause()
        self._apply_backpressure()

    def resume_writing(self) -> None:
        """Lift the backpressure because the client has caught up."""
        self._write_buffer.resume()
        self._apply_backpressure()

    def _apply_backpressure(self) -> None:
        if self._handler is not None:
            self._handler.apply_backpressure()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and notify its handler."""
        self._write_buffer.lost()
        if self._handler is not None:
            self._handler.lost()
        self._server.remove(self, self._handler)
        self._disconnected.set()

    async def aclose(self, grace: float) -> None:
        """Wait up to ``grace`` seconds for running requests, then close the connection.

        If the client does not read the responses within another ``grace`` seconds, the connection
        is aborted.
        """
        if self._handler is not None:
            await self._handler.aclose(grace)
        self._write_buffer.close()
        try:
            async with asyncio.timeout(grace):
                await self._disconnected.wait()
        except TimeoutError:
            self._transport.abort()
            await self._disconnected.wait()
