"""What every error of the Redis driver, or of the server, means here."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from redis import exceptions

from qkit.errors import BackendUnavailable, ConfigError, QueueError, QueueFull, QueueNotFound

__all__ = ["BACKEND", "DRIVER_ERRORS", "queue_not_found", "to_queue_error", "translate_errors"]

BACKEND: Final = "redis"

DRIVER_ERRORS: Final = (exceptions.RedisError, OSError, EOFError, ssl.SSLError)
"""All that the driver may raise; a time-out of asyncio is an ``OSError``."""


class translate_errors:  # noqa: N801  # it reads as a verb: with translate_errors("publish", queue)
    """Inside it no error of the driver escapes: each becomes a ``QueueError`` with its cause.

    >>> with translate_errors("publish", "orders"):
    ...     raise exceptions.ConnectionError("reset by peer")
    Traceback (most recent call last):
    qkit.errors.BackendUnavailable: ...
    """

    __slots__ = ("_operation", "_queue")

    def __init__(self, operation: str, queue: str | None = None) -> None:
        self._operation = operation
        self._queue = queue

    def __enter__(self) -> None:
        """Nothing happens before there is an error."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raise ours in place of the driver's."""
        if isinstance(error, DRIVER_ERRORS) and not isinstance(error, QueueError):
            raise to_queue_error(error, self._operation, self._queue) from error


def to_queue_error(error: BaseException, operation: str, queue: str | None = None) -> QueueError:
    """What an error of the driver means here; the most specific kinds come first."""
    kind, text = _meaning(error)
    return kind(text, backend=BACKEND, operation=operation, queue=queue, cause=error)


def queue_not_found(queue: str, operation: str) -> QueueNotFound:
    """The error for a queue without a declaration on the server."""
    return QueueNotFound(
        f"there is no queue {queue!r} on this Redis: declare it, or send to it first",
        backend=BACKEND,
        operation=operation,
        queue=queue,
    )


def _meaning(error: BaseException) -> tuple[type[QueueError], str]:
    said = str(error)
    for code, (kind, text) in _CODES.items():
        if re.search(rf"\b{code}\b", said[:300]):  # before Redis 7 a script's error is wrapped
            return kind, f"{text} ({said[:200]})"
    match error:
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
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
        case exceptions.InvalidResponse():
            return BackendUnavailable, "what answers there does not speak Redis's protocol"
        case exceptions.ConnectionError() | OSError() | EOFError():
            return BackendUnavailable, f"the connection to Redis failed: {said[:200]}"
        case _:
            return QueueError, f"Redis refused: {said[:200]}"


_CODES: Final[Mapping[str, tuple[type[QueueError], str]]] = {
    "OOM": (QueueFull, "Redis is out of memory: consume some, or raise its maxmemory"),
    "WRONGTYPE": (ConfigError, "a key of this name is no list: choose another name or a prefix"),
    "NOPERM": (ConfigError, "the user may not do this on Redis: see the rules in docs/redis.md"),
    "NOAUTH": (BackendUnavailable, "Redis wants a login: put user and password into the url"),
    "WRONGPASS": (BackendUnavailable, "Redis refuses the login: check user and password"),
    "READONLY": (BackendUnavailable, "this Redis is a read-only replica: connect to its primary"),
    "LOADING": (BackendUnavailable, "Redis is still loading its data"),
    "MASTERDOWN": (BackendUnavailable, "the replica has lost its primary"),
    "CLUSTERDOWN": (BackendUnavailable, "the cluster is down"),
    "MOVED": (ConfigError, "this is a node of a cluster, which qkit cannot use yet"),
    "ASK": (ConfigError, "this is a node of a cluster, which qkit cannot use yet"),
    "CROSSSLOT": (ConfigError, "this is a node of a cluster, which qkit cannot use yet"),
    "TRYAGAIN": (BackendUnavailable, "the cluster moves this key at the moment"),
    "MISCONF": (BackendUnavailable, "Redis cannot save to its disk and takes nothing"),
    "NOREPLICAS": (BackendUnavailable, "Redis has too few replicas to write"),
    "UNBLOCKED": (BackendUnavailable, "Redis changed its role while a consumer was parked"),
    "BUSY": (BackendUnavailable, "Redis is busy with a script"),
    "max number of clients reached": (BackendUnavailable, "Redis takes no more connections"),
    "unknown command": (ConfigError, "this Redis is too old: qkit needs 6.2 or Valkey"),
}
