"""Server side of a JSON-lines connection: splits the input and writes the responses."""

from __future__ import annotations

import asyncio
import json
import select
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from qkit.backends.native.socket.server.receive_budget import TRACKED_BYTES, ReceiveBudget
from qkit.backends.native.socket.write_buffer import WriteBuffer

__all__ = ["MAX_LINE", "JsonLineSession"]

MAX_LINE: Final = 16 << 20  # default limit in bytes
MAX_PENDING: Final = 64  # unanswered lines of a connection at which reading pauses


class JsonLineSession:
    """Session that responds to each line with one line, in order.

    A client that closes its write half, as ``nc`` does at the end of its input, still gets its
    responses.

    Args:
        answer: Function that returns the response to a line; called with ``None`` for a line that
            is too long.
        transport: Transport of the connection.
        write_buffer: Write buffer of the connection.
        max_line: Maximum length of a line in bytes; 16 MiB by default.
        budget: Limit on the data that all clients have sent.
    """

    def __init__(
        self,
        answer: Callable[[bytes | None], Awaitable[bytes]],
        transport: asyncio.Transport,
        write_buffer: WriteBuffer,
        *,
        budget: ReceiveBudget,
        max_line: int = MAX_LINE,
    ) -> None:
        self._answer = answer
        self._budget = budget
        budget.sessions.add(self)
        self._counted = 0, 0  # bytes of an incomplete line, and of pending lines
        self._transport = transport
        self._write_buffer = write_buffer
        self._max_line = max_line
        self._rest = bytearray()
        self._skipping = False  # whether the current line is too long and is being skipped
        self._ended = False
        self._pending: deque[bytes | None] = deque()
        self._task: asyncio.Task[None] | None = None

    def feed(self, data: bytes) -> None:
        """Split received data into lines and respond to each."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.strip():
                self._pending.append(bytes(line) if len(line) <= self._max_line else None)
        if len(rest) > self._max_line:
            rest.clear()
            if not self._skipping:
                self._skipping = True
                self._pending.append(None)
        self._start_answering()
        self._count(len(rest))

    def _count(self, incomplete: int) -> None:
        pending = sum(len(line) for line in self._pending if line is not None)
        counted = tuple(size if size >= TRACKED_BYTES else 0 for size in (incomplete, pending))
        if counted != self._counted:
            self._counted = counted[0], counted[1]
            self._budget.update(self, *self._counted)

    def reject(self, reason: str) -> None:
        """Send an error and close the connection."""
        self._counted = 0, self._counted[1]
        self._rest.clear()
        error = {"error": {"type": "PayloadTooLarge", "message": reason}}
        self._write_buffer.write(json.dumps(error).encode() + b"\n")
        self._write_buffer.close()

    def _start_answering(self) -> None:
        if self._task is None and self._pending:
            self._task = asyncio.create_task(self._answer_all(), name="qkit socket commands")
        self.apply_backpressure()

    async def _answer_all(self) -> None:
        try:
            while self._pending:
                self._write_buffer.write(await self._answer(self._pending.popleft()) + b"\n")
                await self._write_buffer.drained()
                self._count(len(self._rest))
                self.apply_backpressure()
        finally:
            self._task = None
            if self._ended:
                self._write_buffer.close()

    def end_of_input(self) -> bool:
        """Handle the end of input; return whether the client is still waiting for responses."""
        if not self._ended:
            self.feed(b"\n")  # the last line may lack a newline
            self._ended = True
        return self._task is not None and not self._hung_up()

    def _hung_up(self) -> bool:
        """Return whether the client closed both halves; asyncio reports only the read half."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def apply_backpressure(self) -> None:
        """Pause reading while the client does not read its responses or many lines are pending."""
        if self._ended or self._transport.is_closing():
            return
        reading = (
            not self._write_buffer.paused
            and len(self._pending) < MAX_PENDING
            and not self._budget.exceeded
        )
        if reading != self._transport.is_reading():
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def lost(self) -> None:
        """Cancel the running command."""
        self._budget.sessions.discard(self)
        self._pending.clear()
        self._count(0)
        if self._task is not None:
            self._task.cancel()

    @property
    def idle(self) -> bool:
        """Whether no command is running."""
        return self._task is None

    async def aclose(self, grace: float) -> None:
        """Drop pending lines; wait up to ``grace`` seconds for the running command, then cancel."""
        self._pending.clear()
        self._ended = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
