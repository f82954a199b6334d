"""Acks of one loop iteration in one batch: one frame for all that are contiguous."""

from __future__ import annotations

import contextlib
from typing import Final

from aiormq import Channel

from qkit._internal.coalescer import Coalescer
from qkit.backends.rabbitmq.errors import DRIVER_ERRORS

__all__ = ["AckBatcher"]

#: The largest prefetch that AMQP has.
MAX_UNSETTLED: Final = 65_535


class AckBatcher:
    """Batches acks and requeues of one channel.

    ``multiple`` settles everything up to a tag, so it is used for the tags below which nothing is
    unsettled. Others go one by one, at once: held back, they would take the place of new messages.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._low = 0  # every tag up to this one is settled
        self._settled: set[int] = set()  # beyond that
        self._coalescer: Coalescer[tuple[int, bool]] = Coalescer(
            self._send, max_size=MAX_UNSETTLED, name="qkit rabbitmq settle"
        )

    def ack(self, tag: int) -> None:
        """Acknowledge soon."""
        self._coalescer.post((tag, True))

    def requeue(self, tag: int) -> None:
        """Give back soon."""
        self._coalescer.post((tag, False))

    async def flushed(self) -> None:
        """Wait until everything is on its way."""
        await self._coalescer.drain()

    async def _send(self, group: list[tuple[int, bool]]) -> None:
        acked = {tag for tag, handled in group if handled}
        returned = sorted((tag for tag, handled in group if not handled), reverse=True)
        self._settled.update(acked, returned)
        row = 0  # the last of those in a row that the broker has not heard of
        while self._low + 1 in self._settled:
            self._low += 1
            self._settled.discard(self._low)
            if self._low in acked:
                acked.discard(self._low)
                row = self._low
        with contextlib.suppress(*DRIVER_ERRORS):  # then the broker delivers them again
            for tag in returned:  # before a row that reaches beyond them
                await self._channel.basic_nack(tag, requeue=True, wait=False)
            if row:
                await self._channel.basic_ack(row, multiple=True, wait=False)
            for tag in acked:
                await self._channel.basic_ack(tag, wait=False)
