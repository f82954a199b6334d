"""Handler signatures: the source of each parameter's value."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, get_args, get_origin

from qkit.errors import HandlerError
from qkit.message import Message

__all__ = ["MISSING", "Header", "ParamMetadata", "is_async", "qualified_name", "resolve_parameters"]

MISSING: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Header:
    """Marker for a handler parameter that receives a header of the message.

    The value is converted to the annotated type. A parameter with a default is optional.

    Attributes:
        name: The name of the header. Default: the name of the parameter, with ``-`` for ``_``.

    Example:
        >>> from typing import Annotated
        >>> from qkit import Header, consume
        >>> @consume("orders")
        ... async def place(order: dict, tenant: Annotated[str, Header("tenant")]) -> None: ...
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class ParamMetadata:
    """A parameter of a handler and the source of its value.

    Attributes:
        name: The name of the parameter.
        kind: ``"body"``, ``"message"`` or ``"header"``.
        type: The annotated type.
        keyword_only: Whether it must be passed by keyword.
        header: The name of the header, if the value comes from a header.
        default: The default; ``inspect.Parameter.empty`` if there is none.

    Example:
        >>> from qkit import QueueService, Settings, consume
        >>> @consume("orders")
        ... async def place(order: dict) -> None: ...
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(place)
        >>> [(param.name, param.kind) for param in service.handlers[0].params]
        [('order', 'body')]
    """

    name: str
    kind: Literal["body", "message", "header"]
    type: object
    keyword_only: bool = False
    header: str | None = None
    default: object = field(default=MISSING)


def _unwrap(call: Callable[..., object]) -> list[Callable[..., object]]:
    """Return ``call`` and everything it wraps (partials, decorators, callable objects)."""
    layers = [call]
    while True:
        last = layers[-1]
        if isinstance(last, functools.partial):
            layers.append(last.func)
        elif callable(wrapped := getattr(last, "__wrapped__", None)):
            layers.append(wrapped)
        elif not inspect.isroutine(last):
            layers.append(type(last).__call__)
        else:
            return layers


def qualified_name(call: Callable[..., object]) -> str:
    """Return a handler's qualified name, the same in every process.

    It becomes the default group, so it must not contain a memory address, as ``repr`` may.
    """
    names = (getattr(layer, "__qualname__", None) for layer in _unwrap(call))
    return next(name for name in names if isinstance(name, str))


def is_async(call: Callable[..., object], name: str) -> bool:
    """Return whether the handler must be awaited; raise ``HandlerError`` for a generator."""
    layers = _unwrap(call)
    if inspect.isasyncgenfunction(layers[-1]) or inspect.isgeneratorfunction(layers[-1]):
        raise HandlerError(f"{name} is a generator; a handler must not yield")
    # Check every layer, because a decorator may be async and the function it wraps not, or vice
    # versa.
    return any(inspect.iscoroutinefunction(layer) for layer in layers)


def resolve_parameters(
    call: Callable[..., object], name: str, *, batch: bool
) -> tuple[ParamMetadata, ...]:
    """Return the handler's parameters, each with the source of its value.

    Raises:
        HandlerError: A parameter has no source, or its annotation cannot be evaluated.
    """
    try:
        signature = inspect.signature(call)
        hints = typing.get_type_hints(_unwrap(call)[-1], include_extras=True)
    except Exception as error:  # evaluating an annotation can raise anything
        raise HandlerError(
            f"{name}: cannot evaluate its annotations: {error}; import the types in its module at "
            "run time (not only under TYPE_CHECKING), and do not define them inside a function"
        ) from error
    params: list[ParamMetadata] = []
    for parameter in signature.parameters.values():
        params.append(_param(parameter, hints.get(parameter.name, object), name, batch=batch))
    bodies = [param.name for param in params if param.kind == "body"]
    if len(bodies) > 1:
        raise HandlerError(
            f"{name}: parameters {bodies[0]!r} and {bodies[1]!r} would both receive the body; "
            f"annotate {bodies[1]!r} as Annotated[…, Header()] if it is a header, or as Message"
        )
    return tuple(params)


def _param(parameter: inspect.Parameter, hint: object, name: str, *, batch: bool) -> ParamMetadata:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise HandlerError(
            f"{name}: parameter {parameter} is variadic; a handler has one parameter for the body "
            "and others annotated as Message or Annotated[…, Header()]"
        )
    keyword_only = parameter.kind is parameter.KEYWORD_ONLY
    if hint == (list[Message] if batch else Message):
        return ParamMetadata(parameter.name, "message", hint, keyword_only)
    if hint == list[Message]:
        raise HandlerError(
            f"{name}: parameter {parameter.name!r} takes many messages; set batch_size, or "
            "annotate it as Message"
        )
    if hint is Message:
        raise HandlerError(
            f"{name}: parameter {parameter.name!r} is a Message, but the handler takes batches; "
            "annotate it as list[Message]"
        )
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        for mark in marks:
            if mark is Header or isinstance(mark, Header):
                if batch:
                    raise HandlerError(
                        f"{name}: parameter {parameter.name!r} is a header, but the handler takes "
                        "batches; take list[Message] and read the headers of each message"
                    )
                given = mark.name if isinstance(mark, Header) else None
                header = given or parameter.name.replace("_", "-")
                others = tuple(other for other in marks if other is not mark)  # constraints
                kind = Annotated[(inner, *others)] if others else inner
                return ParamMetadata(
                    parameter.name, "header", kind, keyword_only, header, parameter.default
                )
    if parameter.default is not MISSING:
        raise HandlerError(
            f"{name}: parameter {parameter.name!r} has a default, so it cannot be the body; "
            "annotate it as Annotated[…, Header()] if it is a header, or remove the default"
        )
    if batch and get_origin(hint) is not list:
        raise HandlerError(
            f"{name}: parameter {parameter.name!r} takes a batch; annotate it as list[…]"
        )
    return ParamMetadata(parameter.name, "body", hint, keyword_only)
