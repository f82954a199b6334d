"""Client end of one connection: requests, responses, and frames that the owner pushes.

If the owner exits, the connection is lost and every pending request fails immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from qkit._internal.forks import watch_forks
from qkit._internal.logging import logger
from qkit._internal.tasks import retrieve_exception
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.error_codec import decode_error
from qkit.backends.native.socket.unix_socket import connect
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import BackendUnavailable, LifecycleError, QueueError

__all__ = ["Answered", "ClientConnection", "open_connection"]

MAX_ANSWER: Final = 0xFFFF_FFFF  # largest possible frame: the owner is trusted, so no lower limit
CLOSE_TIMEOUT: Final = 1.0  # seconds to wait for the flush before the connection is aborted

Push: TypeAlias = Callable[[int, int, bytes], None]
Lost: TypeAlias = Callable[[BackendUnavailable], None]
Answered: TypeAlias = Callable[[bytes | QueueError], None]


async def open_connection(path: Path, push: Push, lost: Lost) -> ClientConnection:
    """Connect to the owner and wait for its HELLO.

    Args:
        path: Path of the socket.
        push: Called with the kind, number and body of each frame that is not a response.
        lost: Called with the error when the connection is lost, unless this process closed it.

    Raises:
        BackendUnavailable: The owner does not respond, or uses another version of the protocol.
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
    """Connection to the owner.

    Args:
        path: Path of the socket.
        push: Called with the kind, number and body of each frame that is not a response.
        lost: Called with the error when the connection is lost, unless this process closed it.

    Attributes:
        greeting: Future of the contents of the owner's HELLO.
        hello: Contents of the owner's HELLO; empty until it arrives.
        write_buffer: Write buffer of the connection.
    """

    def __init__(self, path: Path, push: Push, lost: Lost) -> None:
        self._path = path
        self._push = push
        self._lost = lost
        self._frames = protocol.FrameDecoder(MAX_ANSWER)
        self._number = 0
        self._pending: dict[int, Answered] = {}
        self._parts: dict[int, list[bytes]] = {}
        self._closing = False
        self._in_fork = False
        self._rejection: QueueError | None = None
        self._cause: Exception | None = None
        self._disconnected = asyncio.Event()
        self.greeting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.hello: dict[str, Any] = {}
        watch_forks(self)

    def after_fork(self) -> None:
        """Reject all requests, because this is a fork of the process that connected."""
        self._in_fork = True

    # Requests

    def check(self) -> None:
        """Raise ``BackendUnavailable`` if the connection is lost or closed.

        In a fork of the process that connected, raise ``LifecycleError``: both processes would
        write to one socket.
        """
        if self._in_fork:
            raise LifecycleError(
                "the connection to the owner of the native directory was opened before this "
                "process was forked: start a service in each process",
                backend="native",
            )
        if self.write_buffer.closed or self._closing:
            raise self._error()

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        """Send a frame that has no response."""
        if self._in_fork:
            self.check()
        self.write_buffer.frame(kind, number, body)

    def send_request(self, kind: int, body: bytes, answered: Answered) -> int:
        """Send a request; return its number.

        Args:
            kind: Kind of the frame.
            body: Body of the frame.
            answered: Called with the response or the error.
        """
        self.check()
        self._number = number = (self._number + 1) & 0xFFFF_FFFF
        self._pending[number] = answered
        self.write_buffer.frame(kind, number, body)
        return number

    def begin(self, kind: int, body: bytes = b"") -> tuple[int, asyncio.Future[bytes]]:
        """Send a request; return its number and the future of its response."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answered(answer: bytes | QueueError) -> None:
            if future.done():
                return  # the caller was cancelled
            if isinstance(answer, QueueError):
                future.set_exception(answer)
                retrieve_exception(future)  # the caller may never await the future
            else:
                future.set_result(answer)

        return self.send_request(kind, body, answered), future

    async def request(self, kind: int, body: bytes = b"") -> bytes:
        """Send a request and return its response; raise the owner's error if it fails."""
        return await self.begin(kind, body)[1]

    async def aclose(self) -> None:
        """Flush and close the connection; abort it if the owner does not read in time."""
        if self._in_fork:
            return  # it belongs to the process that connected
        self._closing = True
        self.write_buffer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._disconnected.wait()
        except TimeoutError:  # the owner is not reading
            self._transport.abort()
            await self._disconnected.wait()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the magic bytes, which include the protocol version."""
        self._transport = cast("asyncio.Transport", transport)
        self.write_buffer: WriteBuffer = WriteBuffer(self._transport)
        self.write_buffer.write(protocol.MAGIC)

    def data_received(self, data: bytes) -> None:
        """Handle responses and pushed frames; disconnect if the data is invalid."""
        try:
            for kind, number, body in self._frames.feed(data):
                self._handle_frame(kind, number, body)
        except QueueError as error:
            logger.warning(
                "the owner of %s sent invalid data; disconnecting: %s", self._path.parent, error
            )
            self._rejection = error
            self._transport.abort()

    def _handle_frame(self, kind: int, number: int, body: bytes) -> None:
        if kind == protocol.OK:
            if number in self._parts:
                body = b"".join((*self._parts.pop(number), body))
            self._pending.pop(number)(body)
        elif kind == protocol.ERROR:
            if number == 0:  # the owner rejects the connection and closes it
                self._rejection = decode_error(body)
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
        """Pause writers because the owner reads too slowly."""
        self.write_buffer.pause()

    def resume_writing(self) -> None:
        """Resume writers because the owner has caught up."""
        self.write_buffer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending requests; call ``lost`` unless this process closed the connection."""
        self._cause = exc or self._rejection or EOFError("the owner closed the connection")
        self.write_buffer.lost()
        if not self.greeting.done():
            self.greeting.set_exception(self._error())
            retrieve_exception(self.greeting)  # the waiting caller may have been cancelled
        pending, self._pending = self._pending, {}
        for answered in pending.values():
            answered(self._error())
        self._disconnected.set()
        if not self._closing:
            self._lost(self._error())

    def _error(self) -> BackendUnavailable:
        if self._closing:
            return BackendUnavailable("the backend was closed", backend="native")
        reason = f": {self._rejection.message}" if self._rejection is not None else ""
        return BackendUnavailable(
            f"lost the connection to the owner of {self._path.parent}{reason}",
            backend="native",
            cause=self._cause,
        )
