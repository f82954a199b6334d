"""``GuardedBackend``: backend calls through the circuit breaker, with a deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, TypeVarTuple

from qkit._internal.deadlines import Deadline, DeadlineTimer
from qkit.backend import Backend
from qkit.errors import BackendUnavailable, QueueError, SendTimeout
from qkit.observability.connection_state import ConnectionState, ConnectionTracker
from qkit.sending.circuit_breaker import CircuitBreaker
from qkit.wiring import Wiring

__all__ = ["GuardedBackend"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class GuardedBackend:
    """Backend whose calls are rejected while the circuit is open.

    Each call is recorded once, in the breaker and in the connection state: a failed round trip
    counts as one failure, even if a hundred sends share it.

    Args:
        wiring: Objects shared by all parts of the service.

    Attributes:
        backend: The backend.
        connection: The state of the connection.
        breaker: The circuit breaker.
        timer: The deadline timer of all sends.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.backend: Backend = wiring.backend
        self.connection: ConnectionTracker = wiring.connection
        self.breaker: CircuitBreaker = CircuitBreaker(
            failure_threshold=wiring.settings.breaker.failure_threshold,
            recovery_timeout=wiring.settings.breaker.recovery_timeout,
            clock=wiring.clock,
        )
        self.timer: DeadlineTimer = DeadlineTimer(wiring.settings.send_timeout)

    async def call(
        self,
        deadline: Deadline,
        function: Callable[[*Arguments], Awaitable[R]],
        *arguments: *Arguments,
    ) -> R:
        """Call the backend through the circuit breaker, and record whether the connection works.

        Args:
            deadline: The deadline that the caller has entered.
            function: A method of the backend.
            *arguments: Its arguments.

        Returns:
            The result of the method.

        Raises:
            CircuitOpen: The circuit is open; the backend was not called.
            QueueError: The backend raised it.
        """
        breaker, connection = self.breaker, self.connection
        probe = bool(breaker.failures) and breaker.admit()
        try:
            result = await function(*arguments)
        except BackendUnavailable as error:
            breaker.record_failure(probe=probe)
            connection.record_failure(error)
            raise
        except QueueError:  # the broker responded, so the connection works
            self._record_success()
            raise
        except BaseException:
            if deadline.expired:  # the broker did not respond in time
                breaker.record_failure(probe=probe)
                timeout = TimeoutError(f"no response within {self.timer.seconds:g} s")
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
        """Return the error of a send whose deadline has passed.

        Args:
            failures: The connection failures of its attempts. Default: none.
        """
        return SendTimeout(
            f"no confirmation within {self.timer.seconds:g} s; "
            + (
                f"the connection failed {len(failures)} times, last: {failures[-1].message}"
                if failures
                else "the message may or may not have arrived: send it again if a duplicate "
                "is harmless"
            )
        )
