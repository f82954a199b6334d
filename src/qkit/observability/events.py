"""Events that a service tells its listeners about: state, retries, dead letters, shutdown.

A listener is a function, or a coroutine function that runs as a task of the service. What it
raises is logged and changes nothing: no part of qkit's work hangs on a listener.
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
    """``state_change``: the connection went from ``old`` to ``new``."""

    old: str
    new: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reconnected:
    """``reconnected``: the connection works again after ``seconds`` without."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Retried:
    """``retry``: attempt number ``attempt`` failed, the next comes in ``delay`` seconds."""

    channel: str
    message_id: str
    attempt: int
    delay: float
    error: Exception


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """``dead_letter``: a message failed for good.

    ``kept`` is false where no queue keeps it, or keeps it no longer because it was full.
    """

    letter: DeadLetter
    kept: bool = True


@dataclass(frozen=True, slots=True)
class ShutDown:
    """``shutdown``: everything is closed. ``abandoned`` handlers did not finish in time."""

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
    """Listeners by event, and the tasks of those that are coroutines."""

    def __init__(self) -> None:
        self._listeners: dict[type, list[Callable[..., object]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on(self, name: EventName, listener: Callable[..., object]) -> None:
        """Call ``listener`` with each event of that name; an unknown name is a ``ValueError``."""
        if name not in _NAMES:
            raise ValueError(f"no event {name!r}: choose from {', '.join(_NAMES)}")
        self._listeners.setdefault(_NAMES[name], []).append(listener)

    def emit(self, event: Event) -> None:
        """Tell every listener; never raises."""
        for listener in tuple(self._listeners.get(type(event), ())):  # one may add another
            try:
                result = listener(event)
            except Exception:
                logger.exception("a listener of %s failed", type(event).__name__)
                continue
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(
                    _guard(cast("Awaitable[object]", result), type(event).__name__)
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def drain(self, timeout: float) -> None:
        """Wait for listeners that are still running, then cancel them."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout)


async def _guard(awaitable: Awaitable[object], name: str) -> None:
    try:
        await awaitable
    except Exception:
        logger.exception("a listener of %s failed", name)
