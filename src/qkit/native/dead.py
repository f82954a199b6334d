"""Messages that died in their queue, and the errors that their dead letters record."""

from __future__ import annotations

from typing import NamedTuple

from qkit.message import Reason
from qkit.native.stored import Stored

__all__ = ["Dead", "LeaseExpired", "TimeToLiveExpired"]


class LeaseExpired(Exception):
    """The last delivery that was allowed ended without an answer. Recorded, never raised."""


class TimeToLiveExpired(Exception):
    """The message was not delivered within its time to live. Recorded, never raised."""


class Dead(NamedTuple):
    """A message that left its queue without being handled, for its owner to route."""

    message: Stored
    reason: Reason
    error: Exception | None
