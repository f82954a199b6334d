"""``Job``: one delivery inside a consumer."""

from __future__ import annotations

import asyncio

from qkit.backend import Delivery
from qkit.message import Message

__all__ = ["Job"]


class Job:
    """A delivery inside a consumer.

    Attributes:
        delivery: What was received.
        task: The worker that runs its handler now.
        thread: The future of a synchronous handler, which may outlive its call.
        message: What the handler gets beside the body; of a member of a batch only.
        body: The decoded body; of a member of a batch only.
        lost: Whether it was taken away: another consumer has it, or will.
        abandoned: Whether its handler was cancelled because the consumer ends.
        stopped: Whether qkit itself cancelled the handler, since the job is lost or abandoned.
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
