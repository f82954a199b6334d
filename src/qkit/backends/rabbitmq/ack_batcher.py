"""Acks of one loop iteration in one batch: one frame for all that are contiguous."""

from __future__ import annotations

import asyncio
import contextlib

from aiormq import Channel

from qkit.backends.rabbitmq.errors import DRIVER_ERRORS

__all__ = ["AckBatcher"]


class AckBatcher:
    """Batches acks and requeues of one channel.

    ``multiple`` settles everything up to a tag, so it is used for the tags below which nothing is
    unsettled. Others go one by one, at once: held back, they would take the place of new messages.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._low = 0  # every tag up to this one is settled
        self._settled: set[int] = set()  # beyond that
        self._unsent: set[int] = set()
        self._returned: list[int] = []
        self._task: asyncio.Task[None] | None = None

    def ack(self, tag: int) -> None:
        """Acknowledge soon."""
        self._unsent.add(tag)
        self._note(tag)

    def requeue(self, tag: int) -> None:
        """Give back soon."""
        self._returned.append(tag)
        self._note(tag)

    def _note(self, tag: int) -> None:
        self._settled.add(tag)
        if self._task is None:
            self._task = asyncio.create_task(self._flush(), name="qkit rabbitmq settle")

    async def flushed(self) -> None:
        """Wait until everything is on its way."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def _flush(self) -> None:
        try:
            while self._unsent or self._returned:
                with contextlib.suppress(*DRIVER_ERRORS):  # then the broker delivers them again
                    await self._send()
        finally:
            self._task = None

    async def _send(self) -> None:
        # All of this before the first await: a tag that is given back meanwhile is not in the row.
        returned, self._returned = sorted(self._returned, reverse=True), []
        row = 0  # the last of those in a row that the broker has not heard of
        while self._low + 1 in self._settled:
            self._low += 1
            self._settled.discard(self._low)
            if self._low in self._unsent:
                self._unsent.discard(self._low)
                row = self._low
        unsent, self._unsent = self._unsent, set()
        for tag in returned:  # before a row that reaches beyond them
            await self._channel.basic_nack(tag, requeue=True, wait=False)
        if row:
            await self._channel.basic_ack(row, multiple=True, wait=False)
        for tag in unsent:
            await self._channel.basic_ack(tag, wait=False)
