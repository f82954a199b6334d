"""Messages that died in their queue."""

from __future__ import annotations

from typing import NamedTuple

from qkit.message import LeaseExpired, Reason, TimeToLiveExpired
from qkit.native.queue.stored_message import StoredMessage

__all__ = ["DeadMessage", "LeaseExpired", "TimeToLiveExpired"]


class DeadMessage(NamedTuple):
    """A message that left its queue without being handled, for its owner to route."""

    message: StoredMessage
    reason: Reason
    error: Exception | None
