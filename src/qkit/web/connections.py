"""Connections of the embedded HTTP server: a limit on their number, and deadlines for requests.

Clients that open connections and send nothing, or only part of a request, cannot take all file
descriptors of the worker: an incomplete request is aborted after a few seconds, and when there are
too many connections, the oldest one without a running request makes room for the new one. Probes
are therefore answered at any time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, Final, cast

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from qkit._internal.logging import logger

__all__ = ["Connection", "ConnectionLimit", "accept_connections", "max_connections"]

REQUEST_HEAD_SECONDS = 5.0  # for request line and headers, from the connection or the first byte
REQUEST_BODY_SECONDS = 30.0  # for the whole body
WRITE_STALL_SECONDS = 30.0  # for which a client may read nothing of a response
MIN_CONNECTIONS: Final = 60  # more than the limit of event streams, which may stay open
MAX_CONNECTIONS: Final = 200
RETRY_ACCEPT_SECONDS = 0.2
REPORT_INTERVAL_SECONDS = 60.0

# Errors of clients, such as malformed requests, are not logged: each of them would be a line.
_server_log = logging.getLogger("uvicorn.error.qkit")
_server_log.setLevel(logging.ERROR)


def max_connections() -> int:
    """Return the limit of connections: at most a quarter of the file descriptors, 60 to 200."""
    try:
        import resource
    except ModuleNotFoundError:  # not a POSIX system
        return MAX_CONNECTIONS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, descriptors // 4))


class ConnectionLimit:
    """Open connections of a server, oldest first.

    Args:
        limit: Maximum number of connections.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[Connection, None] = {}
        self._room = asyncio.Event()

    def add(self, connection: Connection) -> None:
        """Add a new connection."""
        self._open[connection] = None

    def discard(self, connection: Connection) -> None:
        """Remove a connection that was closed."""
        self._open.pop(connection, None)
        self._room.set()

    async def make_room(self) -> None:
        """Wait until a connection may be added; abort the oldest one without a running request."""
        while len(self._open) >= self._limit and not self.abort_oldest():
            self._room.clear()
            await self._room.wait()

    def abort_oldest(self) -> bool:
        """Abort the oldest connection without a running request; return whether there was one."""
        for connection in self._open:
            if connection.expendable:
                connection.abort()
                return True
        return False


class Connection(H11Protocol):
    """HTTP connection whose requests must arrive in time.

    The deadlines cover every phase in which the server waits for the client: the head of a request,
    its body, and reading the response.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limit: ConnectionLimit,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger: logging.Logger = _server_log
        self._limit = limit
        self._phase: Any = None
        self._request_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def expendable(self) -> bool:
        """Whether no complete request is being answered, or the client does not read the answer."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is None or cycle.response_complete:
            return True
        return cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the deadline for the first request."""
        super().connection_made(transport)
        self._limit.add(self)
        self._watch_request()

    def data_received(self, data: bytes) -> None:
        """Process data of the client; start or end the deadline of the phase that it begins."""
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        """Start the deadline for the next request."""
        super().on_response_complete()
        self._watch_request()

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read."""
        super().pause_writing()
        if self._write_deadline is None:
            self._watch_writing()

    def resume_writing(self) -> None:
        """End the deadline, because the client has read."""
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _watch_writing(self, before: int | None = None) -> None:
        """Abort if the client has read nothing since the last check, then check again later.

        Args:
            before: Number of unsent bytes at the last check. Default: this is the first check.
        """
        unsent = self.transport.get_write_buffer_size()
        if before is not None and unsent >= before:
            self.abort()
            return
        self._write_deadline = self.loop.call_later(
            WRITE_STALL_SECONDS, self._watch_writing, unsent
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        super().connection_lost(exc)
        self._cancel_deadlines()
        self._limit.discard(self)

    def abort(self) -> None:
        """Close the connection without waiting for the client."""
        self._cancel_deadlines()
        self._limit.discard(self)
        self.transport.abort()

    def _watch_request(self) -> None:
        """Start a new deadline if the client has begun a new phase of its request."""
        phase = self.conn.their_state
        if phase is self._phase or self.transport.is_closing():
            return
        self._phase = phase
        if self._request_deadline is not None:
            self._request_deadline.cancel()
            self._request_deadline = None
        if phase is h11.IDLE:
            self._request_deadline = self.loop.call_later(REQUEST_HEAD_SECONDS, self._end_idle)
        elif phase is h11.SEND_BODY:
            self._request_deadline = self.loop.call_later(REQUEST_BODY_SECONDS, self.abort)

    def _end_idle(self) -> None:
        """Close an idle connection, but only after the client has read the last response."""
        if self.transport.get_write_buffer_size():
            self._request_deadline = self.loop.call_later(REQUEST_HEAD_SECONDS, self._end_idle)
        else:
            self.abort()

    def _cancel_deadlines(self) -> None:
        for deadline in (self._request_deadline, self._write_deadline):
            if deadline is not None:
                deadline.cancel()
        self._request_deadline = self._write_deadline = None


async def accept_connections(
    listener: socket.socket, limit: ConnectionLimit, create: Callable[[], Connection]
) -> None:
    """Accept connections one by one until cancelled.

    The event loop's own server accepts as many connections as it can before it creates their
    protocols, and logs a traceback for each one beyond the limit of file descriptors.

    Args:
        listener: Listening socket; it becomes non-blocking.
        limit: Connections of the server.
        create: Creates the protocol of a connection.
    """
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    reported_at = float("-inf")
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                limit.abort_oldest()
                if time.monotonic() - reported_at > REPORT_INTERVAL_SECONDS:
                    reported_at = time.monotonic()
                    logger.error(
                        "the web server cannot accept a connection: %s; raise the limit of file "
                        "descriptors (ulimit -n)",
                        error,
                    )
            await asyncio.sleep(RETRY_ACCEPT_SECONDS)
            continue
        try:
            await limit.make_room()
            accepted.setblocking(False)
            await loop.connect_accepted_socket(create, accepted)
        except OSError:  # the client has closed the connection
            accepted.close()
        except BaseException:
            accepted.close()
            raise
