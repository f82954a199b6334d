"""``DeadMessage``: a message that expired or failed for good."""

from __future__ import annotations

from typing import NamedTuple

from qkit.message import LeaseExpired, Reason, TimeToLiveExpired
from qkit.native.queue.stored_message import StoredMessage

__all__ = ["DeadMessage", "LeaseExpired", "TimeToLiveExpired"]


class DeadMessage(NamedTuple):
    """Message that left its queue because it expired or failed for good."""

    message: StoredMessage
    reason: Reason
    error: Exception | None
