"""``RetryPolicy``: try again and after which delay, or give up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkit._internal.retry import Backoff
from qkit.errors import Retry

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """A channel's answer to a failing handler.

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
        """Seconds until the next attempt, or ``None`` if this failure is final.

        ``asked`` is the delay that the handler itself wants.
        """
        if attempt >= self.max_attempts or isinstance(error, self.dead_on):
            return None
        if asked is not None:
            return asked
        # ``Retry`` is the handler's own word, whatever ``retry_on`` says of accidents.
        again = isinstance(error, (Retry, *self.retry_on))
        return self.backoff.after(attempt) if again else None
