"""The one place where errors of the driver become ours."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
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
MAX_QUOTED: Final = 300  # characters of another error's text

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
    said = str(error)[:MAX_QUOTED]
    if isinstance(error, exceptions.ChannelPreconditionFailed):
        return _precondition(said)
    for rule in _RULES:
        if isinstance(error, rule.errors) and (rule.applies is None or rule.applies(error)):
            reason = error.args[-1] if error.args else ""
            cause = str(error.__cause__)[:MAX_QUOTED]
            return rule.kind, rule.text.format(said=said, reason=reason, cause=cause)
    return QueueError, f"RabbitMQ refused: {said}"


class _Rule(NamedTuple):
    """What errors of the driver mean.

    ``text`` may name ``{said}``, the text of the error, ``{reason}``, its last argument, and
    ``{cause}``, the text of its cause. ``applies`` is a further condition.
    """

    errors: type[BaseException] | tuple[type[BaseException], ...]
    kind: type[QueueError]
    text: str
    applies: Callable[[BaseException], bool] | None = None


def _node_is_down(error: BaseException) -> bool:
    said = str(error)
    return "inaccessible" in said or "is stopped" in said or "home node" in said


def _not_allowed(error: BaseException) -> bool:
    return error.args[:1] == (530,)


def _closed_at_login(error: BaseException) -> bool:
    return "Connection.Close" in str(error)


def _tls_failed(error: BaseException) -> bool:
    return isinstance(error.__cause__, ssl.SSLError)


# The first that fits decides: the most specific kinds come first.
_RULES: Final = (
    _Rule(
        exceptions.PublishError,
        QueueNotFound,
        "there is no such queue on this RabbitMQ: declare it first",
    ),
    _Rule(
        exceptions.DeliveryError,
        QueueFull,
        "RabbitMQ refused the message: the queue is full, or cannot store it",
    ),
    _Rule(
        exceptions.ChannelNotFoundEntity,
        BackendUnavailable,
        "the node that has the queue is down ({said})",
        _node_is_down,
    ),
    _Rule(
        exceptions.ChannelNotFoundEntity,
        QueueNotFound,
        "there is no such queue or topic on this RabbitMQ ({said})",
    ),
    _Rule(
        exceptions.ChannelAccessRefused,
        ConfigError,
        "the user may not do this on RabbitMQ: {said}",
    ),
    _Rule(
        exceptions.ChannelLockedResource,
        ConfigError,
        "the queue is another connection's alone: {said}",
    ),
    _Rule(
        (exceptions.ProbableAuthenticationError, exceptions.AuthenticationError),
        BackendUnavailable,
        "RabbitMQ refuses the login: check user and password",
    ),
    _Rule(
        exceptions.ConnectionNotAllowed,
        ConfigError,
        "RabbitMQ does not allow this connection: {said}",
    ),
    _Rule(
        exceptions.ConnectionClosed,
        ConfigError,
        "RabbitMQ does not allow this connection: {reason}",
        _not_allowed,
    ),
    _Rule(
        exceptions.InvalidFrameError,
        ConfigError,
        "RabbitMQ let the user in and closed the connection: check the vhost in the url, "
        "and what the user may do there",
        _closed_at_login,
    ),
    _Rule(
        (exceptions.IncompatibleProtocolError, exceptions.ProtocolSyntaxError),
        ConfigError,
        "whoever answers there does not speak AMQP 0-9-1: check the url",
    ),
    _Rule(exceptions.MethodNotImplemented, ConfigError, "this RabbitMQ is too old: {said}"),
    _Rule((ValueError, TypeError, PAMQPException), QueueError, "AMQP cannot carry this: {said}"),
    _Rule(TimeoutError, BackendUnavailable, "RabbitMQ did not answer in time"),
    _Rule(
        exceptions.AMQPConnectionError,
        BackendUnavailable,
        "no TLS with RabbitMQ: {cause}",
        _tls_failed,
    ),
    _Rule(
        (exceptions.AMQPError, OSError, EOFError, RuntimeError),
        BackendUnavailable,
        "the connection to RabbitMQ failed: {said}",
    ),
    _Rule(asyncio.CancelledError, BackendUnavailable, "the connection to RabbitMQ was closed"),
)


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
