"""``Channel``: the typed name of a queue or topic, with its options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypedDict, TypeVar, Unpack, cast, get_args, overload

from qkit._internal.names import check_name
from qkit.backend import Balance
from qkit.errors import ConfigError
from qkit.message import Message
from qkit.settings.model import RetrySettings

__all__ = [
    "CallNext",
    "Channel",
    "ChannelOptions",
    "Middleware",
    "caller_location",
    "name_of",
    "undeclared",
]

T = TypeVar("T")

#: The next step of a middleware chain: another middleware or the handler.
CallNext = Callable[[Message], Awaitable[object]]
#: An async function ``(message, call_next)`` that wraps a handler call.
Middleware = Callable[[Message, CallNext], Awaitable[object]]


class ChannelOptions(TypedDict, total=False):
    """Options of a channel.

    ``Channel``, ``@channel`` and ``@consume`` take them as keyword arguments. An option that is
    omitted and has no default here takes its value from the settings.

    Attributes:
        broadcast: Make the channel a topic: every group receives a copy of each message. Send with
            ``publish`` instead of ``send``. Default: false.
        prefetch: How many unsettled messages a consumer may hold, from 1 to 1000.
        dead_letter: Store messages that failed for good in the dead-letter queue.
        retry: When failed messages are retried, and how many times. Fields that it does not set
            come from the settings.
        retry_on: Retry only these exceptions; any other failure is final. Default: all.
        dead_on: Exceptions that are final at the first failure. Default: none.
        ordered: Handle messages with the same key one at a time and in order. Retries are inline.
            Default: false.
        ack_deadline: Length of a lease, in seconds. The lease is extended while the handler runs.
        ttl: Seconds from the send until the message expires; a send may override it. Default: no
            expiry.
        max_depth: How many messages the queue holds before a send raises ``QueueFull``. Default: no
            limit.
        max_priority: The highest priority, from 0 to 255.
        balance: Which waiting consumer receives the next message: ``"round_robin"`` (the one that
            has waited longest, the default), ``"least_busy"`` (the one with the fewest messages in
            flight) or ``"random"``. The last two need the native backend.
        middleware: Functions wrapped around each handler call, the first outermost, inside the
            middleware of the service.

    Example:
        >>> from qkit import Channel, ChannelOptions
        >>> options: ChannelOptions = {"prefetch": 20, "ttl": 60.0}
        >>> Channel("orders", **options).options
        {'prefetch': 20, 'ttl': 60.0}
    """

    broadcast: bool
    prefetch: int
    dead_letter: bool
    retry: RetrySettings
    retry_on: Sequence[type[Exception]]
    dead_on: Sequence[type[Exception]]
    ordered: bool
    ack_deadline: float
    ttl: float
    max_depth: int
    max_priority: int
    balance: Balance
    middleware: Sequence[Middleware]


_RANGES: dict[str, tuple[float, float]] = {
    "prefetch": (1, 1000),
    "max_priority": (0, 255),
    "max_depth": (1, float("inf")),
    "ack_deadline": (0.001, 43_200),
    "ttl": (0.001, 1e9),
}
_INTEGER_OPTIONS = ("prefetch", "max_priority", "max_depth")
_CONSUME_OPTIONS = ("group", "concurrency", "timeout", "batch_size", "batch_wait")
_FLAGS = ("broadcast", "dead_letter", "ordered")
_LISTS = ("retry_on", "dead_on", "middleware")


class Channel(Generic[T]):
    """Typed name of a queue, or of a topic if ``broadcast=True``.

    Bodies sent through a channel are checked against its type, by type checkers and at run time.
    The class is invariant in that type.

    Args:
        name: The name: 1 to 200 characters from A-Z, a-z, 0-9, ``.``, ``_`` and ``-``.
        type: The type of the bodies. Default: the type that the handlers take.
        **options: See ``ChannelOptions``.

    Attributes:
        name: The name of the channel.
        type: The type of the bodies, or ``None``.
        options: The options that were given.
        location: File and line of the declaration, for error messages.

    Raises:
        InvalidName: The name is not valid on every broker.
        ConfigError: An option is unknown or invalid.

    Example:
        >>> from qkit import Channel
        >>> orders = Channel("orders", dict, prefetch=20)
        >>> orders.name, orders.options
        ('orders', {'prefetch': 20})
    """

    @overload
    def __init__(
        self: Channel[object], name: str, type: None = None, **options: Unpack[ChannelOptions]
    ) -> None: ...

    @overload
    def __init__(self, name: str, type: type[T], **options: Unpack[ChannelOptions]) -> None: ...

    def __init__(
        self, name: str, type: type[T] | None = None, **options: Unpack[ChannelOptions]
    ) -> None:
        self.name: str = check_name(name)
        self.type = type
        self.options: ChannelOptions = _validated(name, options)
        self.location: str = caller_location()

    def __repr__(self) -> str:
        of = f", {getattr(self.type, '__name__', self.type)}" if self.type is not None else ""
        return f"Channel({self.name!r}{of})"

    def merge(self, other: Channel[object]) -> Channel[object]:
        """Return one channel with the type and options of two declarations.

        Args:
            other: Another declaration of the same name.

        Returns:
            The merged channel; this channel itself if ``other`` adds nothing.

        Raises:
            ConfigError: The declarations contradict each other.

        Example:
            >>> from qkit import Channel
            >>> Channel("orders", prefetch=20).merge(Channel("orders", ttl=60)).options
            {'ttl': 60, 'prefetch': 20}
        """
        mine = {**self.options, "type": self.type}
        theirs = {**other.options, "type": other.type}
        for name in mine.keys() & theirs.keys():
            if None not in (mine[name], theirs[name]) and mine[name] != theirs[name]:
                raise ConfigError(
                    f"channel {self.name!r} is declared twice with different {name}: "
                    f"{mine[name]!r} at {self.location}, {theirs[name]!r} at {other.location}; "
                    "declare one Channel and use it in both places"
                )
        known = cast("Channel[object]", self)
        options = cast("ChannelOptions", {**other.options, **self.options})
        if options == self.options and (self.type is not None or other.type is None):
            return known  # the caller compares by identity to detect changes
        merged = Channel(self.name, **options)  # rejects options that contradict each other
        merged.type = known.type if known.type is not None else other.type
        merged.location = self.location
        return merged


def _validated(name: str, given: ChannelOptions) -> ChannelOptions:
    """Validate the options and return them, with lists as tuples so that they compare equal.

    Raises:
        ConfigError: An option is unknown or invalid, or two options contradict each other.
    """
    checked: dict[str, object] = {}
    for option, value in cast("dict[str, object]", given).items():
        problem = _problem(option, value)
        if problem is not None:
            raise ConfigError(f"channel {name!r}: {option}: {problem}")
        checked[option] = tuple(cast("Sequence[object]", value)) if option in _LISTS else value
    result = cast("ChannelOptions", checked)
    retry = result.get("retry")
    # Only an explicit mode is rejected; by default an ordered channel retries inline.
    explicit = retry is not None and "mode" in retry.model_fields_set
    if result.get("ordered") and explicit and retry and retry.mode == "release":
        raise ConfigError(
            f"channel {name!r}: ordered: retries must be inline, because later messages would "
            "overtake a message that waits in the broker; remove retry.mode or ordered"
        )
    return result


def _problem(option: str, value: object) -> str | None:
    """Return what is wrong with an option, or ``None`` if it is valid."""
    if option not in ChannelOptions.__annotations__:
        near = difflib.get_close_matches(
            option, [*ChannelOptions.__annotations__, *_CONSUME_OPTIONS], 1
        )
        hint = f"did you mean {near[0]!r}?" if near else "see ChannelOptions for the options"
        return f"unknown option; {hint}"
    if option in _RANGES:
        return _range_problem(option, value)
    if option in _LISTS:
        return _list_problem(option, value)
    if option in _FLAGS and not isinstance(value, bool):
        return f"expected True or False, got {type(value).__name__}"
    if option == "balance" and value not in get_args(Balance):
        return f"expected one of {', '.join(get_args(Balance))}, got {value!r}"
    if option == "retry" and not isinstance(value, RetrySettings):
        return f"expected RetrySettings(…), got {type(value).__name__}"
    return None


def _range_problem(option: str, value: object) -> str | None:
    low, high = _RANGES[option]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number, got {type(value).__name__}"
    if option in _INTEGER_OPTIONS and not isinstance(value, int):
        return f"expected an integer, got {value!r}"
    if not low <= value <= high:
        upper = f" and at most {high:g}" if high < float("inf") else ""
        return f"must be at least {low:g}{upper}, got {value!r}"
    return None


def _list_problem(option: str, value: object) -> str | None:
    if isinstance(value, type) or not isinstance(value, Sequence):
        return f"expected a list, got {value!r}"
    for item in cast("Sequence[object]", value):
        if option == "middleware":
            if not callable(item):
                return f"expected an async function(message, call_next), got {item!r}"
        elif not (isinstance(item, type) and issubclass(item, Exception)):
            return f"expected an exception class, got {item!r}"
    return None


def name_of(channel: Channel[T] | str) -> str:
    """Return the name of a channel that is given as a ``Channel`` or by name."""
    return channel.name if isinstance(channel, Channel) else channel


def undeclared(name: str, *, broadcast: bool) -> Channel[object]:
    """Return a channel without options, for a name that this service does not declare."""
    return Channel(name, broadcast=True) if broadcast else Channel(name)


def caller_location() -> str:
    """Return ``file:line`` of the first caller outside qkit, for error messages."""
    frame = inspect.currentframe()  # inspect.stack is too slow: it reads source files
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("qkit."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
