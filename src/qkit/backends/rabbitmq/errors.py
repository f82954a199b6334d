"""Translation of the driver's errors into ``QueueError`` and its subclasses."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from aiormq import exceptions
from pamqp.exceptions import PAMQPException

from qkit.backends.common.error_translation import ErrorTranslator
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
    "cancelled_by_driver",
    "difference_of",
    "to_queue_error",
    "translate_errors",
]

BACKEND: Final = "rabbitmq"
MAX_QUOTED: Final = 300  # characters of a driver error's text that are quoted

DRIVER_ERRORS: Final = (
    exceptions.AMQPError,
    exceptions.ChannelInvalidStateError,
    PAMQPException,
    OSError,
    EOFError,
    RuntimeError,  # raised by a closed connection
    ValueError,  # a name or number that AMQP cannot represent
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
    """Argument of an existing queue that differs from the declaration.

    Attributes:
        argument: Name of the argument.
        value: Value of the argument on the broker; ``None`` if the queue does not have it.
        known: Whether ``value`` is known. RabbitMQ truncates its error at 255 bytes and does not
            show values of some types.
    """

    argument: str
    value: str | int | bool | None = None
    known: bool = True


def cancelled_by_driver() -> bool:
    """Return whether the driver raised ``CancelledError`` because of a closed connection.

    If false, the current task was cancelled.
    """
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def _meaning(error: BaseException) -> tuple[type[QueueError], str]:
    detail = str(error)[:MAX_QUOTED]
    if isinstance(error, exceptions.ChannelPreconditionFailed):
        return _precondition(detail)
    for rule in _RULES:
        if isinstance(error, rule.errors) and (rule.applies is None or rule.applies(error)):
            reason = error.args[-1] if error.args else ""
            cause = str(error.__cause__)[:MAX_QUOTED]
            return rule.kind, rule.text.format(detail=detail, reason=reason, cause=cause)
    return QueueError, f"RabbitMQ rejected the request: {detail}"


class _Rule(NamedTuple):
    """Rule for translating driver errors.

    Attributes:
        errors: Classes of driver errors.
        kind: Class of the resulting error.
        text: Text of the resulting error. ``{detail}`` is the text of the driver error,
            ``{reason}`` its last argument and ``{cause}`` the text of its cause.
        applies: Additional condition, if any.
    """

    errors: type[BaseException] | tuple[type[BaseException], ...]
    kind: type[QueueError]
    text: str
    applies: Callable[[BaseException], bool] | None = None


def _node_is_down(error: BaseException) -> bool:
    detail = str(error)
    return "inaccessible" in detail or "is stopped" in detail or "home node" in detail


def _not_allowed(error: BaseException) -> bool:
    return error.args[:1] == (530,)


def _closed_at_login(error: BaseException) -> bool:
    return "Connection.Close" in str(error)


def _tls_failed(error: BaseException) -> bool:
    return isinstance(error.__cause__, ssl.SSLError)


# The first match applies, so specific rules come before general ones.
_RULES: Final = (
    _Rule(
        exceptions.PublishError,
        QueueNotFound,
        "the queue does not exist on this RabbitMQ broker: declare it first",
    ),
    _Rule(
        exceptions.DeliveryError,
        QueueFull,
        "RabbitMQ rejected the message: the queue is full or cannot store the message",
    ),
    _Rule(
        exceptions.ChannelNotFoundEntity,
        BackendUnavailable,
        "the node of the queue is down ({detail})",
        _node_is_down,
    ),
    _Rule(
        exceptions.ChannelNotFoundEntity,
        QueueNotFound,
        "the queue or topic does not exist on this RabbitMQ broker ({detail})",
    ),
    _Rule(
        exceptions.ChannelAccessRefused,
        ConfigError,
        "RabbitMQ denied access: {detail}",
    ),
    _Rule(
        exceptions.ChannelLockedResource,
        ConfigError,
        "the queue is exclusive to another connection: {detail}",
    ),
    _Rule(
        (exceptions.ProbableAuthenticationError, exceptions.AuthenticationError),
        BackendUnavailable,
        "RabbitMQ rejected the login: check user and password in the url",
    ),
    _Rule(
        exceptions.ConnectionNotAllowed,
        ConfigError,
        "RabbitMQ does not allow this connection: {detail}",
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
        "RabbitMQ closed the connection after the login: check the vhost in the url and the "
        "permissions of the user on that vhost",
        _closed_at_login,
    ),
    _Rule(
        (exceptions.IncompatibleProtocolError, exceptions.ProtocolSyntaxError),
        ConfigError,
        "the server does not speak AMQP 0-9-1: check the url",
    ),
    _Rule(
        exceptions.MethodNotImplemented,
        ConfigError,
        "this RabbitMQ version does not support the request: {detail}",
    ),
    _Rule(
        (ValueError, TypeError, PAMQPException),
        QueueError,
        "AMQP cannot represent the message or the name: {detail}",
    ),
    _Rule(TimeoutError, BackendUnavailable, "RabbitMQ did not respond in time"),
    _Rule(
        exceptions.AMQPConnectionError,
        BackendUnavailable,
        "the TLS handshake with RabbitMQ failed: {cause}",
        _tls_failed,
    ),
    _Rule(
        (exceptions.AMQPError, OSError, EOFError, RuntimeError),
        BackendUnavailable,
        "the connection to RabbitMQ failed: {detail}",
    ),
    _Rule(asyncio.CancelledError, BackendUnavailable, "the connection to RabbitMQ was closed"),
)


def difference_of(
    error: exceptions.ChannelPreconditionFailed, sent: Mapping[str, object]
) -> Difference | None:
    """Return the argument that made RabbitMQ reject a declaration; ``None`` if not given.

    Args:
        error: Error of the declaration.
        sent: Arguments of the declaration. RabbitMQ reports the type of a value only if it differs
            from the type in the declaration.
    """
    detail = str(error)
    argument = _ARGUMENT.search(detail)
    if argument is None:
        return None
    name = argument["argument"]
    whole = _DIFFERENCE.search(detail)
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


def _precondition(detail: str) -> tuple[type[QueueError], str]:
    found = _DIFFERENCE.search(detail)
    if found is not None:
        return ConfigError, (
            f"the {found['kind']} {found['name']!r} exists with another {found['argument']}: "
            f"{_value(found['there'])} there, {_value(found['here'])} here. Use the same value "
            f"in all programs, or delete the {found['kind']} first"
        )
    if "message size" in detail:
        return PayloadTooLarge, f"the message is larger than RabbitMQ allows ({detail})"
    if "timed out" in detail:
        return BackendUnavailable, (
            "RabbitMQ closed the channel: a delivery was not settled within its consumer_timeout; "
            "increase consumer_timeout, or keep handlers shorter"
        )
    return ConfigError, f"RabbitMQ rejected the request: {detail}"


def _value(text: str) -> str:
    found = _VALUE.fullmatch(text.strip())
    return found[1] if found else text.strip()


translate_errors: Final = ErrorTranslator(
    BACKEND, DRIVER_ERRORS, _meaning, is_driver_cancellation=cancelled_by_driver
)
to_queue_error: Final = translate_errors.error
