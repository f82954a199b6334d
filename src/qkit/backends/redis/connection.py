"""The way to Redis: where it is, and the connections for commands and scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redis import exceptions
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from qkit._internal.tasks import cancel_and_wait
from qkit.backends.redis.driver import CommandArgument, PipelinedConnection, Reply
from qkit.backends.redis.errors import BACKEND, translate_errors
from qkit.backends.redis.scripts.script import Script
from qkit.errors import BackendUnavailable
from qkit.settings.model import Settings

__all__ = ["ConnectionParameters", "ReconnectingConnection"]

NOSCRIPT: Final = "NOSCRIPT"
# A connection without an answer for so long is dead. Not the timeout of a send: behind a firewall
# that dropped them, dead connections must be replaced soon.
ANSWER_TIMEOUT_SECONDS: Final = 4.0


class ConnectionParameters:
    """Where the server is and how to speak to it; the driver's own retries are always off."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        tls_ca_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
    ) -> None:
        self.url = url
        self.timeout = timeout
        files = {
            "ssl_ca_certs": tls_ca_file,
            "ssl_certfile": tls_cert_file,
            "ssl_keyfile": tls_key_file,
        }
        self._tls = {name: path for name, path in files.items() if path is not None}

    @classmethod
    def from_settings(cls, settings: Settings) -> ConnectionParameters:
        """The server that the settings name."""
        assert settings.url is not None
        ca_file, cert_file, key_file = (
            None if path is None else str(path)
            for path in (settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)
        )
        return cls(
            settings.url.get_secret_value(),
            timeout=settings.send_timeout,
            tls_ca_file=ca_file,
            tls_cert_file=cert_file,
            tls_key_file=key_file,
        )

    def options(self) -> dict[str, Any]:
        """What every kind of connection has in common, in a thread or in the loop."""
        return {
            "socket_connect_timeout": self.timeout,
            "socket_keepalive": True,
            "health_check_interval": 0,
            "retry_on_error": [],
            **self._tls,
        }

    async def open_driver_connection(self) -> AbstractConnection:
        """The driver's connection, ready and logged in."""
        pool: Any = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]  # theirs
            self.url,
            socket_timeout=self.timeout,
            retry=Retry(NoBackoff(), 0),
            **self.options(),
        )
        pool.connection_kwargs["protocol"] = 2  # whatever the url says: ours is the parser
        connection: AbstractConnection = pool.make_connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]  # theirs
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def open_connection(self) -> PipelinedConnection:
        """Open a connection for one user."""
        return PipelinedConnection(
            await self.open_driver_connection(), min(self.timeout, ANSWER_TIMEOUT_SECONDS)
        )


class ReconnectingConnection:
    """Commands and scripts over one connection, which is opened again after it broke."""

    def __init__(self, parameters: ConnectionParameters) -> None:
        self.parameters = parameters
        self._open = False
        self._connection: PipelinedConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiters: list[PipelinedConnection] = []  # connections for WAIT that nobody uses now

    def connect(self) -> None:
        """Allow calls; the first one connects."""
        self._open = True

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        self._open = False
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            await cancel_and_wait([connecting])
        connections, self._waiters = [*self._waiters], []
        if self._connection is not None:
            connections.append(self._connection)
        self._connection = None
        with translate_errors("close"):
            for connection in connections:
                await connection.aclose()

    async def current(self) -> PipelinedConnection:
        """The connection that all share."""
        while self._connection is None or self._connection.lost is not None:
            if not self._open:
                raise BackendUnavailable(
                    "not connected: start the backend first", backend=BACKEND, operation="connect"
                )
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect(), name="qkit redis connect")
                self._connecting.add_done_callback(_heard)
            connecting = self._connecting
            # One that gives up must not take the others' connection along.
            await asyncio.wait({connecting})
            if connecting.cancelled():
                raise BackendUnavailable(
                    "the connection was closed while it was opened",
                    backend=BACKEND,
                    operation="connect",
                )
            connecting.result()
        return self._connection

    async def _connect(self) -> None:
        try:
            self._connection = await self.parameters.open_connection()
        finally:
            self._connecting = None

    async def command(self, *arguments: CommandArgument) -> Reply:
        """One command."""
        connection = self._connection
        if connection is None or connection.lost is not None:
            connection = await self.current()
        return await connection.call(*arguments)

    async def commands(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Reply]:
        """Several in one round trip; the first error is raised once all are answered."""
        replies = await (await self.current()).call_all(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def run(self, script: Script, keys: Sequence[str], *arguments: CommandArgument) -> Reply:
        """Run a script; send its source if the server does not know it."""
        connection = self._connection
        if connection is None or connection.lost is not None:
            connection = await self.current()
        try:
            return await connection.call("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except exceptions.ResponseError as error:
            if not is_unknown_script(error):
                raise
        return await self.command("EVAL", script.source, len(keys), *keys, *arguments)

    async def run_and_wait(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[CommandArgument],
        replicas: int,
        timeout: float,
    ) -> tuple[Reply, int]:
        """A script, and how many replicas have what it wrote.

        ``WAIT`` looks at its own connection's writes and holds up what comes after it there, so
        each has a connection to itself.
        """
        connection = (
            self._waiters.pop() if self._waiters else await self.parameters.open_connection()
        )
        try:
            wait = ("WAIT", replicas, int(timeout * 1000))
            call = (len(keys), *keys, *arguments)
            answer, copies = await connection.call_all(
                [("EVALSHA", script.sha, *call), wait], longer=timeout
            )
            if isinstance(answer, Exception) and is_unknown_script(answer):
                answer, copies = await connection.call_all(
                    [("EVAL", script.source, *call), wait], longer=timeout
                )
        except BaseException:
            await connection.aclose()
            raise
        if self._open and connection.lost is None:
            self._waiters.append(connection)
        else:
            await connection.aclose()
        for reply in (answer, copies):
            if isinstance(reply, Exception):
                raise reply
        return answer, copies


def is_unknown_script(error: Exception) -> bool:
    """Whether the server does not know the script."""
    return str(error).startswith(NOSCRIPT)


def _heard(task: asyncio.Task[None]) -> None:
    """Everybody who waited for it may have given up, and then nobody asks how it ended."""
    if not task.cancelled():
        task.exception()
