"""Acknowledges what handlers have done while they go on with the next: all that waits, together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qkit._internal.tasks import to_its_end
from qkit.backend import AckMany
from qkit.consuming.job import Job
from qkit.consuming.settlement import Settlement

__all__ = ["Acknowledger"]


class Acknowledger:
    """The acks of one subscription. While some are under way the next ones gather.

    A job stays held, its lease renewed and its slot of the prefetch taken, until its ack is
    through; ``finish`` hears of it then.
    """

    def __init__(
        self, subscription: AckMany, settlement: Settlement, finish: Callable[[Job], None]
    ) -> None:
        self._subscription = subscription
        self._settlement = settlement
        self._finish = finish
        self._waiting: list[Job] = []
        self._closed = False
        self._wake = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    def add(self, job: Job) -> None:
        """Its handler is done."""
        self._waiting.append(job)
        self._wake.set()

    def close(self) -> None:
        """No more will come; ``run`` returns once all are through."""
        self._closed = True
        self._wake.set()

    async def run(self) -> None:
        """Acknowledge until closed. Cancelled, it still sees to the acks that it was given."""
        try:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await to_its_end(self._acknowledge())
        finally:
            self._closed = True
            if self._waiting:
                await self._acknowledge()

    async def _acknowledge(self) -> None:
        jobs, self._waiting = self._waiting, []
        await self._settlement.acknowledge(self._subscription, [job.delivery for job in jobs])
        for job in jobs:
            self._finish(job)
