"""``ConsumerState``: whether a consumer may start handlers now, and how many messages it may hold.

Shared by the consumer, which changes it, and the session, which obeys it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qkit._internal.retry import Backoff
from qkit.consuming.outcome import Pause

__all__ = ["ConsumerState"]

UNAVAILABLE_BACKOFF = Backoff(initial=1.0, multiplier=2.0, maximum=60.0, jitter=0.1)


class ConsumerState:
    """Pause, stop, back-off and probe of one consumer.

    Attributes:
        active: Whether handlers may be started: not stopping, not paused, not backing off.
        limit: How many deliveries may be held: the prefetch, or one while probing.
        probing: Whether one message at a time is handled, after a back-off, until one succeeds.
        stopping: Whether the consumer ends.
        stopped: Set when ``stopping`` is.
        last_poll_at: Wall time at which messages were last asked for.
        on_change: Called after each change; set by the session.
    """

    def __init__(self, prefetch: int) -> None:
        self.active = True
        self.limit = prefetch
        self.probing = False
        self.stopping = False
        self.stopped = asyncio.Event()
        self.last_poll_at: float | None = None
        self.on_change: Callable[[], None] | None = None
        self._prefetch = prefetch
        self._paused = False
        self._backoff_timer: asyncio.TimerHandle | None = None
        self._backoff_delay = 0.0
        self._outages = 0

    @property
    def is_paused(self) -> bool:
        """Whether no handler may be started: paused, or backing off after ``Unavailable``."""
        return self._paused or self._backoff_timer is not None

    def pause(self) -> None:
        """Start no more handlers until ``resume``."""
        self._paused = True
        self._changed()

    def resume(self) -> None:
        """Consume again, also while backing off."""
        self._paused = False
        self._end_backoff()
        self._changed()

    def stop(self) -> None:
        """End: nothing more is fetched or started."""
        self.stopping = True
        self.stopped.set()
        self._end_backoff()
        self._changed()

    def back_off(self, outcome: Pause) -> Pause:
        """Start nothing for a while, because a dependency is down; then probe with one message.

        Returns:
            The outcome with the delay that was chosen.
        """
        delay = outcome.delay
        if self._backoff_timer is None:
            self._outages += 1  # once, however many handlers meet the same outage
            chosen = delay if delay is not None else UNAVAILABLE_BACKOFF.after(self._outages)
            self._backoff_delay = chosen
            if not self.stopping:
                loop = asyncio.get_running_loop()
                self._backoff_timer = loop.call_later(chosen, self._probe)
                self._changed()
        return Pause(delay if delay is not None else self._backoff_delay, outcome.error)

    def probe_succeeded(self) -> None:
        """Consume at full width again."""
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
