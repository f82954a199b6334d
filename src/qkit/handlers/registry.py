"""``Registry``: the channels and handlers of a service."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from qkit._internal.logging import logger
from qkit._internal.names import check_name
from qkit.codec.codec import type_name
from qkit.errors import ConfigError
from qkit.handlers.channel import Channel
from qkit.handlers.compatibility import never_matches
from qkit.handlers.decorators import ConsumeMetadata, QueueMetadata
from qkit.handlers.signature import ParamMetadata, is_async, qualified_name, resolve_parameters

__all__ = ["Handler", "Registry"]


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered handler.

    Attributes:
        name: The qualified name of the function.
        channel: The name of the channel that it consumes.
        group: The group in which it consumes a topic.
        call: The function or bound method.
        is_async: Whether a call must be awaited.
        params: The parameters of the function.
        metadata: The arguments of ``@consume``.

    Example:
        >>> from qkit import QueueService, Settings, consume
        >>> @consume("orders", concurrency=4)
        ... async def place(order: dict) -> None: ...
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(place)
        >>> (handler,) = service.handlers
        >>> handler.name, handler.channel, handler.metadata.concurrency
        ('place', 'orders', 4)
    """

    name: str
    channel: str
    group: str
    call: Callable[..., object]
    is_async: bool
    params: tuple[ParamMetadata, ...]
    metadata: ConsumeMetadata

    @property
    def body(self) -> ParamMetadata | None:
        """The parameter that receives the body, or ``None``.

        Example:
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders")
            ... async def place(order: dict) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> service.handlers[0].body.name
            'order'
        """
        return next((param for param in self.params if param.kind == "body"), None)

    @property
    def body_type(self) -> object:
        """The type of one body, even for a batch; ``object`` if the handler takes no body.

        Example:
            >>> from qkit import QueueService, Settings, consume
            >>> @consume("orders", batch_size=10)
            ... async def place(orders: list[dict]) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> service.handlers[0].body_type
            <class 'dict'>
        """
        if self.body is None:
            return object
        if self.metadata.batch_size is not None:
            return (*get_args(self.body.type), object)[0]
        return self.body.type


class Registry:
    """Channels and handlers of a service, merged and checked.

    Args:
        queues: Whether the backend has queues. Without queues every channel is a topic.

    Attributes:
        channels: The channels by name.
        handlers: The handlers in the order of registration.
    """

    def __init__(self, *, queues: bool = True) -> None:
        self._queues = queues
        self.channels: dict[str, Channel[object]] = {}
        self.handlers: list[Handler] = []
        self._module_classes: list[type] = []  # @channel classes of registered modules

    def declare(self, declared: Channel[object]) -> Channel[object]:
        """Add a channel, or merge it with an earlier declaration; return the result."""
        known = self.channels.get(declared.name)
        merged = declared if known is None else known.merge(declared)
        if known is None or merged.type != known.type:
            for handler in self.handlers:
                if handler.channel == declared.name:
                    _check_body_type(merged, handler)
        self.channels[declared.name] = merged
        return merged

    def add(self, target: object) -> list[Handler]:
        """Register the handlers of a function, an instance or a module.

        If a handler is rejected, no handler is added.
        """
        if isinstance(target, types.ModuleType):
            self._module_classes += _channel_classes(target)
        channels, handlers = dict(self.channels), list(self.handlers)
        try:
            added = [self._add(*found) for found in _find_handlers(target)]
        except Exception:
            self.channels, self.handlers = channels, handlers
            raise
        return added

    def warn_about_classes(self) -> None:
        """Log each ``@channel`` class of a registered module of which no instance is registered.

        Called at the start of the service, because an instance may be registered after its module.
        """
        owners = [getattr(handler.call, "__self__", None) for handler in self.handlers]
        for item in dict.fromkeys(self._module_classes):
            if not any(isinstance(owner, item) for owner in owners):
                logger.warning(
                    "%s is a class and is not registered: registering module %s registers only its "
                    "functions and instances; register an instance of the class as well",
                    item.__qualname__,
                    item.__module__,
                )

    def handles(self, channel: str) -> bool:
        """Return whether a handler of this registry consumes the channel."""
        return any(handler.channel == channel for handler in self.handlers)

    def body_type(self, name: str) -> object | None:
        """Return the type that bodies sent to a channel are checked against, or ``None``."""
        declared = self.channels.get(name)
        if declared is not None and declared.type is not None:
            return declared.type
        body_types = [handler.body_type for handler in self.handlers if handler.channel == name]
        # If the handlers of a topic take different types, there is no type to check against.
        same = body_types and all(item == body_types[0] for item in body_types)
        return body_types[0] if same and body_types[0] is not object else None

    def _add(
        self, call: Callable[..., object], metadata: ConsumeMetadata, queue: Channel[object] | None
    ) -> Handler:
        name = qualified_name(call)
        bound = metadata.channel or queue
        if bound is None:
            raise ConfigError(
                f"{name} at {metadata.location} has no channel: name one in @consume(…), or put "
                "@channel(…) on its class"
            )
        declared = self.declare(bound)
        broadcast = declared.options.get("broadcast", False) or not self._queues
        group = metadata.group or _group_name(name)
        for other in self.handlers:
            if other.channel != declared.name or (broadcast and other.group != group):
                continue
            if other.call == call:
                raise ConfigError(
                    f"{name} at {metadata.location} is registered twice; register it once"
                )
            what = f"group {group!r} of topic" if broadcast else "queue"
            raise ConfigError(
                f"{what} {declared.name!r} has two handlers: {other.name} at "
                f"{other.metadata.location} and {name} at {metadata.location}; raise concurrency "
                "instead, or make it a topic with broadcast=True and two groups"
            )
        handler = Handler(
            name=name,
            channel=declared.name,
            group=group,
            call=call,
            is_async=is_async(call, name),
            params=resolve_parameters(call, name, batch=metadata.batch_size is not None),
            metadata=metadata,
        )
        _check_body_type(declared, handler)
        self.handlers.append(handler)
        return handler


_Found = tuple[Callable[..., object], ConsumeMetadata, Channel[object] | None]


def _check_body_type(channel: Channel[object], handler: Handler) -> None:
    """Raise ``ConfigError`` if the handler can decode no message of the channel."""
    if channel.type is not None and never_matches(channel.type, handler.body_type):
        raise ConfigError(
            f"{handler.name} at {handler.metadata.location} takes {type_name(handler.body_type)}, "
            f"but {channel!r} at {channel.location} holds {type_name(channel.type)}: no message "
            "could be decoded; use the same type in both places"
        )


def _find_handlers(target: object) -> Sequence[_Found]:
    """Return each handler in ``target`` with its metadata and the channel of its class."""
    if isinstance(target, types.ModuleType):
        found = [item for value in vars(target).values() for item in _module_member(value)]
    elif isinstance(target, type):
        raise ConfigError(
            f"{target.__qualname__} is a class; register an instance: "
            f"service.register({target.__qualname__}(…))"
        )
    elif (own := ConsumeMetadata.of(target)) is not None and callable(target):
        owner: object = getattr(target, "__self__", None)  # of a bound method
        queue = QueueMetadata.of(type(owner))
        found = [(target, own, queue.channel if queue else None)]
    else:
        found = list(_methods(target))
    if not found:
        raise ConfigError(
            f"{target!r} has no handlers: decorate functions or methods with @consume, then "
            "register the function, an instance of the class, or the module, one at a time"
        )
    return found


def _channel_classes(module: types.ModuleType) -> list[type]:
    """Return the ``@channel`` classes that a module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and QueueMetadata.of(value) is not None
        and value.__module__ == module.__name__
    ]


def _module_member(value: object) -> Iterable[_Found]:
    if isinstance(value, type):
        return ()
    own = ConsumeMetadata.of(value)
    if own is not None and callable(value):
        return [(value, own, None)]
    return _methods(value) if QueueMetadata.of(type(value)) is not None else ()


def _methods(instance: object) -> Iterator[_Found]:
    kind = type(instance)
    queue = QueueMetadata.of(kind)
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    for name in names:
        function = inspect.getattr_static(kind, name)
        function = getattr(function, "__func__", function)  # a static or class method
        metadata = ConsumeMetadata.of(function)
        if metadata is not None:
            bound = cast("Callable[..., object]", getattr(instance, name))
            yield bound, metadata, queue.channel if queue else None


def _group_name(qualified: str) -> str:
    """Return a qualified name as a valid group name, for instance without ``<locals>``."""
    return check_name(re.sub(r"[^A-Za-z0-9._-]", "", qualified.replace(".<locals>", "")), "group")
