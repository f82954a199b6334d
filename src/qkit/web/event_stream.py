"""Live figures as server-sent events, for as long as a page is open.

``history`` comes once, ``overview`` every second. A stream that was open ends when the service is
asked to stop: servers wait for open responses before they let an application shut down, and would
wait for ever. The browser asks again by itself, and is told of the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from qkit.observability.connection_state import ConnectionState
from qkit.service import QueueService
from qkit.web.responses import failure, to_json
from qkit.web.sampler import Sampler

__all__ = ["EventStreams"]

INTERVAL_SECONDS = 1.0  # between two overviews
RETRY_MILLISECONDS = 1_000  # after which a browser asks again
MAX_STREAMS = 50


class EventStreams:
    """The open streams of one app, bounded in number."""

    def __init__(self, service: QueueService, sampler: Sampler) -> None:
        self._service = service
        self._sampler = sampler
        self._open = 0

    def response(self) -> Response:
        """Another stream; 503 when there are too many."""
        if self._open >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages are open already; close one"
            return failure(503, "TooManyStreams", text)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        self._open += 1
        was_stopping = self._service.stopping
        try:
            overview = await self._sampler.sample()
            yield f"retry: {RETRY_MILLISECONDS}\n".encode()
            yield _event("history", json.dumps(self._sampler.history()).encode())
            while True:
                yield _event("overview", to_json(overview))
                if self._over(was_stopping):
                    return
                await asyncio.sleep(INTERVAL_SECONDS)
                overview = await self._sampler.sample()
        finally:
            self._open -= 1

    def _over(self, was_stopping: bool) -> bool:
        closed = self._service.connection_state is ConnectionState.CLOSED
        return closed or (self._service.stopping and not was_stopping)


def _event(name: str, data: bytes) -> bytes:
    # JSON from pydantic and json.dumps is one line, which is what the format wants.
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
