"""``Fetcher``: receives the deliveries of a session into its buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from qkit._internal.clock import Clock
from qkit._internal.deadlines import CancelScope
from qkit.backend import Subscription
from qkit.consuming.consumer_state import ConsumerState
from qkit.consuming.delivery_buffer import DeliveryBuffer
from qkit.consuming.job import Job
from qkit.consuming.lease_renewal import LeaseRenewal
from qkit.observability.metrics import ChannelCounters

__all__ = ["Fetcher"]

MAX_FETCHES_BEFORE_YIELD = 5


class Fetcher:
    """Fetcher of one subscription; only one task receives at a time.

    An idle worker fetches for itself. While all workers are busy, ``run`` refills the buffer.

    Args:
        subscription: The open subscription.
        buffer: Takes the deliveries.
        state: Whether handlers may be started, and how many deliveries may be held.
        counters: The counters of the channel.
        clock: The source of time.
        renewal: Renews the leases; ``None`` without leases.
        release: Releases a withdrawn delivery without counting an attempt.

    Attributes:
        ending: Whether the session is ending, so that nothing more is fetched.
        waiting: The future that ``run`` awaits while there is nothing to fetch, or ``None``.
        checking: Whether a check of whether to fetch is scheduled.
    """

    def __init__(
        self,
        subscription: Subscription,
        buffer: DeliveryBuffer,
        state: ConsumerState,
        counters: ChannelCounters,
        clock: Clock,
        renewal: LeaseRenewal | None,
        release: Callable[[Job], Awaitable[None]],
    ) -> None:
        self.ending: bool = state.ending
        self.waiting: asyncio.Future[None] | None = None
        self.checking: bool = False
        self._subscription = subscription
        self._buffer = buffer
        self._state = state
        self._counters = counters
        self._clock = clock
        self._renewal = renewal
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._receiving: CancelScope | None = None  # set during ``receive``
        self._broken: Exception | None = None  # why the subscription was lost
        self._withdrawn: list[Job] = []
        self._fetches = 0
        buffer.on_empty = self.schedule

    async def run(self, task: asyncio.Task[None]) -> None:
        """Release withdrawn deliveries, and refill the buffer while the workers are busy."""
        await asyncio.sleep(0)  # let the workers start first: an idle worker fetches for itself
        while not self.ending:
            if self._broken is not None:
                raise self._broken
            if self._withdrawn:
                await self.release_withdrawn()
            elif (limit := self.limit()) > 0:
                await self._receive(limit, task)
                await asyncio.sleep(0)  # let an idle worker do the next fetch: it is faster
            else:
                self.waiting = self._loop.create_future()
                await self.waiting

    async def fetch_for_worker(self, limit: int, task: asyncio.Task[None]) -> None:
        """Fetch up to ``limit`` deliveries in the task of an idle worker."""
        try:
            await self._receive(limit, task)
        except Exception as error:
            self._broken = error
            self.wake()
        if self.waiting is not None and not self.checking:
            self.schedule()
        self._fetches += 1
        if not self._fetches % MAX_FETCHES_BEFORE_YIELD:
            await asyncio.sleep(0)  # handlers that never suspend must not block the loop

    async def _receive(self, limit: int, task: asyncio.Task[None]) -> None:
        """Fetch up to ``limit`` deliveries unless interrupted; must not run concurrently."""
        self._state.last_poll_at = self._clock.time()
        self._receiving = scope = CancelScope(task)
        try:
            with scope:
                deliveries = await self._subscription.receive(limit)
                # Start the renewal timer first, because a handler may block the loop immediately.
                if self._renewal is not None and self._renewal.timer is None:
                    self._renewal.schedule()
                self._counters.received += len(deliveries)
                self._buffer.add(deliveries)
                if not self._state.active:
                    self.withdraw()
        except TimeoutError:
            if not scope.expired:
                raise  # otherwise ``interrupt`` ended the call, which loses no delivery
        finally:
            self._receiving = None

    def interrupt(self) -> None:
        """React to a change of the consumer's state: withdraw deliveries, and check it again."""
        if self._state.ending:
            self.ending = True  # also if the state changes back: what is withdrawn stays withdrawn
        if self.ending or not self._state.active:
            self.withdraw()
        self.wake()
        if self._receiving is not None:
            self._receiving.expire()

    def withdraw(self) -> None:
        """Withdraw the deliveries that no worker has started.

        An ordered consumer that backs off keeps them: the buffer holds them.
        """
        if self.ending or not self._state.ordered:
            self._withdrawn += self._buffer.withdraw()
            self.wake()

    async def release_withdrawn(self) -> None:
        """Release withdrawn deliveries without counting an attempt."""
        while self._withdrawn:
            await self._release(self._withdrawn.pop())

    def limit(self) -> int:
        """Return how many deliveries to fetch now.

        Return 0 while another task receives, while withdrawn deliveries wait to be released, after
        the subscription is lost, and while no handler may be started. To avoid small fetches, also
        return 0 while deliveries are ready and less than half of the limit is free.
        """
        state, buffer = self._state, self._buffer
        if self._receiving is not None or self._withdrawn or self._broken is not None:
            return 0
        if not state.active or self.ending:
            return 0
        free = state.limit - len(buffer.held)
        return free if not buffer.ready or free * 2 >= state.limit else 0

    def schedule(self) -> None:
        """If ``run`` waits, schedule a check of whether it should fetch."""
        if self.waiting is not None and not self.checking:
            self.checking = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self.checking = False
        if self.limit() > 0:
            self.wake()

    def wake(self) -> None:
        """Wake ``run`` if it is waiting."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)
        self.waiting = None
