"""The registry: channels by name, and the handlers found in what a user registers."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from qkit._internal.logging import logger
from qkit._internal.names import check_name
from qkit.errors import ConfigError
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import ConsumeMetadata, QueueMetadata
from qkit.handlers.signature import ParamMetadata, is_async, qualified_name, resolve_parameters

__all__ = ["Handler", "Registry"]


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


class Registry:
    """Channels by name and handlers by (channel, group), merged and checked.

    Without ``queues`` every channel is a topic, whatever it was declared as.
    """

    def __init__(self, *, queues: bool = True) -> None:
        self._queues = queues
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
            added = [self._add(*found) for found in _find_handlers(target)]
        except Exception:
            self.channels, self.handlers = channels, handlers
            raise
        return added

    def handles(self, channel: str) -> bool:
        """Whether a handler of this registry consumes the channel."""
        return any(handler.channel == channel for handler in self.handlers)

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
        name = qualified_name(call)
        bound = metadata.channel or queue
        if bound is None:
            raise ConfigError(
                f"{name} at {metadata.location} consumes no channel: name one in @consume(…), "
                "or put @channel(…) on its class"
            )
        declared = self.declare(bound)
        broadcast = declared.options.get("broadcast", False) or not self._queues
        group = metadata.group or _group_name(name)
        for other in self.handlers:
            if other.channel != declared.name or (broadcast and other.group != group):
                continue
            if other.call == call:
                raise ConfigError(
                    f"{name} at {metadata.location} is registered twice; once is enough"
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
        self.handlers.append(handler)
        return handler


_Found = tuple[Callable[..., object], ConsumeMetadata, Channel[object] | None]


def _find_handlers(target: object) -> Sequence[_Found]:
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
            f"{target!r} has no handlers: mark functions or methods with @consume, then register "
            "the function, an instance of the class, or their module, one at a time"
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
