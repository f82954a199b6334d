"""``ConsumerState``: whether a consumer may start handlers, and how many messages it may hold.

The session reacts to each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qkit._internal.retry import Backoff
from qkit.consuming.outcome import Pause

__all__ = ["ConsumerState"]

UNAVAILABLE_BACKOFF = Backoff(initial=1.0, multiplier=2.0, maximum=60.0, jitter=0.1)


class ConsumerState:
    """State of one consumer: running, paused, backing off, probing or stopping.

    Args:
        prefetch: How many deliveries the consumer may hold.
        ordered: Whether messages with the same key are handled in order.

    Attributes:
        ordered: Whether messages with the same key are handled in order.
        active: Whether handlers may be started; false while stopping, paused or backing off.
        limit: How many deliveries may be held: the prefetch, or one while probing.
        probing: Whether the consumer handles one message at a time after a backoff, until one
            succeeds.
        stopping: Whether the consumer is stopping.
        stopped: Event that is set when ``stopping`` becomes true.
        last_poll_at: Wall time of the last fetch, or ``None``.
        on_change: Called after each change; set by the session.
    """

    def __init__(self, prefetch: int, *, ordered: bool = False) -> None:
        self.ordered: bool = ordered
        self.active: bool = True
        self.limit: int = prefetch
        self.probing: bool = False
        self.stopping: bool = False
        self.stopped: asyncio.Event = asyncio.Event()
        self.last_poll_at: float | None = None
        self.on_change: Callable[[], None] | None = None
        self._prefetch = prefetch
        self._paused = False
        self._resumed = asyncio.Event()  # set unless paused
        self._resumed.set()
        self._backoff_timer: asyncio.TimerHandle | None = None
        self._backoff_delay = 0.0
        self._outages = 0

    @property
    def is_paused(self) -> bool:
        """Whether the consumer is paused, or is backing off after ``Unavailable``."""
        return self._paused or self._backoff_timer is not None

    @property
    def ending(self) -> bool:
        """Whether the subscription must end: the consumer stops, or is ordered and paused.

        An ordered consumer that is paused gives everything back, so that another may continue.
        """
        return self.stopping or (self._paused and self.ordered)

    async def wait_to_subscribe(self) -> None:
        """Wait while an ordered consumer is paused; return at once if it stops."""
        while self.ordered and self._paused and not self.stopping:
            await self._resumed.wait()

    def pause(self) -> None:
        """Stop fetching and starting handlers until ``resume``."""
        self._paused = True
        self._resumed.clear()
        self._changed()

    def resume(self) -> None:
        """Resume consuming, and end a backoff."""
        self._paused = False
        self._resumed.set()
        self._end_backoff()
        self._changed()

    def stop(self) -> None:
        """Permanently stop fetching messages and starting handlers."""
        self.stopping = True
        self.stopped.set()
        self._resumed.set()
        self._end_backoff()
        self._changed()

    def back_off(self, outcome: Pause) -> Pause:
        """Stop starting handlers while a dependency is down, then probe with one message.

        Args:
            outcome: The outcome of the handler, with the delay that it requested.

        Returns:
            The outcome with the delay that applies.
        """
        delay = outcome.delay
        if self._backoff_timer is None:
            self._outages += 1  # count an outage once, even if several handlers report it
            chosen = delay if delay is not None else UNAVAILABLE_BACKOFF.after(self._outages)
            self._backoff_delay = chosen
            if not self.stopping:
                loop = asyncio.get_running_loop()
                self._backoff_timer = loop.call_later(chosen, self._probe)
                self._changed()
        return Pause(delay if delay is not None else self._backoff_delay, outcome.error)

    def probe_succeeded(self) -> None:
        """Stop probing and consume with the full prefetch."""
        self.probing = False
        self._outages = 0
        self._changed()

    def _probe(self) -> None:
        self._backoff_timer = None
        self.probing = True
        self._changed()

    def _end_backoff(self) -> None:
        if self._backoff_timer is not None:
            self._backoff_timer.cancel()
            self._backoff_timer = None

    def _changed(self) -> None:
        self.active = not (self.stopping or self.is_paused)
        self.limit = 1 if self.probing else self._prefetch
        if self.on_change is not None:
            self.on_change()
