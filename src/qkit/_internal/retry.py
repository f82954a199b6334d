"""Backoff, and the retry loop of calls that meet a broken connection.

The only module that imports tenacity.
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
    """Exponential waits: ``initial``, times ``multiplier`` after each failure, up to ``maximum``.

    ``jitter`` is a fraction of the wait, added at random: never early, so that a broker under
    repair is not met by everybody at once.

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
        """How long to wait after that many failures in a row."""
        state = tenacity.RetryCallState(retry_object=_RETRY_OBJECT, fn=None, args=(), kwargs={})
        state.attempt_number = max(1, failures)
        return self(state)

    def __call__(self, state: tenacity.RetryCallState) -> float:
        wait = float(self._wait(state))
        return wait + self._uniform(0.0, self._jitter * wait) if self._jitter else wait


_RETRY_OBJECT = tenacity.AsyncRetrying()  # a call state wants one; it is never run


async def retry_while_unavailable(
    call: Callable[[], Awaitable[T]],
    *,
    backoff: Backoff,
    on_failure: Callable[[QueueError], None],
) -> T:
    """Await ``call()`` again and again while the connection fails; the caller sets the deadline.

    An open circuit is not retried: it says itself when to come back. ``on_failure`` is called with
    each failure.
    """

    def again(error: BaseException) -> bool:
        return isinstance(error, BackendUnavailable) and not isinstance(error, CircuitOpen)

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, QueueError):
            on_failure(error)

    retrying = tenacity.AsyncRetrying(
        wait=backoff,
        retry=tenacity.retry_if_exception(again),
        before_sleep=before_sleep,
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError("tenacity neither returned nor raised")  # pragma: no cover
