"""``GuardedBackend``: calls of a backend through the circuit breaker, with a deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, TypeVarTuple

from qkit._internal.deadlines import Deadline, DeadlineTimer
from qkit.errors import BackendUnavailable, QueueError, SendTimeout
from qkit.observability.connection_state import ConnectionState
from qkit.sending.circuit_breaker import CircuitBreaker
from qkit.wiring import Wiring

__all__ = ["GuardedBackend"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class GuardedBackend:
    """A backend whose calls are refused while the circuit is open.

    The outcome of each call is recorded once, for the breaker and for the connection's state: a
    hundred sends that share a round trip meet one failure.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.backend = wiring.backend
        self.connection = wiring.connection
        self.breaker = CircuitBreaker(
            failure_threshold=wiring.settings.breaker.failure_threshold,
            recovery_timeout=wiring.settings.breaker.recovery_timeout,
            clock=wiring.clock,
        )
        self.timer = DeadlineTimer(wiring.settings.send_timeout)

    async def call(
        self,
        deadline: Deadline,
        function: Callable[[*Arguments], Awaitable[R]],
        *arguments: *Arguments,
    ) -> R:
        """Call the backend.

        Args:
            deadline: The deadline under which the caller awaits this.
            function: The backend's method.
            arguments: Its arguments.

        Raises:
            CircuitOpen: At once, while the circuit is open.
            QueueError: What the backend raised.
        """
        breaker, connection = self.breaker, self.connection
        probe = bool(breaker.failures) and breaker.admit()
        try:
            result = await function(*arguments)
        except BackendUnavailable as error:
            breaker.record_failure(probe=probe)
            connection.record_failure(error)
            raise
        except QueueError:  # the broker answered: the connection works
            self._record_success()
            raise
        except BaseException:
            if deadline.expired:  # the broker took the message and fell silent
                breaker.record_failure(probe=probe)
                timeout = TimeoutError(f"no answer within {self.timer.seconds:g} s")
                connection.record_failure(timeout)
            else:
                breaker.release_probe(probe=probe)
            raise
        if breaker.failures or connection.state is not ConnectionState.CONNECTED:
            self._record_success()
        return result

    def _record_success(self) -> None:
        self.breaker.record_success()
        self.connection.record_success()

    def timeout_error(self, failures: Sequence[QueueError] = ()) -> SendTimeout:
        """Return the error of a send whose time is up; ``failures`` are those of its attempts."""
        return SendTimeout(
            f"no confirmation within {self.timer.seconds:g} s; "
            + (
                f"the connection failed {len(failures)} times, last: {failures[-1].message}"
                if failures
                else "the message may or may not have arrived: send it again if a duplicate "
                "does no harm"
            )
        )
