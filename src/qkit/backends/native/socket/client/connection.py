"""The client's side of one connection: requests and their answers, and whatever the owner pushes.

Nothing hangs when the owner dies: the end of the connection fails every request at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from qkit._internal.logging import logger
from qkit._internal.tasks import retrieve_exception
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.error_codec import decode_error
from qkit.backends.native.socket.unix_socket import connect
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import BackendUnavailable, QueueError

__all__ = ["Answered", "ClientConnection", "open_connection"]

MAX_ANSWER: Final = 0xFFFF_FFFF  # the owner is trusted: it hands out what it accepted
CLOSE_TIMEOUT: Final = 1.0

Push: TypeAlias = Callable[[int, int, bytes], None]
Lost: TypeAlias = Callable[[BackendUnavailable], None]
Answered: TypeAlias = Callable[[bytes | QueueError], None]


async def open_connection(path: Path, push: Push, lost: Lost) -> ClientConnection:
    """Connect to the owner and hear its greeting, or raise ``BackendUnavailable``.

    ``push`` gets the frames that answer nothing: kind, number, body. ``lost`` is called when the
    connection ends, unless it was closed from here.
    """
    loop = asyncio.get_running_loop()
    client_socket = connect(path)
    _, connection = await loop.create_unix_connection(
        lambda: ClientConnection(path, push, lost), sock=client_socket
    )
    try:
        connection.hello = await connection.greeting
    except BaseException:
        await connection.aclose()
        raise
    return connection


class ClientConnection(asyncio.Protocol):
    """One connection to the owner; ``hello`` is what it said of itself, ``write_buffer`` writes."""

    def __init__(self, path: Path, push: Push, lost: Lost) -> None:
        self._path = path
        self._push = push
        self._lost = lost
        self._frames = protocol.FrameDecoder(MAX_ANSWER)
        self._number = 0
        self._pending: dict[int, Answered] = {}
        self._parts: dict[int, list[bytes]] = {}
        self._closing = False
        self._refusal: QueueError | None = None
        self._cause: Exception | None = None
        self._gone = asyncio.Event()
        self.greeting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.hello: dict[str, Any] = {}

    # Asking

    def check(self) -> None:
        """Raise ``BackendUnavailable`` if the connection is gone."""
        if self.write_buffer.closed or self._closing:
            raise self._error()

    def tell(self, kind: int, number: int, body: bytes = b"") -> None:
        """Send a frame that gets no answer of its own."""
        self.write_buffer.frame(kind, number, body)

    def ask(self, kind: int, body: bytes, answered: Answered) -> int:
        """Send a request; ``answered`` is called with the answer, or with the error."""
        self.check()
        self._number = number = (self._number + 1) & 0xFFFF_FFFF
        self._pending[number] = answered
        self.write_buffer.frame(kind, number, body)
        return number

    def begin(self, kind: int, body: bytes = b"") -> tuple[int, asyncio.Future[bytes]]:
        """Send a request; its number, and the answer to wait for."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answered(answer: bytes | QueueError) -> None:
            if future.done():
                return  # whoever asked has gone
            if isinstance(answer, QueueError):
                future.set_exception(answer)
                retrieve_exception(future)  # the caller may have gone, with others to await first
            else:
                future.set_result(answer)

        return self.ask(kind, body, answered), future

    async def request(self, kind: int, body: bytes = b"") -> bytes:
        """Send a request and wait for its answer; raises what the owner raised."""
        return await self.begin(kind, body)[1]

    async def aclose(self) -> None:
        """Write what is left and hang up."""
        self._closing = True
        self.write_buffer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._gone.wait()
        except TimeoutError:  # the owner does not read
            self._transport.abort()
            await self._gone.wait()

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there: say what is spoken here."""
        self._transport = cast("asyncio.Transport", transport)
        self.write_buffer = WriteBuffer(self._transport)
        self.write_buffer.write(protocol.MAGIC)

    def data_received(self, data: bytes) -> None:
        """Answers, and what the owner pushes."""
        try:
            for kind, number, body in self._frames.feed(data):
                self._take(kind, number, body)
        except QueueError as error:
            logger.warning("the owner of %s cannot be understood: %s", self._path.parent, error)
            self._refusal = error
            self._transport.abort()

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == protocol.OK:
            if number in self._parts:
                body = b"".join((*self._parts.pop(number), body))
            self._pending.pop(number)(body)
        elif kind == protocol.ERROR:
            if number == 0:  # about the connection itself; its end follows
                self._refusal = decode_error(body)
            else:
                self._parts.pop(number, None)
                self._pending.pop(number)(decode_error(body))
        elif kind == protocol.MORE:
            self._parts.setdefault(number, []).append(body)
        elif kind == protocol.HELLO:
            if not self.greeting.done():
                self.greeting.set_result(protocol.decode_json(body))
        else:
            self._push(kind, number, body)

    def pause_writing(self) -> None:
        """The owner does not keep up."""
        self.write_buffer.pause()

    def resume_writing(self) -> None:
        """The owner reads again."""
        self.write_buffer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whatever waits; nothing will ever be answered."""
        self._cause = exc or self._refusal or EOFError("the owner hung up")
        self.write_buffer.lost()
        if not self.greeting.done():
            self.greeting.set_exception(self._error())
            retrieve_exception(self.greeting)  # its waiters may have been cancelled
        pending, self._pending = self._pending, {}
        for answered in pending.values():
            answered(self._error())
        self._gone.set()
        if not self._closing:
            self._lost(self._error())

    def _error(self) -> BackendUnavailable:
        if self._closing:
            return BackendUnavailable("this backend was closed", backend="native")
        said = f": {self._refusal.message}" if self._refusal is not None else ""
        return BackendUnavailable(
            f"the connection to the owner of {self._path.parent} broke{said}",
            backend="native",
            cause=self._cause,
        )
