"""``lifespan``: a service that lives as long as a FastAPI or Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType

from starlette.applications import Starlette

from qkit.service import QueueService

__all__ = ["lifespan"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[dict[str, object]]]


def lifespan(service: QueueService) -> Lifespan:
    """Start the service with the application, and drain it at its end::

        app = FastAPI(lifespan=lifespan(service))

    Requests find it as ``request.state.service``. On SIGTERM and SIGINT it is not ready from the
    first moment, before the server stops taking requests, and open live pages end; the signal then
    goes on to the server, whose it is.
    """

    @asynccontextmanager
    async def live(app: Starlette) -> AsyncGenerator[dict[str, object], None]:
        async with service:
            with _forward_signals(service):
                yield {"service": service}

    return live


@contextlib.contextmanager
def _forward_signals(service: QueueService) -> Generator[None, None, None]:
    """Tell the service of a signal before the server's own handler has it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the service
            loop.call_soon_threadsafe(service.stop)
        handler = previous[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    # Where there is no handler in Python the default ends the process, and that is not ours.
    forwarded = [number for number, handler in previous.items() if callable(handler)]
    for number in forwarded:
        signal.signal(number, forward)
    try:
        yield
    finally:
        for number in forwarded:
            if signal.getsignal(number) is forward:
                signal.signal(number, previous[number])
