"""``@channel`` and ``@consume``, and the metadata that they store.

A decorator only stores metadata on the function or class. ``register`` resolves the metadata later,
when all annotations can be evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar, Unpack, cast, overload

from qkit._internal.names import check_name
from qkit.errors import ConfigError
from qkit.handlers.channel import Channel, ChannelOptions, caller_location

__all__ = ["ConsumeMetadata", "QueueMetadata", "channel", "consume"]

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C")
T = TypeVar("T")

_QUEUE_ATTRIBUTE = "__qkit_queue__"
_CONSUME_ATTRIBUTE = "__qkit_consume__"


@dataclass(frozen=True, slots=True)
class QueueMetadata:
    """Metadata that ``@channel`` stores on a class.

    Attributes:
        channel: The channel.
        owner: The qualified name of the class.
        location: File and line of the decorator.

    Example:
        >>> from qkit import QueueMetadata, channel
        >>> @channel("orders", prefetch=20)
        ... class Orders: ...
        >>> QueueMetadata.of(Orders).channel
        Channel('orders')
    """

    channel: Channel[object]
    owner: str
    location: str

    @staticmethod
    def of(target: type) -> QueueMetadata | None:
        """Return the metadata of a decorated class, its own or inherited.

        Args:
            target: The class.

        Returns:
            The metadata, or ``None`` if neither the class nor a base class is decorated.

        Example:
            >>> from qkit import QueueMetadata
            >>> QueueMetadata.of(dict) is None
            True
        """
        metadata = getattr(target, _QUEUE_ATTRIBUTE, None)
        return metadata if isinstance(metadata, QueueMetadata) else None


@dataclass(frozen=True, slots=True)
class ConsumeMetadata:
    """Metadata that ``@consume`` stores on a function or method.

    Attributes:
        channel: The channel; ``None`` if ``@channel`` on the class names it.
        group: The group; ``None`` for the qualified name of the handler.
        concurrency: How many calls run concurrently in this process.
        timeout: Seconds after which a call fails; ``None`` for no limit.
        batch_size: The maximum number of messages in a batch; ``None`` for one message per call.
        batch_wait: How many seconds a batch waits to fill up.
        location: File and line of the decorator.

    Example:
        >>> from qkit import ConsumeMetadata, consume
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
    location: str

    @staticmethod
    def of(target: object) -> ConsumeMetadata | None:
        """Return the metadata of a decorated function or method.

        Args:
            target: The function or method; may be any object.

        Returns:
            The metadata, or ``None`` if ``target`` is not decorated.

        Example:
            >>> from qkit import ConsumeMetadata
            >>> ConsumeMetadata.of(print) is None
            True
        """
        metadata = getattr(target, _CONSUME_ATTRIBUTE, None)
        # Check the type, because a mock has every attribute.
        return metadata if isinstance(metadata, ConsumeMetadata) else None


def channel(
    name: str | Channel[T], /, **options: Unpack[ChannelOptions]
) -> Callable[[type[C]], type[C]]:
    """Bind the ``@consume`` methods of a class to a channel.

    Args:
        name: The name of the channel, or a ``Channel``.
        **options: See ``ChannelOptions``. Not allowed with a ``Channel``, which has its own
            options.

    Returns:
        A class decorator.

    Raises:
        InvalidName: The name is not valid on every broker.
        ConfigError: An option is unknown or invalid, or the decorator is not used on a class.

    Example:
        >>> from qkit import channel, consume
        >>> @channel("orders", prefetch=20, dead_letter=True)
        ... class Orders:
        ...     @consume(concurrency=8)
        ...     async def place(self, order: dict) -> None: ...
    """
    if not isinstance(name, str | Channel):
        raise ConfigError(
            f'@channel needs a name: write @channel("orders"); got @channel on {name!r}'
        )
    bound = _channel(name, options)
    location = caller_location()

    def decorate(target: type[C]) -> type[C]:
        if not isinstance(target, type):
            raise ConfigError(
                f"@channel({bound.name!r}): expected a class, got {target!r}; "
                f"use @consume({bound.name!r}) on a function"
            )
        setattr(target, _QUEUE_ATTRIBUTE, QueueMetadata(bound, target.__qualname__, location))
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
    """Mark a function, or a method of a ``@channel`` class, as a handler.

    The function itself does not change: you can still call it directly.

    Args:
        target: The channel or its name. Omit it on a method of a ``@channel`` class.
        group: The group that consumes a topic. Default: the qualified name of the function.
        concurrency: How many calls run concurrently in this process, 1 to 10,000. Default: 1.
        timeout: Seconds after which a call fails. Default: no limit.
        batch_size: Take lists of up to this many messages, 1 to 1000. Default: single messages.
        batch_wait: How many seconds a batch waits to fill up after its first message. Default: 0.5.
        **options: Options of the channel; see ``ChannelOptions``. Only with the name of a channel.

    Returns:
        The function itself, or a decorator if called with arguments.

    Raises:
        InvalidName: The name of the channel or group is not valid on every broker.
        ConfigError: A value is out of range, an option is unknown or invalid, or the function
            already has a different ``@consume`` decorator.

    Example:
        >>> from qkit import consume
        >>> @consume("audit", concurrency=4, dead_letter=False)
        ... async def audit(entry: dict) -> None: ...
    """
    if target is not None and not isinstance(target, str | Channel):
        return _attach_metadata(
            cast("F", target), ConsumeMetadata(None, None, 1, None, None, 0.5, caller_location())
        )
    name = cast("str | Channel[object] | None", target)
    if name is None and options:
        raise ConfigError(
            f"@consume({', '.join(options)}=…) sets options of a channel without naming it; pass "
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
        location=caller_location(),
    )
    return lambda function: _attach_metadata(function, metadata)


def _attach_metadata(function: F, metadata: ConsumeMetadata) -> F:
    # If @consume is above @staticmethod or @classmethod, store the metadata on the wrapped
    # function, where it is looked up.
    target: object = getattr(function, "__func__", function)
    if isinstance(target, type) or not callable(target):
        raise ConfigError(f"@consume: expected a function or method, got {function!r}")
    earlier = ConsumeMetadata.of(target)
    if earlier is not None and not _equal(earlier, metadata):
        raise ConfigError(
            f"{getattr(target, '__qualname__', target)} has two different @consume decorators, at "
            f"{earlier.location} and {metadata.location}; a function handles one channel: write a "
            "second function that calls the first"
        )
    setattr(target, _CONSUME_ATTRIBUTE, metadata)
    return function


def _equal(one: ConsumeMetadata, other: ConsumeMetadata) -> bool:
    """Return whether two decorators mean the same, wherever they are."""

    def key(metadata: ConsumeMetadata) -> tuple[object, ...]:
        named = metadata.channel
        channel = named and (named.name, named.type, named.options)
        return channel, replace(metadata, channel=None, location="")

    return key(one) == key(other)


def _channel(name: str | Channel[T], options: ChannelOptions) -> Channel[object]:
    if not isinstance(name, Channel):
        return Channel(name, **options)
    if options:
        raise ConfigError(
            f"{name!r} cannot be combined with {', '.join(options)}; pass the options to Channel(…)"
        )
    return cast("Channel[object]", name)


def _check(name: str, value: object, kind: type, low: float, high: float | None) -> None:
    if value is None:
        return
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        expected = "a number" if kind is float else "an integer"
        raise ConfigError(f"@consume: {name}: expected {expected}, got {value!r}")
    if not value >= low or (high is not None and value > high):  # also rejects NaN
        limit = f"at least {low:g}" + (f" and at most {high:g}" if high is not None else "")
        raise ConfigError(f"@consume: {name}: must be {limit}, got {value!r}")
