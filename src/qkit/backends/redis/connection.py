"""The connection to Redis: a pool for commands, and every error of the driver turned into ours."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from qkit.backends.redis.scripts import Script
from qkit.errors import BackendUnavailable, ConfigError, QueueError, QueueFull

__all__ = ["BACKEND", "Address", "Link", "translated"]

BACKEND: Final = "redis"
CONNECTIONS: Final = 16
Reply = Any  # what a server answers has no type before somebody looks at it


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

    def client(self) -> Redis:
        """For commands, as many at once as there are connections; further ones wait."""
        pool = BlockingConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]  # theirs
            self.url,
            max_connections=CONNECTIONS,
            timeout=None,
            socket_timeout=self.timeout,
            retry=Retry(NoBackoff(), 0),
            **self.options(),
        )
        return Redis.from_pool(pool)

    def parking(self) -> Redis:
        """One connection to wait on. A socket timeout would end the wait, not a dead peer."""
        return Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # theirs
            self.url,
            single_connection_client=True,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            **self.options(),
        )


class Link:
    """Commands and scripts over the pool."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._client: Redis | None = None

    @property
    def open(self) -> bool:
        """Whether there is a pool; connections come and go in it."""
        return self._client is not None

    @property
    def client(self) -> Redis:
        """The driver's client."""
        if self._client is None:
            raise BackendUnavailable(
                "not connected: start the backend first", backend=BACKEND, operation="connect"
            )
        return self._client

    def connect(self) -> None:
        """Make the pool; the first command connects."""
        if self._client is None:
            self._client = self.address.client()

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        client, self._client = self._client, None
        if client is not None:
            async with translated("close"):
                await client.aclose()
                await client.connection_pool.disconnect()

    async def command(self, *words: bytes | str | float) -> Reply:
        """One command."""
        return await self.client.execute_command(*words)  # type: ignore[no-untyped-call]  # theirs

    async def run(self, script: Script, keys: Sequence[str], *arguments: Reply) -> Reply:
        """A script on the server, which is told of it when it does not know it."""
        try:
            return await self.command("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except exceptions.NoScriptError:
            return await self.command("EVAL", script.source, len(keys), *keys, *arguments)

    async def run_and_wait(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Reply],
        replicas: int,
        timeout: float,
    ) -> tuple[Reply, int]:
        """A script, and how many replicas have what it wrote; ``WAIT`` needs its connection."""
        async with self.client.pipeline(transaction=False) as pipe:
            # EVAL: a script that the server forgot would leave WAIT with nothing to wait for.
            queued: Any = pipe  # its methods have no types
            queued.execute_command("EVAL", script.source, len(keys), *keys, *arguments)
            queued.execute_command("WAIT", replicas, int(timeout * 1000))
            answer, copies = await pipe.execute()
        return answer, copies


@asynccontextmanager
async def translated(operation: str, queue: str | None = None) -> AsyncGenerator[None, None]:
    """Inside it no error of the driver escapes: each becomes a ``QueueError`` with its cause."""
    try:
        yield
    except QueueError:
        raise
    except (exceptions.RedisError, OSError, EOFError, ssl.SSLError) as error:
        raise error_of(error, operation, queue) from error


def error_of(error: BaseException, operation: str, queue: str | None = None) -> QueueError:
    """What an error of the driver means here; the most specific kinds come first."""
    kind, text = _meaning(error)
    return kind(text, backend=BACKEND, operation=operation, queue=queue, cause=error)


def _meaning(error: BaseException) -> tuple[type[QueueError], str]:
    said = str(error)
    for code, (kind, text) in _CODES.items():
        if re.search(rf"\b{code}\b", said[:300]):  # before Redis 7 a script's error is wrapped
            return kind, f"{text} ({said[:200]})"
    match error:
        case exceptions.AuthenticationError():
            return BackendUnavailable, "Redis refuses the login: check user and password in the url"
        case exceptions.NoPermissionError():
            return ConfigError, f"the user may not do this on Redis: {said[:200]}"
        case exceptions.OutOfMemoryError():
            return QueueFull, "Redis is out of memory: consume some, or raise its maxmemory"
        case exceptions.ReadOnlyError():
            return BackendUnavailable, "this Redis is a read-only replica: connect to its primary"
        case exceptions.TimeoutError() | TimeoutError():
            return BackendUnavailable, "Redis did not answer in time"
        case exceptions.BusyLoadingError():
            return BackendUnavailable, "Redis is still loading its data"
        case exceptions.ConnectionError() | OSError() | EOFError():
            return BackendUnavailable, f"the connection to Redis failed: {said[:200]}"
        case _:
            return QueueError, f"Redis refused: {said[:200]}"


_CODES: Final[Mapping[str, tuple[type[QueueError], str]]] = {
    "OOM": (QueueFull, "Redis is out of memory: consume some, or raise its maxmemory"),
    "WRONGTYPE": (ConfigError, "a key of this name is no list: choose another name or a prefix"),
    "READONLY": (BackendUnavailable, "this Redis is a read-only replica: connect to its primary"),
    "LOADING": (BackendUnavailable, "Redis is still loading its data"),
    "MASTERDOWN": (BackendUnavailable, "the replica has lost its primary"),
    "CLUSTERDOWN": (BackendUnavailable, "the cluster is down"),
    "MISCONF": (BackendUnavailable, "Redis cannot save to its disk and takes nothing"),
    "NOREPLICAS": (BackendUnavailable, "Redis has too few replicas to write"),
    "UNBLOCKED": (BackendUnavailable, "Redis changed its role while a consumer was parked"),
    "BUSY": (BackendUnavailable, "Redis is busy with a script"),
    "unknown command": (ConfigError, "this Redis is too old: qkit needs 6.2 or Valkey"),
}
