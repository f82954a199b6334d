"""``Job``: one delivery inside a consumer."""

from __future__ import annotations

import asyncio

from qkit.backend import Delivery

__all__ = ["Job"]


class Job:
    """A delivery on its way through a consumer.

    ``task`` is the worker that runs its handler now, ``thread`` the future of a synchronous
    handler, which may outlive its call, and ``lost`` whether it was taken away: another has it,
    or will.
    """

    task: asyncio.Task[None] | None = None
    thread: asyncio.Future[object] | None = None
    lost = False
    abandoned = False

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery

    @property
    def stopped(self) -> bool:
        """Whether qkit itself cancelled the handler."""
        return self.lost or self.abandoned
