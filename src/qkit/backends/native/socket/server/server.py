"""The owner's socket: who connects, and what they speak.

The first byte tells the two languages apart: frames (``protocol``) for programs, lines of JSON
(``commands``) for people and scripts.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast

from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.server.client_session import Peer
from qkit.backends.native.socket.server.json_commands import Commands
from qkit.backends.native.socket.server.json_lines import MAX_LINE, Lines
from qkit.backends.native.socket.server.subscription import ServedBackend
from qkit.backends.native.socket.unix_socket import listen, withdraw
from qkit.backends.native.socket.write_buffer import Outlet
from qkit.errors import LifecycleError
from qkit.message import DeadLetter
from qkit.native.engine import Engine

__all__ = ["SocketServer"]

GRACE: Final = 1.0  # seconds for what is under way when the owner closes


class Dialogue(Protocol):
    """One side of a conversation in either language."""

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        ...

    def end_of_input(self) -> bool:
        """Nothing more will arrive; whether something is still to be written."""
        ...

    def regulate(self) -> None:
        """Read on, or not, now that the other side reads, or does not."""
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
        self._connections: set[Connection] = set()
        self._peers: dict[int, Peer] = {}
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._hears = False

    async def start(self) -> None:
        """Listen. Raises ``ConfigError`` if something other than a socket is in the way."""
        if self._server is not None:
            raise LifecycleError("this socket is served already", backend="native")
        listening = listen(self._path)
        self._inode = listening.inode
        if not self._hears:
            self._hears = True
            self._backend.on_dead_letter(partial(self._tell, protocol.DIED))
            self._backend.on_dropped_letter(partial(self._tell, protocol.DROPPED))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: Connection(self), sock=listening.socket
        )

    async def aclose(self) -> None:
        """Answer what is under way, give back what clients hold, and hang up; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        withdraw(self._path, self._inode)
        server.close()
        await asyncio.gather(*[connection.aclose(GRACE) for connection in self._connections])

    def _tell(self, kind: int, letter: DeadLetter) -> None:
        for peer in self._peers.values():
            peer.tell(kind, letter)

    def meet(self, connection: Connection) -> None:
        """Somebody connected."""
        self._connections.add(connection)

    def part(self, connection: Connection) -> None:
        """Somebody is gone."""
        self._connections.discard(connection)

    def begin(
        self, beginning: bytes, transport: asyncio.Transport, outlet: Outlet
    ) -> Dialogue | None:
        """What to speak with one who began so; ``None`` if that cannot be told yet."""
        if not beginning.startswith(protocol.MAGIC[:1]):
            session = self._commands.session()
            return Lines(session.answer, transport, outlet, max_line=self._max_line)
        if len(beginning) < len(protocol.MAGIC):
            return None
        return Peer(self._backend, transport, outlet, peers=self._peers, max_frame=self._max_frame)


class Connection(asyncio.Protocol):
    """One connection, whatever it speaks."""

    def __init__(self, server: SocketServer) -> None:
        self._server = server
        self._beginning = b""
        self._dialogue: Dialogue | None = None
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._outlet = Outlet(self._transport)
        self._server.meet(self)

    def data_received(self, data: bytes) -> None:
        """Pass it on, once it is clear to whom."""
        if self._dialogue is None:
            data = self._beginning = self._beginning + data
            self._dialogue = self._server.begin(data, self._transport, self._outlet)
            if self._dialogue is None:
                return
        self._dialogue.feed(data)

    def eof_received(self) -> bool:
        """The other side writes no more; it may still want to read."""
        return self._dialogue is not None and self._dialogue.end_of_input()

    def pause_writing(self) -> None:
        """The other side does not read."""
        self._outlet.pause()
        self._regulate()

    def resume_writing(self) -> None:
        """The other side reads again."""
        self._outlet.resume()
        self._regulate()

    def _regulate(self) -> None:
        if self._dialogue is not None:
            self._dialogue.regulate()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._outlet.lost()
        self._server.part(self)
        if self._dialogue is not None:
            self._dialogue.lost()
        self._gone.set()

    async def aclose(self, grace: float) -> None:
        """Hang up, after what is under way; without patience for one that does not read."""
        if self._dialogue is not None:
            await self._dialogue.aclose(grace)
        self._outlet.close()
        try:
            async with asyncio.timeout(grace):
                await self._gone.wait()
        except TimeoutError:
            self._transport.abort()
            await self._gone.wait()
