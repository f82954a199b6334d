"""JSON responses and the mapping from errors to status codes."""

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
from qkit.web.schemas import ErrorDetail, ErrorResponse

__all__ = ["adapter", "error_response", "from_error", "json_response", "to_json"]

# The first matching class decides.
STATUSES: tuple[tuple[type[QueueError], int], ...] = (
    (QueueNotFound, 404),
    (PayloadTooLarge, 413),
    (InvalidName, 422),
    (InvalidBody, 422),
    (InvalidHeader, 422),
    (InvalidPriority, 422),
    (QueueFull, 507),
    (Unsupported, 501),
    (ConfigError, 409),  # the channel is declared differently elsewhere
    (LifecycleError, 503),
    (SendTimeout, 504),
    (BackendUnavailable, 503),
)


@cache
def adapter(shape: type) -> TypeAdapter[Any]:
    """Return pydantic's adapter for a type, cached because building one takes a millisecond."""
    return TypeAdapter(shape)


def to_json(record: object, shape: type | None = None) -> bytes:
    """Encode a record as JSON; ``shape`` is its type if ``type(record)`` is not specific enough."""
    return adapter(shape or type(record)).dump_json(record)


def json_response(record: object, status: int = 200, *, shape: type | None = None) -> Response:
    """Return a response with a record as JSON."""
    return Response(to_json(record, shape), status, media_type="application/json")


def error_response(status: int, name: str, text: str) -> Response:
    """Return an error response; a 401 response includes ``WWW-Authenticate``."""
    response = json_response(ErrorResponse(error=ErrorDetail(type=name, message=text)), status)
    if status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="qkit"'
    return response


def from_error(error: QueueError) -> Response:
    """Return the response to a ``QueueError``; its text contains no secrets."""
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    return error_response(status, type(error).__name__, str(error))
