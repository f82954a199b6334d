"""Deliveries between the fetcher and the workers: who holds what, whose turn it is, how much fits.

With key lanes, deliveries of one key follow each other: the next is offered when the one before
it is finished.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from qkit.backend import Delivery
from qkit.consuming.job import Job

__all__ = ["DeliveryBuffer"]


class DeliveryBuffer:
    """The deliveries that one subscription holds; ``on_empty`` is called when none is left to take.

    An ``asyncio.Queue`` would cost more for each message and could neither take deliveries back
    nor keep lanes.
    """

    def __init__(self, *, lanes: bool, on_empty: Callable[[], object]) -> None:
        self.held: set[Job] = set()  # every unsettled delivery
        self._on_empty = on_empty
        self.ready: deque[Job] = deque()  # those that a worker may take
        self._partial_batches: list[list[Job]] = []  # batches that are not full yet
        # The first of a lane is offered, running or withdrawn; the others wait for its end.
        self._lanes: dict[str, deque[Job]] | None = {} if lanes else None
        self._parked: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        """Whether workers are to end."""

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Hold these deliveries and offer them to the workers."""
        ready: list[Job] = []
        for delivery in deliveries:
            job = Job(delivery)
            self.held.add(job)
            if self._lanes is None or self._is_lane_head(job):
                ready.append(job)
        self._make_ready(ready)

    def _is_lane_head(self, job: Job) -> bool:
        """Line up in the lane of its key; whether it is the first there, or has no key."""
        key = job.delivery.envelope.key
        if self._lanes is None or key is None:
            return True
        lane = self._lanes.setdefault(key, deque())
        lane.append(job)
        return len(lane) == 1

    def pop(self) -> Job | None:
        """The next delivery to handle, if there is one now."""
        if not self.ready:
            return None
        job = self.ready.popleft()
        if not self.ready:
            self._on_empty()
        return job

    async def wait(self) -> None:
        """Wait until there may be a delivery, or it is closed."""
        parked = self._loop.create_future()
        self._parked.append(parked)
        try:
            await parked
        except asyncio.CancelledError:
            if parked.done() and not parked.cancelled():
                self._wake()  # it was woken for a delivery: pass that on
            raise

    async def next(self) -> Job | None:
        """The next delivery to handle, held back until there is one; ``None`` when closed."""
        while (job := self.pop()) is None and not self.closed:
            await self.wait()
        return job

    async def next_batch(self, size: int, wait: float) -> list[Job]:
        """Up to ``size`` deliveries, gathered for ``wait`` seconds after the first.

        None when closed. While it gathers, its deliveries can be withdrawn.
        """
        while (first := await self.next()) is not None:
            batch = [first]
            self._partial_batches.append(batch)
            try:
                async with asyncio.timeout(wait):
                    while 0 < len(batch) < size and not self.closed:
                        job = self.pop()
                        if job is not None:
                            batch.append(job)
                        else:
                            await self.wait()
            except TimeoutError:
                pass
            finally:
                # By identity: two batches that were both withdrawn are equal.
                self._partial_batches = [
                    other for other in self._partial_batches if other is not batch
                ]
            if batch:
                return batch
        return []

    def finish(self, job: Job) -> None:
        """The delivery is settled, or no longer ours: free its slot, and its lane for the next."""
        self.held.discard(job)
        if self._lanes is None or (key := job.delivery.envelope.key) is None:
            return
        lane = self._lanes.get(key)
        if not lane or lane[0] is not job:
            return  # withdrawn from further back, while the first may still be running
        lane.popleft()
        if lane:
            self._make_ready([lane[0]])
        else:
            del self._lanes[key]

    def withdraw(self) -> list[Job]:
        """Take back, still held, every delivery that no worker has started on."""
        waiting = list(self.ready)
        self.ready.clear()
        for batch in self._partial_batches:
            waiting += batch
            batch.clear()
        for lane in (self._lanes or {}).values():
            first, *others = lane
            waiting += others
            lane.clear()
            lane.append(first)
        return waiting

    def close(self) -> None:
        """Let each worker end once nothing is ready for it."""
        self.closed = True
        while self._parked:
            self._wake()

    def _make_ready(self, jobs: list[Job]) -> None:
        self.ready.extend(jobs)
        for _ in range(min(len(jobs), len(self._parked))):
            self._wake()

    def _wake(self) -> None:
        while self._parked:
            parked = self._parked.popleft()
            if not parked.done():
                parked.set_result(None)
                return
