"""The owner's socket: accept connections and detect the protocol.

The first byte tells the two protocols apart: frames (``protocol``) for programs, lines of JSON
(``json_commands``) for people and scripts.
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
from qkit.backends.native.socket.server.subscription import ServedBackend
from qkit.backends.native.socket.unix_socket import listen, remove_socket
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import LifecycleError
from qkit.message import DeadLetter
from qkit.native.engine import Engine

__all__ = ["SocketServer"]

CLOSE_GRACE_SECONDS: Final = 1.0  # seconds for what is under way when the owner closes


class ProtocolHandler(Protocol):
    """The server's side of a connection, in either protocol."""

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        ...

    def end_of_input(self) -> bool:
        """Nothing more will arrive; whether something is still to be written."""
        ...

    def apply_backpressure(self) -> None:
        """Pause or resume reading, depending on whether the client reads."""
        ...

    def lost(self) -> None:
        """The connection is gone."""
        ...

    async def aclose(self, grace: float) -> None:
        """Bring what is under way to its end within ``grace`` seconds."""
        ...


class SocketServer:
    """Serves a backend, and by JSON commands its engine, on a Unix socket.

    ``max_frame`` and ``max_line`` bound what a client may send at once, in bytes.

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
    ) -> None:
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
        """Listen. Raises ``ConfigError`` if something other than a socket is in the way."""
        if self._server is not None:
            raise LifecycleError("this socket is served already", backend="native")
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
        """Answer what is under way, give back what clients hold, and hang up; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        remove_socket(self._path, self._inode)
        server.close()
        await asyncio.gather(
            *[connection.aclose(CLOSE_GRACE_SECONDS) for connection in self._connections]
        )

    def _send_event(self, kind: int, letter: DeadLetter) -> None:
        for session in self._sessions.values():
            session.send_event(kind, letter)

    def add(self, connection: ServerConnection) -> None:
        """A client connected."""
        self._connections.add(connection)

    def remove(self, connection: ServerConnection) -> None:
        """A client is gone."""
        self._connections.discard(connection)

    def choose_protocol(
        self, beginning: bytes, transport: asyncio.Transport, write_buffer: WriteBuffer
    ) -> ProtocolHandler | None:
        """Return the handler for these first bytes; ``None`` if they are too few to tell."""
        if not beginning.startswith(protocol.MAGIC[:1]):
            session = self._commands.session()
            return JsonLineSession(session.answer, transport, write_buffer, max_line=self._max_line)
        if len(beginning) < len(protocol.MAGIC):
            return None
        return ClientSession(
            self._backend,
            transport,
            write_buffer,
            sessions=self._sessions,
            max_frame=self._max_frame,
        )


class ServerConnection(asyncio.Protocol):
    """One connection, in either protocol."""

    def __init__(self, server: SocketServer) -> None:
        self._server = server
        self._beginning = b""
        self._handler: ProtocolHandler | None = None
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._write_buffer = WriteBuffer(self._transport)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass it on, once it is clear to whom."""
        if self._handler is None:
            data = self._beginning = self._beginning + data
            self._handler = self._server.choose_protocol(data, self._transport, self._write_buffer)
            if self._handler is None:
                return
        self._handler.feed(data)

    def eof_received(self) -> bool:
        """The other side writes no more; it may still want to read."""
        return self._handler is not None and self._handler.end_of_input()

    def pause_writing(self) -> None:
        """The other side does not read."""
        self._write_buffer.pause()
        self._apply_backpressure()

    def resume_writing(self) -> None:
        """The other side reads again."""
        self._write_buffer.resume()
        self._apply_backpressure()

    def _apply_backpressure(self) -> None:
        if self._handler is not None:
            self._handler.apply_backpressure()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._write_buffer.lost()
        self._server.remove(self)
        if self._handler is not None:
            self._handler.lost()
        self._gone.set()

    async def aclose(self, grace: float) -> None:
        """Hang up, after what is under way; without patience for one that does not read."""
        if self._handler is not None:
            await self._handler.aclose(grace)
        self._write_buffer.close()
        try:
            async with asyncio.timeout(grace):
                await self._gone.wait()
        except TimeoutError:
            self._transport.abort()
            await self._gone.wait()
