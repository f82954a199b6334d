"""Answers as JSON, and the one place where an error becomes a status."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response

from qkit.errors import (
    BackendUnavailable,
    ConfigError,
    InvalidBody,
    InvalidHeader,
    InvalidName,
    InvalidPriority,
    LifecycleError,
    PayloadTooLarge,
    QueueError,
    QueueFull,
    QueueNotFound,
    SendTimeout,
    Unsupported,
)
from qkit.web.schemas import Failure, FailureDetail

__all__ = ["adapter", "answer", "failure", "from_error", "to_json"]

# The first that fits counts.
STATUSES: tuple[tuple[type[QueueError], int], ...] = (
    (QueueNotFound, 404),
    (PayloadTooLarge, 413),
    (InvalidName, 422),
    (InvalidBody, 422),
    (InvalidHeader, 422),
    (InvalidPriority, 422),
    (QueueFull, 507),
    (Unsupported, 501),
    (ConfigError, 409),  # the channel is declared elsewhere, in another way
    (LifecycleError, 503),
    (SendTimeout, 504),
    (BackendUnavailable, 503),
)


@cache
def adapter(shape: type) -> TypeAdapter[Any]:
    """Pydantic's view of a record; made once, for making it takes a millisecond."""
    return TypeAdapter(shape)


def to_json(record: object, shape: type | None = None) -> bytes:
    """A record as JSON; ``shape`` is its type where the object itself does not tell."""
    return adapter(shape or type(record)).dump_json(record)


def answer(record: object, status: int = 200, *, shape: type | None = None) -> Response:
    """A record as a response."""
    return Response(to_json(record, shape), status, media_type="application/json")


def failure(status: int, name: str, text: str) -> Response:
    """A refusal or a failure; 401 asks for the token in the way HTTP has for that."""
    response = answer(Failure(error=FailureDetail(type=name, message=text)), status)
    if status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="qkit"'
    return response


def from_error(error: QueueError) -> Response:
    """One of qkit's errors; its text says what to do, and holds no secret."""
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    return failure(status, type(error).__name__, str(error))
