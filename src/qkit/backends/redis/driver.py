"""Pipelined connection on redis-py's stream.

redis-py connects, speaks TLS and logs in; then this module takes over its transport. A command of
redis-py, with a connection from a pool, a lock and a timer for each read, costs several times what
the server takes. Here a command is one write, and answers arrive in the order of the commands. A
caller that gave up keeps its position in that order, so no caller gets the answer of another.
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

__all__ = ["CommandArgument", "PipelinedConnection", "Reply"]

Reply: TypeAlias = Any  # what a server answers has no type before somebody looks at it
CommandArgument: TypeAlias = bytes | str | int | float

_MORE: Final = object()  # the parser has no whole answer yet


class _Call:
    """One command, or several that are answered together: then ``replies`` gathers."""

    __slots__ = ("count", "deadline", "future", "replies")

    def __init__(
        self, future: asyncio.Future[Reply], deadline: float, count: int | None = None
    ) -> None:
        self.future = future
        self.deadline = deadline
        self.count = count
        self.replies: list[Reply] = []


class PipelinedConnection(asyncio.Protocol):
    """A connection that is dead when an answer is ``timeout`` seconds late."""

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        reader, self._stream = _take_stream(connection)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport = self._stream.transport
        self._timeout = timeout
        self._parser = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=exceptions.ResponseError,
            notEnoughData=_MORE,
        )
        self._waiting: deque[_Call] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._gone = self._loop.create_future()
        self.lost: Exception | None = None
        """Why nothing can be called any more."""
        self._transport.set_protocol(self)
        if self._transport.is_closing() or reader.at_eof():
            self._lose(exceptions.ConnectionError("the server closed the connection"))

    # Calling

    def call(self, *arguments: CommandArgument, longer: float = 0.0) -> asyncio.Future[Reply]:
        """The answer to one command; ``longer`` is how long it may wait on the server."""
        return self._send(hiredis.pack_command(arguments), None, longer)  # type: ignore[arg-type]  # any length

    def call_all(
        self, commands: Iterable[tuple[CommandArgument, ...]], *, longer: float = 0.0
    ) -> asyncio.Future[list[Reply]]:
        """The answers to several commands in one write; errors are among them, not raised."""
        packed: list[bytes] = [hiredis.pack_command(arguments) for arguments in commands]  # type: ignore[arg-type]  # any length
        return self._send(b"".join(packed), len(packed), longer)

    def _send(self, data: bytes, count: int | None, longer: float) -> asyncio.Future[Reply]:
        future = self._loop.create_future()
        if self.lost is not None:
            future.set_exception(self.lost)
            return future
        deadline = self._loop.time() + self._timeout + longer
        self._waiting.append(_Call(future, deadline, count))
        if self._watch is None:
            self._watch = self._loop.call_at(deadline, self._check)
        self._transport.write(data)
        return future

    def _check(self) -> None:
        """Every answer that was here in time has been read before a timer runs."""
        self._watch = None
        if not self._waiting:
            return
        deadline = self._waiting[0].deadline
        if deadline > self._loop.time():
            self._watch = self._loop.call_at(deadline, self._check)
            return
        self._lose(exceptions.TimeoutError("the server did not answer in time"))
        self._transport.abort()

    # Answers

    def data_received(self, data: bytes) -> None:
        """Give each answer to whoever waits for it."""
        self._parser.feed(data)
        try:
            while (reply := self._parser.gets()) is not _MORE:
                self._answer(reply)
        except exceptions.InvalidResponse as error:
            self._lose(error)
            self._transport.abort()

    def _answer(self, reply: Reply) -> None:
        if not self._waiting:
            raise exceptions.InvalidResponse("an answer that nobody asked for")
        call = self._waiting[0]
        if call.count is not None:
            call.replies.append(reply)
            if len(call.replies) < call.count:
                return
            reply = call.replies
        self._waiting.popleft()
        if call.future.done():
            return  # whoever asked gave up
        if isinstance(reply, Exception):
            call.future.set_exception(reply)
        else:
            call.future.set_result(reply)

    # The end

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody who waits will be answered."""
        text = str(exc) if exc is not None else "the server closed the connection"
        self._lose(exceptions.ConnectionError(text))
        if not self._gone.done():
            self._gone.set_result(None)

    def _lose(self, error: Exception) -> None:
        if self.lost is not None:
            return
        self.lost = error
        if self._watch is not None:
            self._watch.cancel()
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(error)

    async def aclose(self) -> None:
        """Hang up; idempotent."""
        self._lose(exceptions.ConnectionError("the connection was closed here"))
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._gone)
                return
        self._transport.abort()


Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _take_stream(connection: AbstractConnection) -> Stream:
    """Take the open stream out of a connection of redis-py, which must not use it afterwards.

    redis-py gives no public access to it. Tested with redis-py 8.1.
    """
    try:
        reader, writer = connection._reader, connection._writer  # pyright: ignore[reportPrivateUsage]  # see above
    except AttributeError as error:
        raise exceptions.RedisError(
            f"qkit cannot use redis-py {redis.__version__}: install an older version"
        ) from error
    assert reader is not None
    assert writer is not None
    connection._reader = connection._writer = None  # pyright: ignore[reportPrivateUsage]  # see above
    return reader, writer
