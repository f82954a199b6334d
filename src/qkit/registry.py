"""Decorators, the metadata they store, and the registry that turns both into handlers.

A decorator only leaves a note on the function or class; nothing is resolved until ``register``,
when every annotation exists. There a handler whose parameters cannot be filled is refused.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar, Unpack, cast, get_args, get_origin, overload

from qkit.channels import Channel, ChannelOptions, caller_place
from qkit.errors import ConfigError, HandlerError
from qkit.logs import logger
from qkit.message import Message, check_name

__all__ = [
    "ConsumeMetadata",
    "Handler",
    "Header",
    "ParamMetadata",
    "QueueMetadata",
    "Registry",
    "channel",
    "consume",
]

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C")
T = TypeVar("T")

_QUEUE_NOTE = "__qkit_queue__"
_CONSUME_NOTE = "__qkit_consume__"
MISSING: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Header:
    """Marks a parameter that a header fills: ``tenant: Annotated[str, Header("tenant")]``.

    Without a name it is the parameter's, with ``-`` for ``_``. The annotated type converts it.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class QueueMetadata:
    """What ``@channel`` stores on a class.

    >>> @channel("orders", prefetch=20)
    ... class Orders: ...
    >>> QueueMetadata.of(Orders).channel
    Channel('orders')
    """

    channel: Channel[object]
    owner: str
    place: str

    @staticmethod
    def of(target: type) -> QueueMetadata | None:
        """The metadata of a decorated class, its own or inherited; ``None`` if there is none."""
        note = getattr(target, _QUEUE_NOTE, None)
        return note if isinstance(note, QueueMetadata) else None


@dataclass(frozen=True, slots=True)
class ConsumeMetadata:
    """What ``@consume`` stores on a function or method.

    >>> @consume("audit", concurrency=4)
    ... def audit(entry: dict) -> None: ...
    >>> ConsumeMetadata.of(audit).concurrency
    4
    """

    channel: Channel[object] | None
    group: str | None
    concurrency: int
    timeout: float | None
    batch_size: int | None
    batch_wait: float
    place: str

    @staticmethod
    def of(target: object) -> ConsumeMetadata | None:
        """The metadata of a decorated function or method; ``None`` if there is none."""
        note = getattr(target, _CONSUME_NOTE, None)
        return note if isinstance(note, ConsumeMetadata) else None  # a mock has every attribute


@dataclass(frozen=True, slots=True)
class ParamMetadata:
    """How one parameter of a handler is filled: from the body, the message, or a header."""

    name: str
    kind: Literal["body", "message", "header"]
    type: object
    keyword_only: bool = False
    header: str | None = None
    default: object = field(default=MISSING)


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered handler: what it consumes, how it is called, and with what."""

    name: str
    channel: str
    group: str
    call: Callable[..., object]
    is_async: bool
    params: tuple[ParamMetadata, ...]
    metadata: ConsumeMetadata

    @property
    def body(self) -> ParamMetadata | None:
        """The parameter that takes the body, if there is one."""
        return next((param for param in self.params if param.kind == "body"), None)

    @property
    def body_type(self) -> object:
        """The type of one message's body; ``object`` where the handler does not ask for it."""
        if self.body is None:
            return object
        if self.metadata.batch_size is not None:
            return (*get_args(self.body.type), object)[0]
        return self.body.type


def channel(
    name: str | Channel[T], /, **options: Unpack[ChannelOptions]
) -> Callable[[type[C]], type[C]]:
    """Bind a class to a channel: its ``@consume`` methods handle what is sent there.

    >>> @channel("orders", prefetch=20, dead_letter=True)
    ... class Orders:
    ...     @consume(concurrency=8)
    ...     async def place(self, order: dict) -> None: ...

    Raises ``InvalidName`` and ``ConfigError`` as ``Channel`` does.
    """
    bound = _channel(name, options)
    place = caller_place()

    def decorate(target: type[C]) -> type[C]:
        if not isinstance(target, type):
            raise ConfigError(
                f"@channel({bound.name!r}) goes on a class, not on {target!r}; "
                f"a function is bound by @consume({bound.name!r})"
            )
        setattr(target, _QUEUE_NOTE, QueueMetadata(bound, target.__qualname__, place))
        return target

    return decorate


@overload
def consume(target: F, /) -> F: ...
@overload
def consume(
    target: str | Channel[T] | None = None,
    /,
    *,
    group: str | None = None,
    concurrency: int = 1,
    timeout: float | None = None,
    batch_size: int | None = None,
    batch_wait: float = 0.5,
    **options: Unpack[ChannelOptions],
) -> Callable[[F], F]: ...
def consume(
    target: object = None,
    /,
    *,
    group: str | None = None,
    concurrency: int = 1,
    timeout: float | None = None,
    batch_size: int | None = None,
    batch_wait: float = 0.5,
    **options: Unpack[ChannelOptions],
) -> F | Callable[[F], F]:
    """Make a function, or a method of a ``@channel`` class, a handler; its signature stays.

    ``group`` is its share of a topic (default: its qualified name), ``concurrency`` how many
    calls run at once in this process, ``timeout`` the seconds after which a call has failed.
    With ``batch_size`` it takes a ``list[…]`` of that many messages, or of those that came within
    ``batch_wait`` seconds. A channel's options may be given beside its name.

    >>> @consume("audit", concurrency=4, dead_letter=False)
    ... async def audit(entry: dict) -> None: ...

    Raises ``ConfigError`` for values that cannot work.
    """
    if target is not None and not isinstance(target, str | Channel):
        return _note(
            cast("F", target), ConsumeMetadata(None, None, 1, None, None, 0.5, caller_place())
        )
    name = cast("str | Channel[object] | None", target)
    if name is None and options:
        raise ConfigError(
            f"@consume({', '.join(options)}=…) sets options of a channel but names none; give "
            "them to @channel on the class, or name the channel"
        )
    _check("concurrency", concurrency, int, 1, 10_000)
    _check("timeout", timeout, float, 0.001, None)
    _check("batch_size", batch_size, int, 1, 1000)
    _check("batch_wait", batch_wait, float, 0, 3600)
    metadata = ConsumeMetadata(
        channel=None if name is None else _channel(name, options),
        group=None if group is None else check_name(group, "group"),
        concurrency=concurrency,
        timeout=timeout,
        batch_size=batch_size,
        batch_wait=batch_wait,
        place=caller_place(),
    )
    return lambda function: _note(function, metadata)


def _note(function: F, metadata: ConsumeMetadata) -> F:
    # Above @staticmethod or @classmethod: the note goes where it is looked for.
    noted: object = getattr(function, "__func__", function)
    if isinstance(noted, type) or not callable(noted):
        raise ConfigError(f"@consume goes on a function or method, not on {function!r}")
    setattr(noted, _CONSUME_NOTE, metadata)
    return function


def _channel(name: str | Channel[T], options: ChannelOptions) -> Channel[object]:
    if not isinstance(name, Channel):
        return Channel(name, **options)
    if options:
        raise ConfigError(
            f"{name!r} is given together with {', '.join(options)}; a Channel carries its options"
        )
    return cast("Channel[object]", name)


def _check(name: str, value: object, kind: type, low: float, high: float | None) -> None:
    if value is None:
        return
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        word = "a number" if kind is float else "a whole number"
        raise ConfigError(f"@consume({name}={value!r}): {name} is {word}")
    if not value >= low or (high is not None and value > high):  # nan is refused too
        limit = f"at least {low:g}" + (f" and at most {high:g}" if high is not None else "")
        raise ConfigError(f"@consume({name}={value!r}): {name} is {limit}")


class Registry:
    """Channels by name and handlers by (channel, group), merged and checked."""

    def __init__(self) -> None:
        self.channels: dict[str, Channel[object]] = {}
        self.handlers: list[Handler] = []

    def declare(self, declared: Channel[object]) -> Channel[object]:
        """Add a channel, or merge it with what is known of it."""
        known = self.channels.get(declared.name)
        self.channels[declared.name] = declared if known is None else known.merge(declared)
        return self.channels[declared.name]

    def add(self, target: object) -> list[Handler]:
        """Register an instance of a decorated class, a function, or a module of them.

        All or nothing: when one handler is refused, none of ``target``'s is kept.
        """
        channels, handlers = dict(self.channels), list(self.handlers)
        try:
            added = [self._add(*found) for found in _found(target)]
        except Exception:
            self.channels, self.handlers = channels, handlers
            raise
        return added

    def body_type(self, name: str) -> object | None:
        """The type that sends to a channel are checked against; ``None`` if nothing is known."""
        declared = self.channels.get(name)
        if declared is not None and declared.type is not None:
            return declared.type
        wanted = [handler.body_type for handler in self.handlers if handler.channel == name]
        # Handlers of a topic may each read the body in their own way: then no type is *the* type.
        same = wanted and all(item == wanted[0] for item in wanted)
        return wanted[0] if same and wanted[0] is not object else None

    def _add(
        self, call: Callable[..., object], metadata: ConsumeMetadata, queue: Channel[object] | None
    ) -> Handler:
        name = _name(call)
        bound = metadata.channel or queue
        if bound is None:
            raise ConfigError(
                f"{name} at {metadata.place} consumes no channel: name one in @consume(…), "
                "or put @channel(…) on its class"
            )
        declared = self.declare(bound)
        broadcast = declared.options.get("broadcast", False)
        group = metadata.group or _group_name(name)
        for other in self.handlers:
            if other.channel != declared.name or (broadcast and other.group != group):
                continue
            what = f"group {group!r} of topic" if broadcast else "queue"
            raise ConfigError(
                f"{what} {declared.name!r} has two handlers: {other.name} at "
                f"{other.metadata.place} and {name} at {metadata.place}; raise concurrency "
                "instead, or make it a topic with broadcast=True and two groups"
            )
        handler = Handler(
            name=name,
            channel=declared.name,
            group=group,
            call=call,
            is_async=_is_async(call, name),
            params=_params(call, name, batch=metadata.batch_size is not None),
            metadata=metadata,
        )
        self.handlers.append(handler)
        return handler


_Found = tuple[Callable[..., object], ConsumeMetadata, Channel[object] | None]


def _found(target: object) -> Sequence[_Found]:
    """Every handler inside ``target``, with the channel of its class."""
    if isinstance(target, types.ModuleType):
        found = [item for value in vars(target).values() for item in _module_member(target, value)]
    elif isinstance(target, type):
        raise ConfigError(
            f"{target.__qualname__} is a class: register an instance, "
            f"service.register({target.__qualname__}(…)), so that qkit need not guess its arguments"
        )
    elif (own := ConsumeMetadata.of(target)) is not None and callable(target):
        owner: object = getattr(target, "__self__", None)  # of a bound method
        note = QueueMetadata.of(type(owner))
        found = [(target, own, note.channel if note else None)]
    else:
        found = list(_methods(target))
    if not found:
        raise ConfigError(
            f"{target!r} has no handlers: mark functions or methods with @consume, "
            "then register the function, an instance of the class, or their module"
        )
    return found


def _module_member(module: types.ModuleType, value: object) -> Iterable[_Found]:
    if isinstance(value, type):
        if QueueMetadata.of(value) is not None and value.__module__ == module.__name__:
            logger.warning(
                "%s is a decorated class: registering the module %s takes its functions and "
                "instances; register an instance of the class as well",
                value.__qualname__,
                module.__name__,
            )
        return ()
    own = ConsumeMetadata.of(value)
    if own is not None and callable(value):
        return [(value, own, None)]
    return _methods(value) if QueueMetadata.of(type(value)) is not None else ()


def _methods(instance: object) -> Iterator[_Found]:
    kind = type(instance)
    note = QueueMetadata.of(kind)
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    for name in names:
        function = inspect.getattr_static(kind, name)
        function = getattr(function, "__func__", function)  # a static or class method
        metadata = ConsumeMetadata.of(function)
        if metadata is not None:
            bound = cast("Callable[..., object]", getattr(instance, name))
            yield bound, metadata, note.channel if note else None


def _group_name(qualified: str) -> str:
    """A handler's qualified name as a group's name can be: without ``<locals>`` and the like."""
    return check_name(re.sub(r"[^A-Za-z0-9._-]", "", qualified.replace(".<locals>", "")), "group")


def _layers(call: Callable[..., object]) -> list[Callable[..., object]]:
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


def _name(call: Callable[..., object]) -> str:
    """A handler's qualified name; an address would make another group of it in every process."""
    names = (getattr(layer, "__qualname__", None) for layer in _layers(call))
    return next(name for name in names if isinstance(name, str))


def _is_async(call: Callable[..., object], name: str) -> bool:
    layers = _layers(call)
    if inspect.isasyncgenfunction(layers[-1]) or inspect.isgeneratorfunction(layers[-1]):
        raise HandlerError(f"{name} is a generator: a handler returns, it does not yield")
    # Any of them: an async decorator may wrap a plain function, and a plain one an async.
    return any(inspect.iscoroutinefunction(layer) for layer in layers)


def _params(call: Callable[..., object], name: str, *, batch: bool) -> tuple[ParamMetadata, ...]:
    """How each parameter is filled, or ``HandlerError`` saying which cannot be, and why."""
    try:
        signature = inspect.signature(call)
        hints = typing.get_type_hints(_layers(call)[-1], include_extras=True)
    except Exception as error:  # evaluating an annotation can raise anything
        raise HandlerError(
            f"{name}: its annotations cannot be read: {error}; import the types they name at "
            "run time, not only for type checking"
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
