"""``Sent``, the result of a send; below ``errors``, because ``PartialSend`` holds it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sent"]


class Sent(NamedTuple):
    """What a send returns once the broker has confirmed it.

    ``position`` counts the messages ahead at equal or higher priority; it is ``None`` where the
    broker does not know, or the message is delayed.
    """

    message_id: str
    position: int | None = None
