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
from qkit.backends.redis.driver import Reply, Wire, Word
from qkit.backends.redis.errors import BACKEND, translated
from qkit.backends.redis.scripts.script import Script
from qkit.errors import BackendUnavailable

__all__ = ["Address", "Link"]

FORGOTTEN: Final = "NOSCRIPT"
# A server that says nothing for so long is gone, or nobody passes its words on. Not the send's own
# timeout: behind a firewall that forgot them, dead connections must make room soon for new ones.
PATIENCE: Final = 4.0


class Address:
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

    def options(self) -> dict[str, Any]:
        """What every kind of connection has in common, in a thread or in the loop."""
        return {
            "socket_connect_timeout": self.timeout,
            "socket_keepalive": True,
            "health_check_interval": 0,
            "retry_on_error": [],
            **self._tls,
        }

    async def connection(self) -> AbstractConnection:
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

    async def wire(self) -> Wire:
        """A connection of one's own."""
        return Wire(await self.connection(), min(self.timeout, PATIENCE))


class Link:
    """Commands and scripts over one connection, which is opened again after it broke."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._open = False
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiters: list[Wire] = []  # connections for WAIT that nobody uses now

    def connect(self) -> None:
        """Allow calls; the first one connects."""
        self._open = True

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        self._open = False
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            await cancel_and_wait([connecting])
        wires, self._waiters = [*self._waiters], []
        if self._wire is not None:
            wires.append(self._wire)
        self._wire = None
        with translated("close"):
            for wire in wires:
                await wire.aclose()

    async def wire(self) -> Wire:
        """The connection that all share."""
        while self._wire is None or self._wire.lost is not None:
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
        return self._wire

    async def _connect(self) -> None:
        try:
            self._wire = await self.address.wire()
        finally:
            self._connecting = None

    async def command(self, *words: Word) -> Reply:
        """One command."""
        wire = self._wire
        if wire is None or wire.lost is not None:
            wire = await self.wire()
        return await wire.call(*words)

    async def commands(self, commands: Sequence[tuple[Word, ...]]) -> list[Reply]:
        """Several in one round trip; the first error is raised once all are answered."""
        replies = await (await self.wire()).call_all(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def run(self, script: Script, keys: Sequence[str], *arguments: Word) -> Reply:
        """A script on the server, which is told of it when it does not know it."""
        wire = self._wire
        if wire is None or wire.lost is not None:
            wire = await self.wire()
        try:
            return await wire.call("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except exceptions.ResponseError as error:
            if not is_forgotten(error):
                raise
        return await self.command("EVAL", script.source, len(keys), *keys, *arguments)

    async def run_and_wait(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Word],
        replicas: int,
        timeout: float,
    ) -> tuple[Reply, int]:
        """A script, and how many replicas have what it wrote.

        ``WAIT`` looks at its own connection's writes and holds up what comes after it there, so
        each has a connection to itself.
        """
        wire = self._waiters.pop() if self._waiters else await self.address.wire()
        try:
            wait = ("WAIT", replicas, int(timeout * 1000))
            words = (len(keys), *keys, *arguments)
            answer, copies = await wire.call_all(
                [("EVALSHA", script.sha, *words), wait], longer=timeout
            )
            if isinstance(answer, Exception) and is_forgotten(answer):
                answer, copies = await wire.call_all(
                    [("EVAL", script.source, *words), wait], longer=timeout
                )
        except BaseException:
            await wire.aclose()
            raise
        if self._open and wire.lost is None:
            self._waiters.append(wire)
        else:
            await wire.aclose()
        for reply in (answer, copies):
            if isinstance(reply, Exception):
                raise reply
        return answer, copies


def is_forgotten(error: Exception) -> bool:
    """Whether the server does not know the script."""
    return str(error).startswith(FORGOTTEN)


def _heard(task: asyncio.Task[None]) -> None:
    """Everybody who waited for it may have given up, and then nobody asks how it ended."""
    if not task.cancelled():
        task.exception()
