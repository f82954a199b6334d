"""Translation of redis-py and Redis server errors into ``QueueError``."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Final

from redis import exceptions

from qkit.backends.common.error_translation import ErrorTranslator
from qkit.errors import BackendUnavailable, ConfigError, QueueError, QueueFull, QueueNotFound

__all__ = ["BACKEND", "DRIVER_ERRORS", "queue_not_found", "to_queue_error", "translate_errors"]

BACKEND: Final = "redis"

DRIVER_ERRORS: Final = (exceptions.RedisError, OSError, EOFError, ssl.SSLError)
"""Exceptions that the driver may raise; ``TimeoutError`` is included as an ``OSError``."""


def queue_not_found(queue: str, operation: str) -> QueueNotFound:
    """Return the error for a queue that is not declared on the server."""
    return QueueNotFound(
        f"queue {queue!r} does not exist on this Redis server: declare it or send to it first",
        backend=BACKEND,
        operation=operation,
        queue=queue,
    )


def _meaning(error: BaseException) -> tuple[type[QueueError], str]:
    reply = str(error)
    for code, (kind, text) in _CODES.items():
        # Not only at the start: before Redis 7, errors of commands in scripts have a prefix.
        if re.search(rf"\b{code}\b", reply[:300]):
            return kind, f"{text} ({reply[:200]})"
    match error:
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return (
                BackendUnavailable,
                "Redis rejected the login: check the user and password in url",
            )
        case exceptions.NoPermissionError():
            return ConfigError, f"the Redis user lacks a permission: {reply[:200]}"
        case exceptions.OutOfMemoryError():
            return QueueFull, "Redis is out of memory: consume messages or raise its maxmemory"
        case exceptions.ReadOnlyError():
            return (
                BackendUnavailable,
                "the server is a read-only replica: connect to its primary",
            )
        case exceptions.TimeoutError() | TimeoutError():
            return BackendUnavailable, "Redis did not reply in time"
        case exceptions.BusyLoadingError():
            return BackendUnavailable, "Redis is still loading its data"
        case exceptions.InvalidResponse():
            return BackendUnavailable, "the server sent an invalid Redis reply: check url"
        case exceptions.ConnectionError() | OSError() | EOFError():
            return BackendUnavailable, f"the connection to Redis failed: {reply[:200]}"
        case _:
            return QueueError, f"Redis returned an error: {reply[:200]}"


_CODES: Final[Mapping[str, tuple[type[QueueError], str]]] = {
    "OOM": (QueueFull, "Redis is out of memory: consume messages or raise its maxmemory"),
    "WRONGTYPE": (ConfigError, "a key with this name is not a list: use another name or a prefix"),
    "NOPERM": (ConfigError, "the Redis user lacks a permission: see docs/redis.md"),
    "NOAUTH": (BackendUnavailable, "Redis requires a login: add the user and password to url"),
    "WRONGPASS": (
        BackendUnavailable,
        "Redis rejected the login: check the user and password in url",
    ),
    "READONLY": (
        BackendUnavailable,
        "the server is a read-only replica: connect to its primary",
    ),
    "LOADING": (BackendUnavailable, "Redis is still loading its data"),
    "MASTERDOWN": (BackendUnavailable, "the replica has lost the connection to its primary"),
    "CLUSTERDOWN": (BackendUnavailable, "the cluster is down"),
    "MOVED": (ConfigError, "the server is part of a Redis Cluster, which qkit does not support"),
    "ASK": (ConfigError, "the server is part of a Redis Cluster, which qkit does not support"),
    "CROSSSLOT": (
        ConfigError,
        "the server is part of a Redis Cluster, which qkit does not support",
    ),
    "TRYAGAIN": (BackendUnavailable, "the cluster is moving this key to another node"),
    "MISCONF": (BackendUnavailable, "Redis cannot write to its disk and rejects writes"),
    "NOREPLICAS": (BackendUnavailable, "Redis has too few replicas to accept writes"),
    "UNBLOCKED": (BackendUnavailable, "Redis changed its role while a consumer was waiting"),
    "BUSY": (BackendUnavailable, "Redis is busy running a script"),
    "max number of clients reached": (
        BackendUnavailable,
        "Redis has reached its maximum number of connections",
    ),
    "unknown command": (
        ConfigError,
        "this server is too old: qkit requires Redis 6.2 or later, or Valkey",
    ),
}

translate_errors: Final = ErrorTranslator(BACKEND, DRIVER_ERRORS, _meaning)
to_queue_error: Final = translate_errors.error
