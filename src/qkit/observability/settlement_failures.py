"""Settlements of one consumer that keep failing; a consumer with one is unhealthy."""

from __future__ import annotations

from dataclasses import dataclass

from qkit._internal.clock import Clock
from qkit._internal.text import error_text

__all__ = ["SettlementFailures"]

#: A consumer is unhealthy if a settlement has been failing for so long.
UNHEALTHY_AFTER_SECONDS = 10.0
#: A failed settlement that is not repeated counts for so long: another consumer has the message.
FORGET_AFTER_SECONDS = 60.0


@dataclass(slots=True)
class _Failure:
    since: float
    last: float
    text: str
    repeated: bool


class SettlementFailures:
    """Settlements of one consumer that are failing now, by what is being settled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.current: dict[object, _Failure] = {}

    def add(self, what: object, text: str, error: BaseException, *, repeated: bool = True) -> None:
        """Record that ``what`` failed, again or for the first time.

        Args:
            what: Identifies the settlement until ``remove``.
            text: What failed, for people.
            error: Why.
            repeated: Whether it is tried again until it succeeds. If not, it is forgotten a minute
                after its last failure.
        """
        now = self._clock.monotonic()
        known = self.current.get(what)
        since = now if known is None else known.since
        text = f"{text}: {type(error).__name__}: {error_text(error)}"
        self.current[what] = _Failure(since, now, text, repeated)

    def remove(self, what: object) -> None:
        """Record that ``what`` succeeded, or is not tried any more."""
        self.current.pop(what, None)

    def lasting(self) -> str | None:
        """Return what has been failing for ten seconds or longer. May be called from any thread."""
        now = self._clock.monotonic()
        for failure in list(self.current.values()):
            recent = failure.repeated or now - failure.last < FORGET_AFTER_SECONDS
            if recent and now - failure.since >= UNHEALTHY_AFTER_SECONDS:
                return f"{failure.text} (failing for {now - failure.since:.0f} s)"
        return None
