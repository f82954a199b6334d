"""Backoff, and retries of calls that fail because the backend is unavailable.

This is the only module that imports tenacity.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from qkit.errors import BackendUnavailable, CircuitOpen, QueueError

__all__ = ["Backoff", "retry_while_unavailable"]

T = TypeVar("T")


class Backoff:
    """Exponentially growing delays.

    Args:
        initial: First delay, in seconds.
        multiplier: Factor from one delay to the next. Default: 2.
        maximum: Longest delay before jitter is added, in seconds. Default: 60.
        jitter: Largest random addition, as a fraction of the delay. It spreads the retries of
            many clients. Default: 0.
        uniform: Returns a random number between its two arguments. Default: ``random.uniform``.

    >>> [Backoff(initial=1, multiplier=2, maximum=5, jitter=0).after(n) for n in (1, 2, 3, 4)]
    [1.0, 2.0, 4.0, 5.0]
    """

    def __init__(
        self,
        *,
        initial: float,
        multiplier: float = 2.0,
        maximum: float = 60.0,
        jitter: float = 0.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._wait = tenacity.wait_exponential(
            multiplier=initial, exp_base=multiplier, max=maximum, min=min(initial, maximum)
        )
        self._jitter = jitter
        self._uniform = uniform

    def after(self, failures: int) -> float:
        """Return the delay in seconds after this many consecutive failures."""
        state = tenacity.RetryCallState(retry_object=_RETRY_OBJECT, fn=None, args=(), kwargs={})
        state.attempt_number = max(1, failures)
        return self(state)

    def __call__(self, state: tenacity.RetryCallState) -> float:
        wait = float(self._wait(state))
        return wait + self._uniform(0.0, self._jitter * wait) if self._jitter else wait


_RETRY_OBJECT = tenacity.AsyncRetrying()  # required by RetryCallState, never run


async def retry_while_unavailable(
    call: Callable[[], Awaitable[T]],
    *,
    backoff: Backoff,
    on_failure: Callable[[QueueError], None],
) -> T:
    """Await ``call()``, and retry it while the backend is unavailable.

    The number of attempts is not limited; the caller sets a deadline.

    Args:
        call: Makes one attempt.
        backoff: Delays between attempts.
        on_failure: Called with the error of each attempt that will be retried.

    Returns:
        The result of the first successful attempt.

    Raises:
        CircuitOpen: The circuit breaker is open. This is not retried, because the breaker decides
            when the next call is allowed.
        QueueError: Any other error that is not ``BackendUnavailable``.
    """

    def is_retryable(error: BaseException) -> bool:
        return isinstance(error, BackendUnavailable) and not isinstance(error, CircuitOpen)

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, QueueError):
            on_failure(error)

    retrying = tenacity.AsyncRetrying(
        wait=backoff,
        retry=tenacity.retry_if_exception(is_retryable),
        before_sleep=before_sleep,
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError("tenacity neither returned nor raised")  # pragma: no cover
