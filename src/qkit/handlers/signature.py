"""A handler's signature: what each parameter is filled from, or why it cannot be."""

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
    """Marks a parameter that a header fills: ``tenant: Annotated[str, Header("tenant")]``.

    Without a name it is the parameter's, with ``-`` for ``_``. The annotated type converts it.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class ParamMetadata:
    """How one parameter of a handler is filled: from the body, the message, or a header."""

    name: str
    kind: Literal["body", "message", "header"]
    type: object
    keyword_only: bool = False
    header: str | None = None
    default: object = field(default=MISSING)


def _unwrap(call: Callable[..., object]) -> list[Callable[..., object]]:
    """``call`` and what is behind it: partials, decorators, callable objects, to the function."""
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
    """A handler's qualified name; an address would make another group of it in every process."""
    names = (getattr(layer, "__qualname__", None) for layer in _unwrap(call))
    return next(name for name in names if isinstance(name, str))


def is_async(call: Callable[..., object], name: str) -> bool:
    """Whether a call must be awaited; ``HandlerError`` for a generator."""
    layers = _unwrap(call)
    if inspect.isasyncgenfunction(layers[-1]) or inspect.isgeneratorfunction(layers[-1]):
        raise HandlerError(f"{name} is a generator: a handler returns, it does not yield")
    # Any of them: an async decorator may wrap a plain function, and a plain one an async.
    return any(inspect.iscoroutinefunction(layer) for layer in layers)


def resolve_parameters(
    call: Callable[..., object], name: str, *, batch: bool
) -> tuple[ParamMetadata, ...]:
    """How each parameter is filled, or ``HandlerError`` saying which cannot be, and why."""
    try:
        signature = inspect.signature(call)
        hints = typing.get_type_hints(_unwrap(call)[-1], include_extras=True)
    except Exception as error:  # evaluating an annotation can raise anything
        raise HandlerError(
            f"{name}: its annotations cannot be read: {error}; the types they name must be known "
            "in its module at run time: import them there, and define none inside a function"
        ) from error
    params: list[ParamMetadata] = []
    for parameter in signature.parameters.values():
        params.append(_param(parameter, hints.get(parameter.name, object), name, batch=batch))
    bodies = [param.name for param in params if param.kind == "body"]
    if len(bodies) > 1:
        raise HandlerError(
            f"{name}: parameters {bodies[0]!r} and {bodies[1]!r} would both take the body; "
            f"annotate {bodies[1]!r} as Annotated[…, Header()] if it is a header, or as Message"
        )
    return tuple(params)


def _param(parameter: inspect.Parameter, hint: object, name: str, *, batch: bool) -> ParamMetadata:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise HandlerError(
            f"{name}: parameter {parameter} takes any number of arguments; a handler has one "
            "parameter for the body, and others annotated as Message or Annotated[…, Header()]"
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
            f"{name}: parameter {parameter.name!r} is one Message, but the handler takes batches; "
            "annotate it as list[Message]"
        )
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        for mark in marks:
            if mark is Header or isinstance(mark, Header):
                if batch:
                    raise HandlerError(
                        f"{name}: parameter {parameter.name!r} is a header, but a batch has the "
                        "headers of many messages; take list[Message] and read them there"
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
            f"{name}: parameter {parameter.name!r} has a default, so it is not the body; annotate "
            "it as Annotated[…, Header()] if a header fills it, or drop it"
        )
    if batch and get_origin(hint) is not list:
        raise HandlerError(
            f"{name}: parameter {parameter.name!r} takes a batch; annotate it as list[…]"
        )
    return ParamMetadata(parameter.name, "body", hint, keyword_only)
