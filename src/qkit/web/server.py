"""``serve``: the pages beside a worker, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import asynccontextmanager

import uvicorn

from qkit._internal.logging import logger
from qkit.errors import ConfigError
from qkit.service import QueueService
from qkit.web.app import create_app
from qkit.web.loop_watchdog import LoopWatchdog

__all__ = ["DEFAULT_PORT", "serve"]

DEFAULT_PORT = 8710
SHUTDOWN_GRACE_SECONDS = 2  # for responses that are not finished at the end


class _Server(uvicorn.Server):
    """A server that leaves signals to the service: it ends when its context does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve(
    service: QueueService,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    token: str | None = None,
    hosts: Collection[str] = (),
) -> AsyncGenerator[str, None]:
    """Serve probes, metrics, API and dashboard for as long as the context lasts; gives the address.

    Open it around the service, so that the probes tell of its start and of its draining::

        async with serve(service, token=token) as address:
            await service.run()

    Port 0 takes any that is free. A loop that is blocked is answered for by a thread, with 503.
    Raises ``ConfigError`` if the address cannot be had.
    """
    app = create_app(service, token=token, hosts=hosts)
    listener = _listen(host, port)
    address = _address(listener)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
    )
    server = _Server(config)
    with contextlib.closing(listener), LoopWatchdog(listener):
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="qkit web")
        try:
            logger.info("serving on %s", address)
            yield address
        finally:
            server.should_exit = True
            await _end(serving)


async def _end(serving: asyncio.Task[None]) -> None:
    """Wait for the server; what it dies of is no reason to fail a service that came down well."""
    _, late = await asyncio.wait({serving}, timeout=2 * SHUTDOWN_GRACE_SECONDS + 1)
    for task in late:
        task.cancel()
    await asyncio.wait({serving})
    if not serving.cancelled() and (error := serving.exception()) is not None:
        logger.error("the web server failed", exc_info=error)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another port, or 0 for any",
            cause=error,
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
