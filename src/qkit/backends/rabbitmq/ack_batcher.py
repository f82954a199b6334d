"""Batching of acks, so that one frame acknowledges contiguous delivery tags."""

from __future__ import annotations

import contextlib
from typing import Final

from aiormq import Channel

from qkit._internal.coalescer import Coalescer
from qkit.backends.rabbitmq.errors import DRIVER_ERRORS

__all__ = ["AckBatcher"]

#: Largest prefetch that AMQP allows.
MAX_UNSETTLED: Final = 65_535


class AckBatcher:
    """Batcher of one channel's acks and requeues; sends one batch per event loop iteration.

    An AMQP ack with ``multiple`` settles all tags up to the given one, so it is used only if no
    earlier tag is unsettled. Other tags are acknowledged one by one. They are not held back until
    they are contiguous, because unsettled messages count against the prefetch.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._low = 0  # all tags up to this one are settled
        self._settled: set[int] = set()  # settled tags above ``_low``
        self._coalescer: Coalescer[tuple[int, bool]] = Coalescer(
            self._send, max_size=MAX_UNSETTLED, name="qkit rabbitmq settle"
        )

    def ack(self, tag: int) -> None:
        """Acknowledge a delivery in the next batch."""
        self._coalescer.post((tag, True))

    def requeue(self, tag: int) -> None:
        """Return a delivery to its queue in the next batch."""
        self._coalescer.post((tag, False))

    async def flushed(self) -> None:
        """Wait until all acks and requeues are sent."""
        await self._coalescer.drain()

    async def _send(self, group: list[tuple[int, bool]]) -> None:
        acked = {tag for tag, handled in group if handled}
        requeued = sorted((tag for tag, handled in group if not handled), reverse=True)
        self._settled.update(acked, requeued)
        up_to = 0  # last contiguous tag to acknowledge; 0 for none
        while self._low + 1 in self._settled:
            self._low += 1
            self._settled.discard(self._low)
            if self._low in acked:
                acked.discard(self._low)
                up_to = self._low
        with contextlib.suppress(*DRIVER_ERRORS):  # the broker then redelivers the messages
            for tag in requeued:  # before the multiple ack, which would settle them too
                await self._channel.basic_nack(tag, requeue=True, wait=False)
            if up_to:
                await self._channel.basic_ack(up_to, multiple=True, wait=False)
            for tag in acked:
                await self._channel.basic_ack(tag, wait=False)
