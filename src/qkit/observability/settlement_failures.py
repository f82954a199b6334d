"""Failing settlements of a consumer, which make it unhealthy."""

from __future__ import annotations

from dataclasses import dataclass

from qkit._internal.clock import Clock
from qkit._internal.text import error_text

__all__ = ["SettlementFailures"]

#: A consumer is unhealthy if a settlement has been failing for this long.
UNHEALTHY_AFTER_SECONDS = 10.0
#: A failed settlement that is not retried counts as failing for this long.
FORGET_AFTER_SECONDS = 60.0


@dataclass(slots=True)
class _Failure:
    since: float
    last: float
    text: str
    repeated: bool


class SettlementFailures:
    """Settlements of one consumer that are currently failing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.current: dict[object, _Failure] = {}

    def add(self, what: object, text: str, error: BaseException, *, repeated: bool = True) -> None:
        """Record a failure of a settlement.

        Args:
            what: Identifies the settlement until ``remove``.
            text: Human-readable description of what failed.
            error: Why it failed.
            repeated: Whether the settlement is retried until it succeeds. If not, the failure is
                forgotten one minute after it last occurred. Default: true.
        """
        now = self._clock.monotonic()
        known = self.current.get(what)
        since = now if known is None else known.since
        text = f"{text}: {type(error).__name__}: {error_text(error)}"
        self.current[what] = _Failure(since, now, text, repeated)

    def remove(self, what: object) -> None:
        """Record that a settlement succeeded or is no longer attempted."""
        self.current.pop(what, None)

    def lasting(self) -> str | None:
        """Return the text of a failure that has lasted for ten seconds or longer, or ``None``.

        May be called from any thread.
        """
        now = self._clock.monotonic()
        for failure in list(self.current.values()):
            recent = failure.repeated or now - failure.last < FORGET_AFTER_SECONDS
            if recent and now - failure.since >= UNHEALTHY_AFTER_SECONDS:
                return f"{failure.text} (failing for {now - failure.since:.0f} s)"
        return None
