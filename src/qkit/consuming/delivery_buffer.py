"""``DeliveryBuffer``: deliveries between the fetcher and the workers of a session.

With key lanes, deliveries with the same key are handled in order: each becomes ready when the
previous one is finished. The buffer can also hold all deliveries back, and make them ready again
one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from qkit.backend import Delivery
from qkit.consuming.job import Job

__all__ = ["DeliveryBuffer"]


class DeliveryBuffer:
    """Deliveries of one subscription: waiting for a worker, running, or being settled.

    It is faster than ``asyncio.Queue``, supports lanes and can withdraw deliveries.

    Args:
        lanes: Keep deliveries with the same key in order.
        on_empty: Called when the last ready delivery has been taken. Default: none.

    Attributes:
        on_empty: Called when the last ready delivery has been taken.
        held: All unsettled deliveries.
        ready: The deliveries that a worker may take.
        closed: Whether ``close`` was called.
    """

    def __init__(self, *, lanes: bool, on_empty: Callable[[], object] = lambda: None) -> None:
        self.held: set[Job] = set()
        self.on_empty: Callable[[], object] = on_empty
        self.ready: deque[Job] = deque()
        self._partial_batches: list[list[Job]] = []
        self._on_hold: deque[Job] | None = None  # the jobs held back, which would be ready
        self._probing = False  # whether one job at a time is made ready
        self._probe: Job | None = None  # the job that was made ready as a probe
        # The first job of a lane is ready, on hold, running or withdrawn; the others wait until it
        # finishes.
        self._lanes: dict[str, deque[Job]] | None = {} if lanes else None
        self._parked: deque[asyncio.Future[None]] = deque()  # workers waiting for a delivery
        self._loop = asyncio.get_running_loop()
        self.closed: bool = False

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries and wake workers for those that are ready."""
        ready: list[Job] = []
        for delivery in deliveries:
            job = Job(delivery)
            self.held.add(job)
            if self._lanes is None or self._is_lane_head(job):
                ready.append(job)
        self._make_ready(ready)

    def _is_lane_head(self, job: Job) -> bool:
        """Add a job to the lane of its key; return whether the job is first or has no key."""
        key = job.delivery.envelope.key
        if self._lanes is None or key is None:
            return True
        lane = self._lanes.setdefault(key, deque())
        lane.append(job)
        return len(lane) == 1

    def pop(self) -> Job | None:
        """Return the next ready delivery, or ``None``."""
        if not self.ready:
            return None
        job = self.ready.popleft()
        if not self.ready:
            self.on_empty()
        return job

    async def wait(self) -> None:
        """Wait until a delivery may be ready or the buffer is closed."""
        parked = self._loop.create_future()
        self._parked.append(parked)
        try:
            await parked
        except asyncio.CancelledError:
            if parked.done() and not parked.cancelled():
                self._wake()  # this worker was woken for a delivery: wake another worker
            raise

    async def next(self) -> Job | None:
        """Wait for the next ready delivery; return ``None`` when closed."""
        while (job := self.pop()) is None and not self.closed:
            await self.wait()
        return job

    async def next_batch(self, size: int, wait: float) -> list[Job]:
        """Return up to ``size`` deliveries, collected within ``wait`` seconds of the first.

        Returns an empty list when closed. While a batch is being collected, its deliveries can be
        withdrawn.
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
                # Compare by identity: withdrawn batches are empty, so they are all equal.
                self._partial_batches = [
                    other for other in self._partial_batches if other is not batch
                ]
            if batch:
                return batch
        return []

    def finish(self, job: Job) -> None:
        """Remove a delivery that is settled or lost; make the next one in its lane ready."""
        self.held.discard(job)
        if job is self._probe:
            self._probe = None
            self._admit_probe()
        if self._lanes is None or (key := job.delivery.envelope.key) is None:
            return
        lane = self._lanes.get(key)
        if not lane or lane[0] is not job:
            return  # withdrawn while waiting behind the first job of its lane
        lane.popleft()
        if lane:
            self._make_ready([lane[0]])
        else:
            del self._lanes[key]

    def withdraw(self) -> list[Job]:
        """Remove and return all deliveries that no worker has started; keep them in ``held``."""
        waiting = [*self.ready, *(self._on_hold or ())]
        self.ready.clear()
        if self._on_hold is not None:
            self._on_hold.clear()
        for batch in self._partial_batches:
            waiting += batch
            batch.clear()
        for lane in (self._lanes or {}).values():
            first, *others = lane
            waiting += others
            lane.clear()
            lane.append(first)
        return waiting

    def hold(self) -> None:
        """Hold back all deliveries that no worker has started, until ``probe`` or ``resume``."""
        if self._on_hold is None:
            self._on_hold = deque()
        collected = [job for batch in self._partial_batches for job in batch]
        for batch in self._partial_batches:
            batch.clear()
        self._on_hold.extendleft(reversed([*collected, *self.ready]))
        self.ready.clear()
        self._probing = False
        self._probe = None

    def probe(self) -> None:
        """Make the first delivery ready; each further one when the previous one is finished."""
        if self._on_hold is None:
            self.hold()
        self._probing = True
        if self._probe is None:
            self._admit_probe()

    def resume(self) -> None:
        """Make ready what was held back."""
        jobs, self._on_hold = self._on_hold, None
        self._probing = False
        self._probe = None
        if jobs:
            self._make_ready(list(jobs))

    def put_back(self, job: Job) -> None:
        """Put a job that a worker has taken back to the front; it stays first in its lane."""
        if self._on_hold is not None:
            self._on_hold.appendleft(job)
        else:
            self.ready.appendleft(job)
            self._wake()

    def same_key(self, job: Job) -> list[Job]:
        """Return the unsettled jobs that were delivered to the lane of a job with it.

        The messages of a key return together. If an id occurs again in the lane, the messages were
        delivered again, and the earlier jobs are the ones that the job belongs to.
        """
        key = job.delivery.envelope.key
        lane = self._lanes.get(key) if self._lanes is not None and key is not None else None
        found: list[Job] = []
        ids: set[str] = set()
        for other in lane or ():
            if other.delivery.envelope.id in ids:
                break
            ids.add(other.delivery.envelope.id)
            found.append(other)
        return found if job in found else [job]

    def close(self) -> None:
        """Wake all workers; each ends when no delivery is ready."""
        self.closed = True
        while self._parked:
            self._wake()

    def _make_ready(self, jobs: list[Job]) -> None:
        if self._on_hold is not None:
            self._on_hold.extend(jobs)
            if self._probe is None:
                self._admit_probe()
            return
        self.ready.extend(jobs)
        for _ in range(min(len(jobs), len(self._parked))):
            self._wake()

    def _admit_probe(self) -> None:
        """While probing, make the first delivery on hold ready."""
        if self._probing and self._on_hold:
            self._probe = self._on_hold.popleft()
            self.ready.append(self._probe)
            self._wake()

    def _wake(self) -> None:
        while self._parked:
            parked = self._parked.popleft()
            if not parked.done():
                parked.set_result(None)
                return
