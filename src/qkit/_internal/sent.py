"""``Sent``: the result of a send, in its own module because ``errors`` imports it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sent"]


class Sent(NamedTuple):
    """Result of a confirmed send.

    Attributes:
        message_id: Id of the message.
        position: Number of messages of equal or higher priority ahead of it in the queue; ``None``
            if the broker does not report it or the message is delayed.

    Example:
        >>> from qkit import Settings, SyncQueueService
        >>> with SyncQueueService(Settings(type="native")) as service:
        ...     service.send("orders", {"id": 1}).position
        0
    """

    message_id: str
    position: int | None = None
