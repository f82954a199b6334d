"""How the handling of a delivery ended; ``Settlement`` carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from qkit.message import Envelope, Reason, TimeToLiveExpired

__all__ = [
    "ABANDON",
    "DONE",
    "Abandon",
    "Dead",
    "Done",
    "Outcome",
    "Pause",
    "RetryLater",
    "expired_outcome",
]


@dataclass(frozen=True, slots=True)
class Done:
    """The handler returned: acknowledge."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The attempt failed and another follows after ``delay`` seconds."""

    delay: float
    error: Exception


@dataclass(frozen=True, slots=True)
class Dead:
    """The failure is final; ``called`` says whether this delivery reached the handler."""

    reason: Reason
    error: Exception | None
    called: bool = True


@dataclass(frozen=True, slots=True)
class Pause:
    """A dependency is down: give the message back uncharged and rest the channel."""

    delay: float | None
    error: Exception


@dataclass(frozen=True, slots=True)
class Abandon:
    """The handler was stopped before it could finish: give the message back uncharged."""


Outcome = Done | RetryLater | Dead | Pause | Abandon

DONE = Done()
ABANDON = Abandon()


def expired_outcome(envelope: Envelope, now: float) -> Dead | None:
    """Return the outcome of a message whose time to live is over; ``None`` if it is not.

    >>> expired_outcome(Envelope(id="0190", body=b"", expires_at=5.0), 4.0)
    >>> str(expired_outcome(Envelope(id="0190", body=b"", expires_at=5.0), 5.0).reason)
    'TTLExpired'
    """
    if envelope.expires_at is None or envelope.expires_at > now:
        return None
    late = TimeToLiveExpired("the message was not handled within its time to live")
    return Dead(Reason.TTL_EXPIRED, late, called=False)
