"""``Channel``: the typed name of a queue or topic, and the options that go with it."""

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

CallNext = Callable[[Message], Awaitable[object]]
Middleware = Callable[[Message, CallNext], Awaitable[object]]


class ChannelOptions(TypedDict, total=False):
    """Every option of a channel; one that is left out is the settings' default.

    ``Channel``, ``@channel`` and ``@consume`` take them as keyword arguments.
    """

    broadcast: bool
    """A topic: each message goes to every group, by ``publish`` instead of ``send``."""
    prefetch: int
    """How many unacknowledged messages a consumer may hold."""
    dead_letter: bool
    """Whether final failures are kept in the dead letters."""
    retry: RetrySettings
    """How failed handlers are retried."""
    retry_on: Sequence[type[Exception]]
    """Retry these exceptions only; any other failure is final."""
    dead_on: Sequence[type[Exception]]
    """These exceptions are final at once."""
    ordered: bool
    """Messages of one key are handled one after the other; retries happen inline."""
    ack_deadline: float
    """The lease, in seconds; it is renewed while a handler runs."""
    ttl: float
    """Seconds after which an unhandled message expires, unless its send says otherwise."""
    max_depth: int
    """How many messages the queue holds before a send raises ``QueueFull``."""
    max_priority: int
    """The highest priority."""
    balance: Balance
    """Which of several waiting consumers gets a message: ``round_robin`` (who waited longest, the
    default), ``least_busy`` (who holds least) or ``random``; the last two on ``native`` only."""
    middleware: Sequence[Middleware]
    """Wrapped around each call of the channel's handlers, the first outermost."""


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
    """The typed handle of a queue (each message to one consumer) or topic (``broadcast=True``).

    Sends through it are checked against its type, by type checkers and at run time. It is
    invariant in that type.

    >>> orders = Channel("orders", dict, prefetch=20)
    >>> orders.name, orders.options
    ('orders', {'prefetch': 20})

    Raises ``InvalidName`` for a name that some broker could not carry, and ``ConfigError`` for an
    option that cannot be kept.
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
        self.name = check_name(name)
        self.type = type
        self.options: ChannelOptions = _checked(name, options)
        self.location = caller_location()

    def __repr__(self) -> str:
        of = f", {getattr(self.type, '__name__', self.type)}" if self.type is not None else ""
        return f"Channel({self.name!r}{of})"

    def merge(self, other: Channel[object]) -> Channel[object]:
        """One channel out of two declarations of it; ``ConfigError`` where they contradict."""
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
            return known  # nothing new was said, so that whoever keeps it can tell
        merged = Channel(self.name, **options)  # options that do not go together are refused
        merged.type = known.type if known.type is not None else other.type
        merged.location = self.location
        return merged


def _checked(name: str, given: ChannelOptions) -> ChannelOptions:
    """Return the options with lists made tuples, so that they compare; or raise ``ConfigError``."""
    checked: dict[str, object] = {}
    for option, value in cast("dict[str, object]", given).items():
        problem = _problem(option, value)
        if problem is not None:
            raise ConfigError(f"channel {name!r}: {option}: {problem}")
        checked[option] = tuple(cast("Sequence[object]", value)) if option in _LISTS else value
    result = cast("ChannelOptions", checked)
    retry = result.get("retry")
    # Only an explicit contradiction is refused; by default an ordered channel retries inline.
    explicit = retry is not None and "mode" in retry.model_fields_set
    if result.get("ordered") and explicit and retry and retry.mode == "release":
        raise ConfigError(
            f"channel {name!r}: ordered: retries happen inline, because a message that waits in "
            "the broker lets its successors overtake; drop retry.mode or ordered"
        )
    return result


def _problem(option: str, value: object) -> str | None:
    """Return what is wrong with an option, if anything."""
    if option not in ChannelOptions.__annotations__:
        near = difflib.get_close_matches(
            option, [*ChannelOptions.__annotations__, *_CONSUME_OPTIONS], 1
        )
        known = f"did you mean {near[0]!r}?" if near else "see ChannelOptions for what there is"
        return f"no such option; {known}"
    if option in _RANGES:
        return _range_problem(option, value)
    if option in _LISTS:
        return _list_problem(option, value)
    if option in _FLAGS and not isinstance(value, bool):
        return f"True or False, not {type(value).__name__}"
    if option == "balance" and value not in get_args(Balance):
        return f"one of {', '.join(get_args(Balance))}, not {value!r}"
    if option == "retry" and not isinstance(value, RetrySettings):
        return f"a RetrySettings(…), not {type(value).__name__}"
    return None


def _range_problem(option: str, value: object) -> str | None:
    low, high = _RANGES[option]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"a number, not {type(value).__name__}"
    if option in _INTEGER_OPTIONS and not isinstance(value, int):
        return f"a whole number, not {value!r}"
    if not low <= value <= high:
        upper = f" and at most {high:g}" if high < float("inf") else ""
        return f"{value!r} must be at least {low:g}{upper}"
    return None


def _list_problem(option: str, value: object) -> str | None:
    if isinstance(value, type) or not isinstance(value, Sequence):
        return f"a list, not {value!r}"
    for item in cast("Sequence[object]", value):
        if option == "middleware":
            if not callable(item):
                return f"{item!r} is no async function(message, call_next)"
        elif not (isinstance(item, type) and issubclass(item, Exception)):
            return f"{item!r} is not an exception class"
    return None


def name_of(channel: Channel[T] | str) -> str:
    """The name of what a caller passed for a channel."""
    return channel.name if isinstance(channel, Channel) else channel


def undeclared(name: str, *, broadcast: bool) -> Channel[object]:
    """The channel of a name that no program here declares: only what kind it is, no options."""
    return Channel(name, broadcast=True) if broadcast else Channel(name)


def caller_location() -> str:
    """``file:line`` of the first caller outside qkit, for errors that must name a declaration."""
    frame = inspect.currentframe()  # inspect.stack would read source files: too slow
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("qkit."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
