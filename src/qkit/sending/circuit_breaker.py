"""Circuit breaker for calls to the backend.

It counts only connection failures. Other errors, such as a full queue or a message that is too
large, show that the connection works. Consuming does not use the breaker: an outage must not use up
the attempts of messages.
"""

from __future__ import annotations

from enum import StrEnum

from qkit._internal.clock import Clock
from qkit.errors import CircuitOpen

__all__ = ["BreakerState", "CircuitBreaker"]


class BreakerState(StrEnum):
    """State of a circuit breaker.

    Closed admits all calls, open rejects all calls, half-open admits one trial call.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Breaker that opens after repeated connection failures, then admits a trial call.

    Call ``admit`` before each call and ``record_success``, ``record_failure`` or ``release_probe``
    after it. Pass the result of ``admit`` as ``probe``, because a call that began before the
    circuit opened may end during a trial call.

    Args:
        failure_threshold: How many consecutive failures open the circuit.
        recovery_timeout: Seconds until an open circuit admits a trial call.
        clock: The source of time.

    Attributes:
        failures: Number of consecutive failures. While it is 0, the circuit is closed.
    """

    def __init__(self, *, failure_threshold: int, recovery_timeout: float, clock: Clock) -> None:
        self._threshold = failure_threshold
        self._recovery = recovery_timeout
        self._clock = clock
        self.failures: int = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """Current state of the circuit."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        recovered = self._clock.monotonic() - self._opened_at >= self._recovery
        return BreakerState.HALF_OPEN if recovered else BreakerState.OPEN

    def check(self) -> None:
        """Raise ``CircuitOpen`` if ``admit`` would, without starting a trial call."""
        if self._opened_at is None:
            return
        if self.state is BreakerState.OPEN:
            left = self._opened_at + self._recovery - self._clock.monotonic()
            raise CircuitOpen(
                f"the circuit is open after {self.failures} consecutive connection failures; "
                f"the next trial call is possible in {left:.1f} s"
            )
        if self._probing:
            raise CircuitOpen("the circuit is half-open and a trial call is running; try again")

    def admit(self) -> bool:
        """Admit a call, or raise if the circuit does not allow it.

        Returns:
            Whether the call is the trial call of a half-open circuit.

        Raises:
            CircuitOpen: The circuit is open, or another trial call is running.
        """
        if self._opened_at is None:
            return False
        self.check()
        self._probing = True
        return True

    def record_success(self) -> None:
        """Record that the connection works; close the circuit."""
        self.failures = 0
        self._opened_at = None
        self._probing = False

    def record_failure(self, *, probe: bool) -> None:
        """Record a connection failure; open at the threshold or after a failed trial call."""
        self.failures += 1
        if probe if self._opened_at is not None else self.failures >= self._threshold:
            self._opened_at = self._clock.monotonic()
        self.release_probe(probe=probe)

    def release_probe(self, *, probe: bool) -> None:
        """Record that a call ended without a result, for example by cancellation.

        If it was the trial call, another trial call is allowed.
        """
        if probe:
            self._probing = False
