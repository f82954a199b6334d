"""Write buffer of a connection, which combines the writes of one event-loop iteration.

Both the client and the server use it. Code that may write a lot of data limits the buffer by
awaiting ``drained`` or checking ``waiting``.
"""

from __future__ import annotations

import asyncio

from qkit.backends.native.socket import protocol

__all__ = ["WriteBuffer"]


class WriteBuffer:
    """Write half of a connection; writes to a lost connection are discarded.

    Attributes:
        paused: Whether the transport's buffer is full because the other end reads too slowly.
        closed: Whether the connection was lost.
    """

    __slots__ = ("_chunks", "_loop", "_transport", "_waiters", "closed", "paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self.paused: bool = False
        self._waiters: list[asyncio.Future[None]] = []
        self.closed: bool = False

    @property
    def waiting(self) -> int:
        """Number of bytes that the transport has yet to send; excludes unflushed writes."""
        return self._transport.get_write_buffer_size()

    def frame(self, kind: int, number: int, body: bytes = b"") -> None:
        """Encode a frame and buffer it, as ``write`` does."""
        self.write(protocol.frame(kind, number, body))

    def write(self, data: bytes) -> None:
        """Buffer data; it is sent together with the other writes of this event-loop iteration."""
        if not self._chunks:
            self._loop.call_soon(self.flush)
        self._chunks.append(data)

    def flush(self) -> None:
        """Pass all buffered data to the transport now."""
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            if not self.closed:
                self._transport.write(b"".join(chunks))

    async def drained(self) -> None:
        """Flush, then wait until the transport's buffer has space or the connection is lost."""
        self.flush()
        if self.paused and not self.closed:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def close(self) -> None:
        """Flush, then close the transport."""
        self.flush()
        self._transport.close()

    # Called by the asyncio protocol
    def pause(self) -> None:
        """Make ``drained`` wait because the transport's buffer is full."""
        self.paused = True

    def resume(self) -> None:
        """Wake callers of ``drained`` because the transport's buffer has space again."""
        self.paused = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def lost(self) -> None:
        """Discard buffered data and wake callers of ``drained`` because the connection was lost."""
        self.closed = True
        self._chunks.clear()
        self.resume()
