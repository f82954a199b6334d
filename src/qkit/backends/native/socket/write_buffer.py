"""Writing to a connection: what is written in one turn of the loop leaves together, and is bounded.

Both ends use it. Whoever produces without being asked waits for ``drained``.
"""

from __future__ import annotations

import asyncio

from qkit.backends.native.socket import protocol

__all__ = ["WriteBuffer"]


class WriteBuffer:
    """The writing half of a connection; what is written after its end goes nowhere."""

    __slots__ = ("_gathered", "_loop", "_transport", "_waiters", "closed", "paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []
        self.paused = False  # the other side does not keep up with reading
        self._waiters: list[asyncio.Future[None]] = []
        self.closed = False

    @property
    def waiting(self) -> int:
        """How many bytes the other side has yet to read, apart from this turn's."""
        return self._transport.get_write_buffer_size()

    def frame(self, kind: int, number: int, body: bytes = b"") -> None:
        """Write a frame."""
        self.write(protocol.frame(kind, number, body))

    def write(self, data: bytes) -> None:
        """Write with whatever else this turn of the loop writes."""
        if not self._gathered:
            self._loop.call_soon(self.flush)
        self._gathered.append(data)

    def flush(self) -> None:
        """Hand over to the transport now."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            if not self.closed:
                self._transport.write(b"".join(gathered))

    async def drained(self) -> None:
        """Wait until the other side has read most of what was written, or is gone."""
        self.flush()
        if self.paused and not self.closed:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def close(self) -> None:
        """Write what is left, then close."""
        self.flush()
        self._transport.close()

    # What the transport says

    def pause(self) -> None:
        """Its buffer is full."""
        self.paused = True

    def resume(self) -> None:
        """Its buffer has room again."""
        self.paused = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def lost(self) -> None:
        """There is no connection any more."""
        self.closed = True
        self._gathered.clear()
        self.resume()
