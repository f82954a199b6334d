"""``LeaseRenewal``: timer in the event loop that extends the leases of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from qkit._internal.logging import logger
from qkit.backend import ExtendMany, Subscription
from qkit.consuming.job import Job
from qkit.errors import AckDeadlineExceeded, MessageNotFound, QueueError

__all__ = ["LeaseRenewal"]

RENEWALS_PER_LEASE = 3


class LeaseRenewal:
    """Timer that extends all held leases ``RENEWALS_PER_LEASE`` times per lease length.

    It needs no thread: if the backend runs in the same event loop, a blocked loop also delays
    expiry, and expiry waits for overdue renewals.

    Args:
        subscription: Extends the leases.
        lease: The length of a lease in seconds.
        held: The held jobs.
        on_lost: Called with a job whose lease has expired.
        channel: The name of the channel, for log messages.

    Attributes:
        timer: The timer for the next renewal, or ``None``.
    """

    def __init__(
        self,
        subscription: Subscription,
        lease: float,
        held: set[Job],
        on_lost: Callable[[Job], None],
        channel: str,
    ) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self._subscription = subscription
        self._lease = lease
        self._held = held
        self._on_lost = on_lost
        self._channel = channel
        self._due = asyncio.Event()

    def schedule(self) -> None:
        """Start the timer for the next renewal. An idle consumer has no timer."""
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(self._lease / RENEWALS_PER_LEASE, self._due.set)

    async def run(self) -> None:
        """Renew leases until cancelled."""
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                await self._renew([job for job in self._held if not job.lost])
                self.timer = None
                if self._held:
                    self.schedule()
        finally:
            if self.timer is not None:
                self.timer.cancel()

    async def _renew(self, jobs: list[Job]) -> None:
        """Extend all leases concurrently; in sequence, some could expire on a slow network."""
        if not isinstance(self._subscription, ExtendMany):
            await asyncio.gather(*[self._extend(job) for job in jobs])
            return
        errors: Sequence[QueueError | None]
        try:
            deliveries = [job.delivery for job in jobs]
            errors = await self._subscription.extend_many(deliveries, self._lease)
        except QueueError as error:
            self._warn(error)
            return
        for job, problem in zip(jobs, errors, strict=True):
            if problem is not None:
                self._failed(job, problem)

    async def _extend(self, job: Job) -> None:
        if job not in self._held:
            return
        try:
            await self._subscription.extend(job.delivery, self._lease)
        except QueueError as error:
            self._failed(job, error)

    def _failed(self, job: Job, error: QueueError) -> None:
        if not isinstance(error, AckDeadlineExceeded | MessageNotFound):
            self._warn(error)
        elif job in self._held:
            self._on_lost(job)

    def _warn(self, error: QueueError) -> None:
        logger.warning("%s: could not renew a lease: %s", self._channel, error)
