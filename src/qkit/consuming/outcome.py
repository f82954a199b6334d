"""Outcomes of handling a delivery; ``Settlement`` carries them out."""

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
    """Outcome of a handler that returned: ack the message."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Outcome of a failed attempt: retry after ``delay`` seconds."""

    delay: float
    error: Exception


@dataclass(frozen=True, slots=True)
class Dead:
    """Outcome of a final failure: dead-letter the message.

    ``called`` is false if the handler was not called, for instance because the message expired.
    """

    reason: Reason
    error: Exception | None
    called: bool = True


@dataclass(frozen=True, slots=True)
class Pause:
    """Outcome of ``Unavailable``: release the message, count no attempt and pause the consumer.

    ``delay`` is the requested pause in seconds, or ``None`` for the default backoff.
    """

    delay: float | None
    error: Exception


@dataclass(frozen=True, slots=True)
class Abandon:
    """Outcome of a cancelled handler: release the message and count no attempt."""


Outcome = Done | RetryLater | Dead | Pause | Abandon

DONE = Done()
ABANDON = Abandon()


def expired_outcome(envelope: Envelope, now: float) -> Dead | None:
    """Return the outcome of an expired message; ``None`` if it has not expired.

    >>> expired_outcome(Envelope(id="0190", body=b"", expires_at=5.0), 4.0)
    >>> str(expired_outcome(Envelope(id="0190", body=b"", expires_at=5.0), 5.0).reason)
    'TTLExpired'
    """
    if envelope.expires_at is None or envelope.expires_at > now:
        return None
    error = TimeToLiveExpired("the message was not handled within its time to live")
    return Dead(Reason.TTL_EXPIRED, error, called=False)
