"""``AckBatcher``: acknowledges finished deliveries together, while their workers go on."""

from __future__ import annotations

from collections.abc import Callable

from qkit._internal.coalescer import Coalescer
from qkit._internal.tasks import run_to_completion
from qkit.backend import AckMany
from qkit.consuming.job import Job
from qkit.consuming.settlement import Settlement

__all__ = ["AckBatcher"]

MAX_ACKS = 1_000  # a consumer's prefetch is not larger


class AckBatcher:
    """The acks of one subscription: at most one call in flight, the others in the next one.

    A job stays held, with its lease renewed and its part of the prefetch taken, until its ack
    is through.

    Args:
        subscription: Where the deliveries come from.
        settlement: Carries out the acks.
        held: The jobs that are held; ``finish`` removes one from it.
        finish: Called with each job once its ack is through.
        name: Name of the task.
    """

    def __init__(
        self,
        subscription: AckMany,
        settlement: Settlement,
        held: set[Job],
        finish: Callable[[Job], None],
        name: str,
    ) -> None:
        self.closed = False
        self._subscription = subscription
        self._settlement = settlement
        self._held = held
        self._finish = finish
        self._coalescer = Coalescer(self._flush, max_size=MAX_ACKS, name=name)
        self.add = self._coalescer.post
        """Acknowledge a job soon."""

    async def close(self) -> None:
        """Take no more, and return once all acks are through."""
        self.closed = True
        await self._coalescer.drain()
        if left := await self._coalescer.close():  # its task was cancelled
            await self._flush(left)

    async def _flush(self, jobs: list[Job]) -> None:
        """Acknowledge a group. Cancelled, it still finishes what it began."""
        await run_to_completion(self._acknowledge([job for job in jobs if job in self._held]))

    async def _acknowledge(self, jobs: list[Job]) -> None:
        if jobs:
            await self._settlement.acknowledge(self._subscription, [job.delivery for job in jobs])
        for job in jobs:
            self._finish(job)
