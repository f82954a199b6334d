"""Connections to Redis for commands and scripts, and the connection parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redis import exceptions
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from qkit._internal.loop_calls import running_loop
from qkit.backends.common.errors import other_loop
from qkit.backends.common.reopened import Reopened
from qkit.backends.redis.driver import CommandArgument, PipelinedConnection, Reply
from qkit.backends.redis.errors import BACKEND, translate_errors
from qkit.backends.redis.scripts.script import Script
from qkit.settings.model import Settings

__all__ = ["ConnectionParameters", "ReconnectingConnection"]

NOSCRIPT: Final = "NOSCRIPT"
# A connection without a reply for this long is considered dead. The limit is shorter than the
# default send timeout, so that a connection silently dropped by a firewall is replaced quickly.
ANSWER_TIMEOUT_SECONDS: Final = 4.0


class ConnectionParameters:
    """Address of the server and connection options; the driver's own retries are disabled.

    Args:
        url: ``redis://`` or ``rediss://`` URL, with user and password if needed.
        timeout: Seconds to wait for a connection; also the upper limit for a reply.
        tls_ca_file: PEM file of trusted CA certificates; ``None`` for the system's certificates.
        tls_cert_file: PEM file of the client certificate.
        tls_key_file: PEM file of the client certificate's private key.
    """

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
        """Return the connection parameters given by the settings."""
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
        """Return the redis-py options shared by blocking and asynchronous connections."""
        return {
            "socket_connect_timeout": self.timeout,
            "socket_keepalive": True,
            "health_check_interval": 0,
            "retry_on_error": [],
            **self._tls,
        }

    async def open_driver_connection(self) -> AbstractConnection:
        """Open a redis-py connection and log in."""
        pool: Any = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]  # redis-py is partly untyped
            self.url,
            socket_timeout=self.timeout,
            retry=Retry(NoBackoff(), 0),
            **self.options(),
        )
        pool.connection_kwargs["protocol"] = 2  # overrides the URL: qkit parses only RESP2
        connection: AbstractConnection = pool.make_connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py is partly untyped
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def open_connection(self) -> PipelinedConnection:
        """Open a pipelined connection for the caller's exclusive use."""
        return PipelinedConnection(
            await self.open_driver_connection(), min(self.timeout, ANSWER_TIMEOUT_SECONDS)
        )


class ReconnectingConnection:
    """Shared connection for commands and scripts, reopened after it is lost."""

    def __init__(self, parameters: ConnectionParameters) -> None:
        self.parameters = parameters
        self._shared = Reopened(
            parameters.open_connection,
            lambda connection: connection.lost is not None,
            PipelinedConnection.aclose,
            backend=BACKEND,
        )
        self._idle_waiters: list[PipelinedConnection] = []  # idle connections for WAIT
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self) -> None:
        """Allow calls in this event loop; the connection is opened by the first call."""
        self._loop = running_loop()
        self._shared.open()

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        self.check_loop()
        waiters, self._idle_waiters = self._idle_waiters, []
        with translate_errors("close"):
            await self._shared.aclose()
            for connection in waiters:
                await connection.aclose()

    async def current(self) -> PipelinedConnection:
        """Return the shared connection, opening it if needed.

        Raises:
            LifecycleError: The caller runs in another event loop or in a forked child process.
        """
        self.check_loop()
        return await self._shared.get()

    def check_loop(self) -> None:
        """Raise ``LifecycleError`` in another event loop and in a forked child process."""
        if self._loop is not None and running_loop() is not self._loop:
            raise other_loop(BACKEND)

    async def command(self, *arguments: CommandArgument) -> Reply:
        """Run a command and return its reply."""
        connection = self._shared.value
        if connection is None or connection.lost is not None:
            connection = await self.current()
        return await connection.call(*arguments)

    async def commands(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Reply]:
        """Run several commands in one round trip; raise the first error after all replies."""
        replies = await (await self.current()).call_all(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def run(self, script: Script, keys: Sequence[str], *arguments: CommandArgument) -> Reply:
        """Run a script and return its reply; send its source if the server has not cached it."""
        connection = self._shared.value
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
        """Run a script; return its reply and the number of replicas that confirmed its writes.

        ``WAIT`` covers only the writes of its own connection and blocks later commands on that
        connection. Each call therefore uses a connection exclusively.

        Args:
            script: The script.
            keys: KEYS of the script.
            arguments: ARGV of the script.
            replicas: Number of replicas to wait for.
            timeout: Seconds to wait for the replicas.
        """
        self.check_loop()
        connection = (
            self._idle_waiters.pop()
            if self._idle_waiters
            else await self.parameters.open_connection()
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
        if self._shared.is_open and connection.lost is None:
            self._idle_waiters.append(connection)
        else:
            await connection.aclose()
        for reply in (answer, copies):
            if isinstance(reply, Exception):
                raise reply
        return answer, copies


def is_unknown_script(error: Exception) -> bool:
    """Return whether the server rejected ``EVALSHA`` because the script is not cached."""
    return str(error).startswith(NOSCRIPT)
