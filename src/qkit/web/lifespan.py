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

from qkit.errors import ConfigError, LifecycleError
from qkit.service import QueueService

__all__ = ["lifespan"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[dict[str, object]]]


def lifespan(service: QueueService | Callable[[], QueueService]) -> Lifespan:
    """Return a lifespan that starts the service with the application and drains it at the end.

    Request handlers can use ``request.state.service``. On SIGTERM and SIGINT, the service is no
    longer ready and ends open event streams before the server handles the signal.

    Args:
        service: Service to start and drain, which must not have been started; or a function that
            creates one. A service starts only once. With a function, the application can be started
            several times, for example by each test.

    Returns:
        A lifespan function for ``FastAPI(lifespan=…)`` or ``Starlette(lifespan=…)``. It raises
        ``LifecycleError`` if the service was already shut down.

    Raises:
        ConfigError: ``service`` is neither a ``QueueService`` nor a function.

    Example:
        >>> from starlette.applications import Starlette
        >>> from qkit import QueueService, Settings
        >>> service = QueueService(Settings(type="native"))
        >>> app = Starlette(lifespan=lifespan(service))
        >>> def create_service() -> QueueService:
        ...     return QueueService(Settings(type="native"))
        >>> app = Starlette(lifespan=lifespan(create_service))  # a new service at each start
    """
    if not isinstance(service, QueueService) and not callable(service):
        raise ConfigError(
            "lifespan expected a QueueService, or a function that returns one, got "
            f"{type(service).__name__}"
        )

    @asynccontextmanager
    async def live(app: Starlette) -> AsyncGenerator[dict[str, object], None]:
        current = _unstarted(service)
        async with current:
            with _forward_signals(current):
                yield {"service": current}

    return live


def _unstarted(service: QueueService | Callable[[], QueueService]) -> QueueService:
    """Return the service to start.

    Raises:
        LifecycleError: The service was already shut down.
        ConfigError: The function returned something else.
    """
    if isinstance(service, QueueService):
        if service.stopping:
            raise LifecycleError(
                "lifespan(service): this service was already shut down, and a service starts only "
                "once; to start the application several times, pass a function that creates the "
                "service: lifespan(create_service)"
            )
        return service
    created: object = service()
    if not isinstance(created, QueueService):
        raise ConfigError(
            f"lifespan expected the function to return a QueueService, got {type(created).__name__}"
        )
    return created


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
