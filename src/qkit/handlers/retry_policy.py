"""``RetryPolicy``: which failures are retried, and after what delay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkit._internal.retry import Backoff
from qkit.errors import Retry

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry rules of a channel.

    Attributes:
        max_attempts: The maximum number of attempts, including the first.
        backoff: The delays between attempts.
        mode: Where a message waits for its retry: ``"release"`` in the broker, ``"inline"`` in the
            consumer.
        retry_on: Exceptions that are retried.
        dead_on: Exceptions that are final at the first failure.

    >>> policy = RetryPolicy(max_attempts=3, backoff=Backoff(initial=1), dead_on=(KeyError,))
    >>> policy.wait(ValueError(), attempt=1), policy.wait(ValueError(), attempt=3)
    (1.0, None)
    >>> policy.wait(KeyError(), attempt=1) is None
    True
    """

    max_attempts: int
    backoff: Backoff
    mode: Literal["release", "inline"] = "release"
    retry_on: tuple[type[Exception], ...] = (Exception,)
    dead_on: tuple[type[Exception], ...] = ()

    def wait(self, error: Exception, *, attempt: int, asked: float | None = None) -> float | None:
        """Return the seconds until the next attempt, or ``None`` if the failure is final.

        Args:
            error: The error of the handler.
            attempt: The attempt that failed, counted from 1.
            asked: A delay that the handler requested; it replaces the backoff.
        """
        if attempt >= self.max_attempts or isinstance(error, self.dead_on):
            return None
        if asked is not None:
            return asked
        # An explicit ``Retry`` is retried even if ``retry_on`` does not list it.
        retryable = isinstance(error, (Retry, *self.retry_on))
        return self.backoff.after(attempt) if retryable else None
