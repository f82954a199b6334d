"""Messages that died in their queue."""

from __future__ import annotations

from typing import NamedTuple

from qkit.message import LeaseExpired, Reason, TimeToLiveExpired
from qkit.native.queue.stored_message import Stored

__all__ = ["Dead", "LeaseExpired", "TimeToLiveExpired"]


class Dead(NamedTuple):
    """A message that left its queue without being handled, for its owner to route."""

    message: Stored
    reason: Reason
    error: Exception | None
