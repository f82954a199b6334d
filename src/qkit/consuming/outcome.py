"""How the handling of a delivery ended; ``Settlement`` carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from qkit.message import Reason

__all__ = ["ABANDON", "DONE", "Abandon", "Dead", "Done", "Outcome", "Pause", "RetryLater"]


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
