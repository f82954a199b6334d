"""``@channel`` and ``@consume``, and the metadata they store.

A decorator only leaves a note on the function or class; nothing is resolved until ``register``,
when every annotation exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """What ``@channel`` stores on a class.

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
        """The metadata of a decorated class, its own or inherited; ``None`` if there is none."""
        note = getattr(target, _QUEUE_ATTRIBUTE, None)
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
    location: str

    @staticmethod
    def of(target: object) -> ConsumeMetadata | None:
        """The metadata of a decorated function or method; ``None`` if there is none."""
        note = getattr(target, _CONSUME_ATTRIBUTE, None)
        return note if isinstance(note, ConsumeMetadata) else None  # a mock has every attribute


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
    if not isinstance(name, str | Channel):
        raise ConfigError(
            f'@channel needs a name: write @channel("orders"), not @channel on {name!r}'
        )
    bound = _channel(name, options)
    location = caller_location()

    def decorate(target: type[C]) -> type[C]:
        if not isinstance(target, type):
            raise ConfigError(
                f"@channel({bound.name!r}) goes on a class, not on {target!r}; "
                f"a function is bound by @consume({bound.name!r})"
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
        return _attach_metadata(
            cast("F", target), ConsumeMetadata(None, None, 1, None, None, 0.5, caller_location())
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
        location=caller_location(),
    )
    return lambda function: _attach_metadata(function, metadata)


def _attach_metadata(function: F, metadata: ConsumeMetadata) -> F:
    # Above @staticmethod or @classmethod: the note goes where it is looked for.
    noted: object = getattr(function, "__func__", function)
    if isinstance(noted, type) or not callable(noted):
        raise ConfigError(f"@consume goes on a function or method, not on {function!r}")
    setattr(noted, _CONSUME_ATTRIBUTE, metadata)
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
