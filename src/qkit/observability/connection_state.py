"""State of the connection to the broker, derived from the outcome of backend calls."""

from __future__ import annotations

import logging
from enum import StrEnum

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit._internal.text import error_text
from qkit.observability.events import Events, Reconnected, StateChanged

__all__ = ["ConnectionState", "ConnectionTracker"]


class ConnectionState(StrEnum):
    """State of the connection to the broker.

    Attributes:
        DISCONNECTED: Not connected: before the start, or after a connection failure.
        CONNECTING: The service is starting.
        CONNECTED: The broker responds.
        CLOSING: The service is stopping.
        CLOSED: The service has stopped.

    Example:
        >>> from qkit import QueueService, Settings
        >>> QueueService(Settings(type="native")).health_check().connection_state
        <ConnectionState.DISCONNECTED: 'disconnected'>
    """

    DISCONNECTED = "disconnected"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    CLOSING = "closing"
    CLOSED = "closed"


class ConnectionTracker:
    """Tracker of a service's connection state; logs each change and emits events."""

    def __init__(self, events: Events, clock: Clock, backend: str) -> None:
        self.state: ConnectionState = ConnectionState.DISCONNECTED
        self.last_success_at: float | None = None
        self.last_error: str | None = None
        self.disconnected_at: float | None = None
        self._lost_at: float | None = None
        self._events = events
        self._clock = clock
        self._backend = backend

    def record_success(self) -> None:
        """Record that a backend call succeeded."""
        if self.state is ConnectionState.DISCONNECTED:
            self.transition_to(ConnectionState.CONNECTED)

    def record_failure(self, error: BaseException) -> None:
        """Record that a backend call failed because of the connection."""
        self.last_error = f"{type(error).__name__}: {error_text(error)}"
        if self.state is ConnectionState.CONNECTED or self.state is ConnectionState.CONNECTING:
            self.transition_to(ConnectionState.DISCONNECTED)

    def record_message(self) -> None:
        """Record that a message was sent or settled."""
        self.last_success_at = self._clock.time()

    def transition_to(self, new: ConnectionState) -> None:
        """Change the state, log the change and emit its events."""
        old = self.state
        if new is old:
            return
        self.state = new
        error = self.last_error if new is ConnectionState.DISCONNECTED else None
        if new is ConnectionState.DISCONNECTED:
            self.disconnected_at = self._clock.time()
            if old is ConnectionState.CONNECTED:  # otherwise there was no connection to lose
                self._lost_at = self._clock.monotonic()
        logger.log(
            logging.WARNING if error else logging.INFO,
            "connection to %s: %s -> %s",
            self._backend,
            old,
            new,
            extra={"backend": self._backend, "old": str(old), "new": str(new), "error": error},
        )
        self._events.emit(StateChanged(str(old), str(new), error))
        if new is ConnectionState.CONNECTED:
            self.disconnected_at = None
            if self._lost_at is not None:
                self._events.emit(Reconnected(self._clock.monotonic() - self._lost_at))
                self._lost_at = None
