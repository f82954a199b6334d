"""A circuit breaker: after too many connection failures in a row, stop trying for a while.

It counts connection failures only. A queue that is full or a message that is too large says
nothing about the connection, and handlers never touch it: an outage must not burn redeliveries.
"""

from __future__ import annotations

from enum import StrEnum

from qkit._internal.clock import Clock
from qkit.errors import CircuitOpen

__all__ = ["BreakerState", "CircuitBreaker"]


class BreakerState(StrEnum):
    """Closed lets calls through, open refuses them, half-open lets one probe through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Counts consecutive failures; opens at ``failure_threshold`` for ``recovery_timeout`` seconds.

    Call ``admit`` before each try and ``record_success``, ``record_failure`` or ``release_probe``
    after it, with what ``admit`` said: a try that began before the circuit opened may end while
    another one probes.
    """

    def __init__(self, *, failure_threshold: int, recovery_timeout: float, clock: Clock) -> None:
        self._threshold = failure_threshold
        self._recovery = recovery_timeout
        self._clock = clock
        self.failures = 0  # in a row; while there are none, the circuit is closed
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """Where the circuit stands now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        rested = self._clock.monotonic() - self._opened_at >= self._recovery
        return BreakerState.HALF_OPEN if rested else BreakerState.OPEN

    def check(self) -> None:
        """Raise ``CircuitOpen`` if ``admit`` would; takes no probe."""
        if self._opened_at is None:
            return
        if self.state is BreakerState.OPEN:
            left = self._opened_at + self._recovery - self._clock.monotonic()
            raise CircuitOpen(
                f"the circuit is open after {self.failures} connection failures in a row; "
                f"it lets a probe through in {left:.1f} s"
            )
        if self._probing:
            raise CircuitOpen("the circuit is half open and another call is probing; try again")

    def admit(self) -> bool:
        """Pass, or raise ``CircuitOpen``; in half-open one caller passes: the probe, hence true."""
        if self._opened_at is None:
            return False
        self.check()
        self._probing = True
        return True

    def record_success(self) -> None:
        """The connection works: close the circuit."""
        self.failures = 0
        self._opened_at = None
        self._probing = False

    def record_failure(self, *, probe: bool) -> None:
        """The connection failed: count it, and open at the threshold or after a failed probe."""
        self.failures += 1
        if probe if self._opened_at is not None else self.failures >= self._threshold:
            self._opened_at = self._clock.monotonic()
        self.release_probe(probe=probe)

    def release_probe(self, *, probe: bool) -> None:
        """The try ended without telling anything about the connection (it was cancelled)."""
        if probe:
            self._probing = False
