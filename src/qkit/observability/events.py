"""Events of a service and their listeners.

A listener is a function, or a coroutine function that runs as a task of the service. Its exceptions
are logged and have no other effect.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, cast

from qkit._internal.logging import logger
from qkit.message import DeadLetter

__all__ = [
    "DeadLettered",
    "Event",
    "EventName",
    "Events",
    "Reconnected",
    "Retried",
    "ShutDown",
    "StateChanged",
]


@dataclass(frozen=True, slots=True)
class StateChanged:
    """Event ``state_change``: the connection state changed.

    Attributes:
        old: Previous state, a value of ``ConnectionState``.
        new: New state, a value of ``ConnectionState``.
        error: Text of the error that caused the change, if any.

    Example:
        >>> from qkit import QueueService, Settings
        >>> def on_change(event: StateChanged) -> None:
        ...     print(event.old, "->", event.new)
        >>> QueueService(Settings(type="native")).on("state_change", on_change)
    """

    old: str
    new: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reconnected:
    """Event ``reconnected``: the connection is restored.

    Attributes:
        seconds: How long the connection was lost, in seconds.

    Example:
        >>> from qkit import QueueService, Settings
        >>> def on_reconnected(event: Reconnected) -> None:
        ...     print(f"reconnected after {event.seconds:.1f} s")
        >>> QueueService(Settings(type="native")).on("reconnected", on_reconnected)
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Retried:
    """Event ``retry``: an attempt failed and the message will be retried.

    Attributes:
        channel: Name of the channel.
        message_id: Id of the message.
        attempt: Number of the failed attempt, counted from 1.
        delay: Seconds until the next attempt.
        error: Exception that the handler raised.

    Example:
        >>> from qkit import QueueService, Settings
        >>> def on_retry(event: Retried) -> None:
        ...     print(event.message_id, "retried in", event.delay, "s")
        >>> QueueService(Settings(type="native")).on("retry", on_retry)
    """

    channel: str
    message_id: str
    attempt: int
    delay: float
    error: Exception


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Event ``dead_letter``: a message failed for good.

    Attributes:
        letter: The dead letter.
        kept: Whether the dead letter is stored. False if the channel has no dead-letter queue, or
            if the letter was dropped because the queue was full.

    Example:
        >>> from qkit import QueueService, Settings
        >>> def on_dead_letter(event: DeadLettered) -> None:
        ...     print(event.letter.channel, event.letter.error)
        >>> QueueService(Settings(type="native")).on("dead_letter", on_dead_letter)
    """

    letter: DeadLetter
    kept: bool = True


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Event ``shutdown``: the service has stopped.

    Attributes:
        abandoned: Number of messages whose handlers were cancelled because they did not finish in
            time.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     service = QueueService(Settings(type="native"))
        ...     service.on("shutdown", lambda event: print(event.abandoned, "abandoned"))
        ...     async with service:
        ...         pass
        >>> asyncio.run(main())
        0 abandoned
    """

    abandoned: int


Event = StateChanged | Reconnected | Retried | DeadLettered | ShutDown
EventName = Literal["state_change", "reconnected", "retry", "dead_letter", "shutdown"]

_NAMES: dict[EventName, type] = {
    "state_change": StateChanged,
    "reconnected": Reconnected,
    "retry": Retried,
    "dead_letter": DeadLettered,
    "shutdown": ShutDown,
}


class Events:
    """Listeners of a service's events, and the tasks of asynchronous listeners."""

    def __init__(self) -> None:
        self._listeners: dict[type, list[Callable[..., object]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on(self, name: EventName, listener: Callable[..., object]) -> None:
        """Register a listener for an event; an unknown name raises ``ValueError``."""
        if name not in _NAMES:
            raise ValueError(f"unknown event {name!r}: choose from {', '.join(_NAMES)}")
        self._listeners.setdefault(_NAMES[name], []).append(listener)

    def emit(self, event: Event) -> None:
        """Call all listeners of an event; log their exceptions."""
        # Iterate over a copy, because a listener may register another one.
        for listener in tuple(self._listeners.get(type(event), ())):
            try:
                result = listener(event)
            except Exception:
                logger.exception("a listener of %s failed", type(event).__name__)
                continue
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(
                    _log_failure(cast("Awaitable[object]", result), type(event).__name__)
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for running listeners, then cancel them."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout)


async def _log_failure(awaitable: Awaitable[object], name: str) -> None:
    try:
        await awaitable
    except Exception:
        logger.exception("a listener of %s failed", name)
