"""``serve``: an HTTP server for the app, in the event loop of a worker."""

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
from qkit.web.connections import (
    Connection,
    ConnectionLimit,
    accept_connections,
    max_connections,
)
from qkit.web.loop_watchdog import LoopWatchdog

__all__ = ["DEFAULT_PORT", "serve"]

DEFAULT_PORT = 8710
SHUTDOWN_GRACE_SECONDS = 2  # for open responses at shutdown


class _Server(uvicorn.Server):
    """Server that installs no signal handlers and limits its connections."""

    _accepting: asyncio.Task[None]

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        limit = ConnectionLimit(max_connections())

        def create() -> Connection:
            return Connection(self.config, self.server_state, {}, limit=limit)

        assert sockets is not None
        (listener,) = sockets
        self.servers = []  # uvicorn closes these at shutdown
        self._accepting = asyncio.create_task(
            accept_connections(listener, limit, create), name="qkit web connections"
        )
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        await super().shutdown(sockets)


@asynccontextmanager
async def serve(
    service: QueueService,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    token: str | None = None,
    read_token: str | None = None,
    hosts: Collection[str] = (),
) -> AsyncGenerator[str, None]:
    """Serve probes, metrics, API and dashboard while the context is open.

    Enter it before the service starts, so that the probes also cover start and drain. If the
    event loop is blocked, a thread responds to every request with 503. The number of connections
    is limited, and a request that does not arrive completely within seconds is aborted.

    Args:
        service: Service to show; ``serve`` does not start or stop it.
        host: Address to bind. Default: ``127.0.0.1``.
        port: Port to bind; 0 selects a free port. Default: 8710.
        token: Bearer token that permits everything; see ``create_app``. Default: none.
        read_token: Bearer token that permits reading; see ``create_app``. Default: none.
        hosts: Additional host names; see ``create_app``. Default: none.

    Yields:
        The URL of the server, such as ``http://127.0.0.1:8710/``.

    Raises:
        ConfigError: The address cannot be bound, or ``create_app`` rejects a token or a host.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main():
        ...     service = QueueService(Settings(type="native"))
        ...     async with serve(service, port=0) as address, service:
        ...         print(address.rpartition(":")[0], service.ready)
        >>> asyncio.run(main())
        http://127.0.0.1 True
    """
    app = create_app(service, token=token, read_token=read_token, hosts=hosts)
    listener = _listen(host, port)
    address = _address(listener)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # AccessControl needs the address of the connection
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
            await _wait_closed(serving)


async def _wait_closed(serving: asyncio.Task[None]) -> None:
    """Wait for the server to stop; log its error, so that the shutdown does not fail."""
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
            f"cannot listen on {host}:{port}: {error}; choose another port, or 0 for a free one",
            cause=error,
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
