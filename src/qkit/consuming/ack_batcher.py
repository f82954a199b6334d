"""``AckBatcher``: acks finished deliveries in batches while the workers continue."""

from __future__ import annotations

from collections.abc import Callable

from qkit._internal.coalescer import Coalescer
from qkit._internal.tasks import run_to_completion
from qkit.backend import AckMany
from qkit.consuming.job import Job
from qkit.consuming.settlement import Settlement

__all__ = ["AckBatcher"]

MAX_ACKS = 1_000  # the maximum prefetch of a consumer


class AckBatcher:
    """Batcher of one subscription's acks, with at most one call in flight.

    Until its ack has completed, a job stays held: its lease is renewed and it counts towards the
    prefetch.

    Args:
        subscription: The subscription of the deliveries.
        settlement: Performs the acks.
        held: The held jobs; ``finish`` removes a job from this set.
        finish: Called with each job when its ack has completed.
        name: Name of the task that acks.

    Attributes:
        closed: Whether ``close`` was called.
        add: Adds a job to the next batch.
    """

    def __init__(
        self,
        subscription: AckMany,
        settlement: Settlement,
        held: set[Job],
        finish: Callable[[Job], None],
        name: str,
    ) -> None:
        self.closed: bool = False
        self._subscription = subscription
        self._settlement = settlement
        self._held = held
        self._finish = finish
        self._coalescer = Coalescer(self._flush, max_size=MAX_ACKS, name=name)
        self.add: Callable[[Job], None] = self._coalescer.post

    async def close(self) -> None:
        """Accept no more jobs and wait until all acks have completed."""
        self.closed = True
        await self._coalescer.drain()
        if pending := await self._coalescer.close():  # the task was cancelled before it acked these
            await self._flush(pending)

    async def _flush(self, jobs: list[Job]) -> None:
        """Ack a batch, even if this task is cancelled meanwhile."""
        await run_to_completion(self._acknowledge([job for job in jobs if job in self._held]))

    async def _acknowledge(self, jobs: list[Job]) -> None:
        if jobs:
            await self._settlement.acknowledge(self._subscription, [job.delivery for job in jobs])
        for job in jobs:
            self._finish(job)
