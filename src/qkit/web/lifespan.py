"""``lifespan``: a service that runs for the lifetime of a FastAPI or Starlette app."""

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
    """Return a lifespan that starts the service with the application and drains it at the end.

    Request handlers can use ``request.state.service``. On SIGTERM and SIGINT, the service is no
    longer ready and ends open event streams before the server handles the signal.

    Args:
        service: Service to start and drain. It must not have been started.

    Returns:
        A lifespan function for ``FastAPI(lifespan=…)`` or ``Starlette(lifespan=…)``.

    Example:
        >>> from starlette.applications import Starlette
        >>> from qkit import QueueService, Settings
        >>> service = QueueService(Settings(type="native"))
        >>> app = Starlette(lifespan=lifespan(service))
    """

    @asynccontextmanager
    async def live(app: Starlette) -> AsyncGenerator[dict[str, object], None]:
        async with service:
            with _forward_signals(service):
                yield {"service": service}

    return live


@contextlib.contextmanager
def _forward_signals(service: QueueService) -> Generator[None, None, None]:
    """Stop the service on a signal, before the server's signal handler runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is already closed, and so is the service
            loop.call_soon_threadsafe(service.stop)
        handler = previous[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    # Without a Python handler, the default action ends the process; leave that unchanged.
    forwarded = [number for number, handler in previous.items() if callable(handler)]
    for number in forwarded:
        signal.signal(number, forward)
    try:
        yield
    finally:
        for number in forwarded:
            if signal.getsignal(number) is forward:
                signal.signal(number, previous[number])
