"""The one place where errors of the driver become ours."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from aiormq import exceptions
from pamqp.exceptions import PAMQPException

from qkit.errors import (
    BackendUnavailable,
    ConfigError,
    PayloadTooLarge,
    QueueError,
    QueueFull,
    QueueNotFound,
)

__all__ = [
    "BACKEND",
    "DRIVER_ERRORS",
    "Difference",
    "difference_of",
    "interrupted",
    "to_queue_error",
    "translate_errors",
]

BACKEND: Final = "rabbitmq"

DRIVER_ERRORS: Final = (
    exceptions.AMQPError,
    exceptions.ChannelInvalidStateError,
    PAMQPException,
    OSError,
    EOFError,
    RuntimeError,  # the driver's word for a connection that was closed
    ValueError,  # and for a name or number that AMQP cannot carry
    TypeError,
)

_DIFFERENCE: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?P<kind>\w+) '(?P<name>[^']*)'.*: "
    r"received (?P<here>.*) but current is (?P<there>.*)"
)
_ARGUMENT: Final = re.compile(r"inequivalent arg '(?P<argument>[^']*)'")
_VALUE: Final = re.compile(r"(?:the value )?('[^']*')(?: of type '\w+')?")
_PLAIN: Final = re.compile(r"'(?P<value>.*)'")
_TYPED: Final = re.compile(r"the value '(?P<value>.*)' of type '(?P<type>\w+)'")
_TYPES: Final[Mapping[str, type]] = {
    "longstr": str,
    "bool": bool,
    **dict.fromkeys(("byte", "unsignedbyte", "short", "unsignedshort"), int),
    **dict.fromkeys(("signedint", "unsignedint", "long", "unsignedlong"), int),
}


class Difference(NamedTuple):
    """An argument that a queue was created with, other than the one it was declared with.

    ``value`` is ``None`` where the queue has no such argument. ``known`` is false where RabbitMQ's
    text does not tell the value: it is cut at 255 bytes, and some types are not shown.
    """

    argument: str
    value: str | int | bool | None = None
    known: bool = True


@asynccontextmanager
async def translate_errors(operation: str, queue: str | None = None) -> AsyncGenerator[None, None]:
    """Inside it no error of the driver escapes: each becomes a ``QueueError`` with its cause."""
    try:
        yield
    except QueueError:
        raise
    except DRIVER_ERRORS as error:
        raise to_queue_error(error, operation, queue) from error
    except asyncio.CancelledError as error:
        if not interrupted():
            raise
        raise to_queue_error(error, operation, queue) from error


def interrupted() -> bool:
    """Whether a cancellation is the driver's way to say that it was closed, and nobody's wish."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def to_queue_error(error: BaseException, operation: str, queue: str | None = None) -> QueueError:
    """What an error of the driver means here; the most specific kinds come first."""
    kind, text = _meaning(error)
    return kind(text, backend=BACKEND, operation=operation, queue=queue, cause=error)


def _meaning(error: BaseException) -> tuple[type[QueueError], str]:
    said = str(error)[:300]
    match error:
        case exceptions.PublishError():
            return QueueNotFound, "there is no such queue on this RabbitMQ: declare it first"
        case exceptions.DeliveryError():
            return QueueFull, "RabbitMQ refused the message: the queue is full, or cannot store it"
        case exceptions.ChannelNotFoundEntity():
            if "inaccessible" in said or "is stopped" in said or "home node" in said:
                return BackendUnavailable, f"the node that has the queue is down ({said})"
            return QueueNotFound, f"there is no such queue or topic on this RabbitMQ ({said})"
        case exceptions.ChannelPreconditionFailed():
            return _precondition(said)
        case exceptions.ChannelAccessRefused():
            return ConfigError, f"the user may not do this on RabbitMQ: {said}"
        case exceptions.ChannelLockedResource():
            return ConfigError, f"the queue is another connection's alone: {said}"
        case exceptions.ProbableAuthenticationError() | exceptions.AuthenticationError():
            return BackendUnavailable, "RabbitMQ refuses the login: check user and password"
        case exceptions.ConnectionNotAllowed():
            return ConfigError, f"RabbitMQ does not allow this connection: {said}"
        case exceptions.ConnectionClosed() if error.args[:1] == (530,):
            return ConfigError, f"RabbitMQ does not allow this connection: {error.args[-1]}"
        case exceptions.InvalidFrameError() if "Connection.Close" in said:
            return ConfigError, (
                "RabbitMQ let the user in and closed the connection: check the vhost in the url, "
                "and what the user may do there"
            )
        case exceptions.IncompatibleProtocolError() | exceptions.ProtocolSyntaxError():
            return ConfigError, "whoever answers there does not speak AMQP 0-9-1: check the url"
        case exceptions.MethodNotImplemented():
            return ConfigError, f"this RabbitMQ is too old: {said}"
        case ValueError() | TypeError() | PAMQPException():
            return QueueError, f"AMQP cannot carry this: {said}"
        case TimeoutError():
            return BackendUnavailable, "RabbitMQ did not answer in time"
        case exceptions.AMQPConnectionError() if isinstance(error.__cause__, ssl.SSLError):
            return BackendUnavailable, f"no TLS with RabbitMQ: {error.__cause__}"[:300]
        case exceptions.AMQPError() | OSError() | EOFError() | RuntimeError():
            return BackendUnavailable, f"the connection to RabbitMQ failed: {said}"
        case asyncio.CancelledError():
            return BackendUnavailable, "the connection to RabbitMQ was closed"
        case _:
            return QueueError, f"RabbitMQ refused: {said}"


def difference_of(
    error: exceptions.ChannelPreconditionFailed, sent: Mapping[str, object]
) -> Difference | None:
    """The argument that RabbitMQ refused to declare a queue with, if that was the reason.

    ``sent`` has the arguments of the declaration: the type of a value is told only if it differs.
    """
    said = str(error)
    argument = _ARGUMENT.search(said)
    if argument is None:
        return None
    name = argument["argument"]
    whole = _DIFFERENCE.search(said)
    there = None if whole is None else whole["there"].strip()
    if there == "none":
        return Difference(name)
    if there is not None and (typed := _TYPED.fullmatch(there)) is not None:
        return _typed(name, typed["value"], _TYPES.get(typed["type"]))
    if there is not None and (plain := _PLAIN.fullmatch(there)) is not None:
        return _typed(name, plain["value"], type(sent.get(name)))
    return Difference(name, known=False)


def _typed(argument: str, value: str, kind: type | None) -> Difference:
    if kind is str:
        return Difference(argument, value)
    if kind is bool:
        return Difference(argument, value == "true")
    if kind is int and value.lstrip("-").isdigit():
        return Difference(argument, int(value))
    return Difference(argument, known=False)


def _precondition(said: str) -> tuple[type[QueueError], str]:
    found = _DIFFERENCE.search(said)
    if found is not None:
        return ConfigError, (
            f"the {found['kind']} {found['name']!r} exists with another {found['argument']}: "
            f"{_value(found['there'])} there, {_value(found['here'])} here. Declare it alike "
            "everywhere, or delete it first"
        )
    if "message size" in said:
        return PayloadTooLarge, f"the message is larger than RabbitMQ takes ({said})"
    if "timed out" in said:
        return BackendUnavailable, (
            "RabbitMQ closed the channel: a delivery was held longer than its consumer_timeout"
        )
    return ConfigError, f"RabbitMQ refused: {said}"


def _value(text: str) -> str:
    found = _VALUE.fullmatch(text.strip())
    return found[1] if found else text.strip()
