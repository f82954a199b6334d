"""Encoding of the owner's errors by class name and fields, so that clients can raise them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from qkit import errors
from qkit.backends.native.socket.protocol import ProtocolError, decode_json, encode_json
from qkit.errors import PartialSend, QueueError
from qkit.message import Sent

__all__ = ["decode_error", "decode_failures", "encode_error", "encode_failures"]

_CLASSES: Final[dict[str, type[QueueError]]] = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, QueueError)
}


def encode_error(error: BaseException) -> bytes:
    """Encode an error; encode an exception that is not a ``QueueError`` as a ``QueueError``."""
    return encode_json(_fields(error))


def decode_error(body: bytes) -> QueueError:
    """Decode an error; return a plain ``QueueError`` if its class is unknown."""
    return _error(decode_json(body))


def encode_failures(results: Sequence[BaseException | None]) -> bytes:
    """Encode the errors among the results, with their indexes; ``b""`` if there are none."""
    failed = [(index, _fields(item)) for index, item in enumerate(results) if item is not None]
    return encode_json(failed) if failed else b""


def decode_failures(body: bytes) -> dict[int, QueueError]:
    """Decode the output of ``encode_failures``; return the errors by index."""
    return {index: _error(fields) for index, fields in decode_json(body)} if body else {}


def _fields(error: BaseException) -> dict[str, object]:
    if not isinstance(error, QueueError):
        return {"type": "QueueError", "message": f"{type(error).__name__}: {error}"}
    known = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASSES)
    fields: dict[str, object] = {"type": known, "message": error.message, **error.context}
    if isinstance(error, PartialSend):
        fields["results"] = [
            _fields(item) if isinstance(item, QueueError) else list(item) for item in error.results
        ]
    return fields


def _error(fields: Any) -> QueueError:
    try:
        cls = _CLASSES.get(fields.pop("type"), QueueError)
        results = [
            Sent(*item) if isinstance(item, list) else _error(item)
            for item in fields.pop("results", ())
        ]
        if issubclass(cls, PartialSend):
            return cls(results=results, **fields)
        return cls(**fields)
    except (AttributeError, LookupError, TypeError) as error:
        raise ProtocolError(f"invalid error in a frame: {error!r}") from error
