"""Server-sent events with live statistics, for open dashboards.

A stream sends one ``history`` event, then an ``overview`` event every second. It ends when the
service begins to stop, because a server waits for open responses before it shuts down. The browser
reconnects by itself and follows the shutdown on a new stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from qkit.observability.connection_state import ConnectionState
from qkit.service import QueueService
from qkit.web.responses import error_response, to_json
from qkit.web.sampler import Sampler

__all__ = ["EventStreams"]

INTERVAL_SECONDS = 1.0  # between overview events
RETRY_MILLISECONDS = 1_000  # delay before a browser reconnects
MAX_STREAMS = 50


class EventStreams:
    """Open event streams of one app, limited in number."""

    def __init__(self, service: QueueService, sampler: Sampler) -> None:
        self._service = service
        self._sampler = sampler
        self._open = 0

    def response(self) -> Response:
        """Return a response that sends a new stream, or 503 if too many are open."""
        return _StreamResponse(self)

    async def send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a stream until it ends or the client disconnects, or 503 if too many are open."""
        if self._open >= MAX_STREAMS:
            text = f"{MAX_STREAMS} event streams are already open; close one"
            await error_response(503, "TooManyStreams", text)(scope, receive, send)
            return
        self._open += 1  # before the first await, so that requests at the same time are counted
        try:
            stream = StreamingResponse(self._events(), media_type="text/event-stream")
            await stream(scope, receive, send)
        finally:
            self._open -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        was_stopping = self._service.stopping
        overview = await self._sampler.sample()
        yield f"retry: {RETRY_MILLISECONDS}\n".encode()
        yield _event("history", json.dumps(self._sampler.history()).encode())
        while True:
            yield _event("overview", to_json(overview))
            if self._ended(was_stopping):
                return
            await asyncio.sleep(INTERVAL_SECONDS)
            overview = await self._sampler.sample()

    def _ended(self, was_stopping: bool) -> bool:
        closed = self._service.connection_state is ConnectionState.CLOSED
        return closed or (self._service.stopping and not was_stopping)


class _StreamResponse(Response):
    """Response that counts towards the limit from its start to its end."""

    def __init__(self, streams: EventStreams) -> None:
        super().__init__()
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._streams.send_stream(scope, receive, send)


def _event(name: str, data: bytes) -> bytes:
    # The data must be one line; pydantic and json.dumps write no line breaks.
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
