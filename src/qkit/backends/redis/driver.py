"""Pipelined connection on a stream opened by redis-py.

redis-py connects, negotiates TLS and logs in; then this module takes over its transport. For each
command, redis-py uses a pooled connection, a lock, and a timer per read. This overhead is several
times the server's cost of running the command. Here each command is a single write, and replies
arrive in the order of the commands. A cancelled call keeps its position in that order, so that no
other call gets its reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import hiredis
import redis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from qkit._internal.loop_calls import running_loop
from qkit.backends.common.errors import other_loop

__all__ = ["CommandArgument", "PipelinedConnection", "Reply"]

Reply: TypeAlias = Any  # the type depends on the command
CommandArgument: TypeAlias = bytes | str | int | float

_INCOMPLETE: Final = object()  # the parser returns this while a reply is incomplete


class _Call:
    """Pending command, or ``count`` commands whose replies form one result."""

    __slots__ = ("count", "deadline", "future", "replies")

    def __init__(
        self, future: asyncio.Future[Reply], deadline: float, count: int | None = None
    ) -> None:
        self.future = future
        self.deadline = deadline
        self.count = count
        self.replies: list[Reply] = []


class PipelinedConnection(asyncio.Protocol):
    """A connection that sends commands without waiting for earlier replies.

    Args:
        connection: Open redis-py connection; it must not be used afterwards.
        timeout: Seconds to wait for a reply before the connection is considered lost.
    """

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        reader, self._stream = _take_stream(connection)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport = self._stream.transport
        self._timeout = timeout
        self._parser = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=exceptions.ResponseError,
            notEnoughData=_INCOMPLETE,
        )
        self._pending: deque[_Call] = deque()
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._closed = self._loop.create_future()
        self.lost: Exception | None = None
        """Why the connection was lost; ``None`` while it is usable."""
        self._transport.set_protocol(self)
        if self._transport.is_closing() or reader.at_eof():
            self._lose(exceptions.ConnectionError("the server closed the connection"))

    # Commands

    def call(self, *arguments: CommandArgument, longer: float = 0.0) -> asyncio.Future[Reply]:
        """Send a command and return a future for its reply.

        Args:
            arguments: The command and its arguments.
            longer: Seconds for which the command may block on the server; added to the timeout.
        """
        return self._send(hiredis.pack_command(arguments), None, longer)  # type: ignore[arg-type]  # any length

    def call_all(
        self, commands: Iterable[tuple[CommandArgument, ...]], *, longer: float = 0.0
    ) -> asyncio.Future[list[Reply]]:
        """Send several commands in one write and return a future for the list of their replies.

        An error reply is an exception in the list and is not raised.

        Args:
            commands: Commands with their arguments.
            longer: Seconds for which the commands may block on the server; added to the timeout.
        """
        packed: list[bytes] = [hiredis.pack_command(arguments) for arguments in commands]  # type: ignore[arg-type]  # any length
        return self._send(b"".join(packed), len(packed), longer)

    def _send(self, data: bytes, count: int | None, longer: float) -> asyncio.Future[Reply]:
        if running_loop() is not self._loop:
            raise other_loop("redis")
        future = self._loop.create_future()
        if self.lost is not None:
            future.set_exception(self.lost)
            return future
        deadline = self._loop.time() + self._timeout + longer
        self._pending.append(_Call(future, deadline, count))
        if self._timeout_timer is None:
            self._timeout_timer = self._loop.call_at(deadline, self._check_timeout)
        self._transport.write(data)
        return future

    def _check_timeout(self) -> None:
        """Abort the connection if the reply to the oldest pending call is overdue.

        The event loop reads sockets before it runs timers, so a reply that arrived in time has
        already been read.
        """
        self._timeout_timer = None
        if not self._pending:
            return
        deadline = self._pending[0].deadline
        if deadline > self._loop.time():
            self._timeout_timer = self._loop.call_at(deadline, self._check_timeout)
            return
        self._lose(exceptions.TimeoutError("the server did not reply in time"))
        self._transport.abort()

    # Replies

    def data_received(self, data: bytes) -> None:
        """Parse replies and complete the calls that wait for them."""
        self._parser.feed(data)
        try:
            while (reply := self._parser.gets()) is not _INCOMPLETE:
                self._handle_reply(reply)
        except exceptions.InvalidResponse as error:
            self._lose(error)
            self._transport.abort()

    def _handle_reply(self, reply: Reply) -> None:
        if not self._pending:
            raise exceptions.InvalidResponse("the server sent a reply without a pending command")
        call = self._pending[0]
        if call.count is not None:
            call.replies.append(reply)
            if len(call.replies) < call.count:
                return
            reply = call.replies
        self._pending.popleft()
        if call.future.done():
            return  # the caller was cancelled
        if isinstance(reply, Exception):
            call.future.set_exception(reply)
        else:
            call.future.set_result(reply)

    # Closing

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending calls."""
        text = str(exc) if exc is not None else "the server closed the connection"
        self._lose(exceptions.ConnectionError(text))
        if not self._closed.done():
            self._closed.set_result(None)

    def _lose(self, error: Exception) -> None:
        if self.lost is not None:
            return
        self.lost = error
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(error)

    async def aclose(self) -> None:
        """Close the connection; idempotent."""
        if running_loop() is not self._loop:
            raise other_loop("redis")
        self._lose(exceptions.ConnectionError("qkit closed the connection"))
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._closed)
                return
        self._transport.abort()


Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _take_stream(connection: AbstractConnection) -> Stream:
    """Take the open stream from a redis-py connection, which must not be used afterwards.

    redis-py has no public API for this. Tested with redis-py 8.1.
    """
    try:
        reader, writer = connection._reader, connection._writer  # pyright: ignore[reportPrivateUsage]  # see above
    except AttributeError as error:
        raise exceptions.RedisError(
            f"redis-py {redis.__version__} is not supported: install a version that qkit is "
            "tested with, such as 8.1"
        ) from error
    assert reader is not None
    assert writer is not None
    connection._reader = connection._writer = None  # pyright: ignore[reportPrivateUsage]  # see above
    return reader, writer
