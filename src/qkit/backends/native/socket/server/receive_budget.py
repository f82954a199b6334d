"""Limit on the memory for data that all clients of the socket have sent and that is in use."""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["TRACKED_BYTES", "BudgetedSession", "ReceiveBudget"]

TRACKED_BYTES: Final = 4096  # smaller parts are not counted, because their number is limited


class BudgetedSession(Protocol):
    """Session whose received data counts towards the budget."""

    def apply_backpressure(self) -> None:
        """Pause or resume reading, depending on ``ReceiveBudget.exceeded``."""
        ...

    def reject(self, reason: str) -> None:
        """Send an error and close the connection."""
        ...


class ReceiveBudget:
    """Bytes of incomplete and running requests, over all connections of a server.

    Above the limit no connection is read until running requests finish. If there are none, the
    data belongs to incomplete requests, and the connection that sent most of it is closed:
    otherwise clients that never complete their requests would block all others.

    Args:
        limit: Maximum number of bytes.

    Attributes:
        sessions: All open sessions; each adds and removes itself.
        exceeded: Whether reading is paused on all connections.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._incomplete: dict[BudgetedSession, int] = {}
        self._running: dict[BudgetedSession, int] = {}
        self.sessions: set[BudgetedSession] = set()
        self.exceeded: bool = False

    def update(self, session: BudgetedSession, incomplete: int, running: int) -> None:
        """Set the number of bytes that a session uses; 0 and 0 when it ends."""
        for table, size in (self._incomplete, incomplete), (self._running, running):
            if size:
                table[session] = size
            else:
                table.pop(session, None)
        self._apply()

    def _apply(self) -> None:
        incomplete, running = sum(self._incomplete.values()), sum(self._running.values())
        exceeded = incomplete + running > self._limit
        if exceeded and not running:
            largest = max(self._incomplete, key=self._incomplete.__getitem__)
            del self._incomplete[largest]
            largest.reject(
                f"the clients of the native directory have sent {incomplete} bytes of incomplete "
                f"requests, and the limit is {self._limit}: send fewer or smaller messages per call"
            )
            self._apply()
        elif exceeded != self.exceeded:
            self.exceeded = exceeded
            for session in tuple(self.sessions):
                session.apply_backpressure()
