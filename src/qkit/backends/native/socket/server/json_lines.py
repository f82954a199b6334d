"""Lines in, lines out: the part of the JSON commands that is about bytes."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from qkit.backends.native.socket.write_buffer import WriteBuffer

__all__ = ["MAX_LINE", "JsonLineSession"]

MAX_LINE: Final = 16 << 20  # bytes
MAX_WAITING: Final = 64  # lines of one connection before it is read no further


class JsonLineSession:
    """A connection on which each line is answered with one, in order.

    ``answer`` gets a line, or ``None`` for one beyond ``max_line`` bytes. Whoever closes its
    writing half, as ``nc`` does at the end of its input, still gets its answers.
    """

    def __init__(
        self,
        answer: Callable[[bytes | None], Awaitable[bytes]],
        transport: asyncio.Transport,
        write_buffer: WriteBuffer,
        *,
        max_line: int = MAX_LINE,
    ) -> None:
        self._answer = answer
        self._transport = transport
        self._write_buffer = write_buffer
        self._max_line = max_line
        self._rest = bytearray()
        self._skipping = False  # the rest of a line that was too long
        self._ended = False
        self._waiting: deque[bytes | None] = deque()
        self._task: asyncio.Task[None] | None = None

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.strip():
                self._waiting.append(bytes(line) if len(line) <= self._max_line else None)
        if len(rest) > self._max_line:
            rest.clear()
            if not self._skipping:
                self._skipping = True
                self._waiting.append(None)
        self._go_on()

    def _go_on(self) -> None:
        if self._task is None and self._waiting:
            self._task = asyncio.create_task(self._work(), name="qkit socket commands")
        self.apply_backpressure()

    async def _work(self) -> None:
        try:
            while self._waiting:
                self._write_buffer.write(await self._answer(self._waiting.popleft()) + b"\n")
                await self._write_buffer.drained()
                self.apply_backpressure()
        finally:
            self._task = None
            if self._ended:
                self._write_buffer.close()

    def end_of_input(self) -> bool:
        """Nothing more will come; true while there is something to answer, and somebody reads."""
        if not self._ended:
            self.feed(b"\n")  # the last line may have no end
            self._ended = True
        return self._task is not None and not self._hung_up()

    def _hung_up(self) -> bool:
        """Whether both halves are closed; asyncio tells of the one that it reads."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def apply_backpressure(self) -> None:
        """Read no further while the other side does not read, or waits for many answers."""
        if self._ended or self._transport.is_closing():
            return
        reading = not self._write_buffer.paused and len(self._waiting) < MAX_WAITING
        if reading != self._transport.is_reading():
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def lost(self) -> None:
        """The connection is gone: nobody waits for answers."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self, grace: float) -> None:
        """Finish the line that is being answered, unless it takes too long."""
        self._waiting.clear()
        self._ended = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
