"""``Job``: one delivery inside a consumer."""

from __future__ import annotations

import asyncio

from qkit.backend import Delivery
from qkit.message import Message

__all__ = ["Job"]


class Job:
    """A delivery inside a consumer.

    Attributes:
        delivery: The delivery.
        task: The worker task that is running the handler, or ``None``.
        thread: The future of a synchronous handler's thread, which may outlive a cancelled call.
        message: The message for the handler; set only in a batch.
        body: The decoded body; set only in a batch.
        lost: Whether the delivery was lost, so that the message is delivered again.
        abandoned: Whether the handler was cancelled because the consumer is stopping.
        stopped: Whether qkit cancelled the handler, because the job is lost or abandoned.
    """

    task: asyncio.Task[None] | None = None
    thread: asyncio.Future[object] | None = None
    message: Message | None = None
    body: object = None
    lost = False
    abandoned = False
    stopped = False

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
