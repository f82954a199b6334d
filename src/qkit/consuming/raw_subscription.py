"""``RawSubscription``: deliveries for a caller without a handler, such as ``qkit consume``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from qkit.backend import Delivery, Subscription, SubscriptionSpec
from qkit.consuming.job import Job
from qkit.consuming.outcome import Dead, expired_outcome
from qkit.consuming.settlement import Settlement
from qkit.handlers.route import Route
from qkit.sending.producer import Producer
from qkit.wiring import Wiring

__all__ = ["RawSubscription", "subscribe_raw"]


class RawSubscription:
    """Subscription without a handler, which dead-letters expired messages as a consumer does.

    It does not limit the number of attempts.

    Args:
        subscription: The backend's subscription.
        settlement: Dead-letters expired messages.
        wiring: Objects shared by all parts of the service.

    Attributes:
        subscription: The backend's subscription, which the caller uses to settle deliveries.
    """

    def __init__(self, subscription: Subscription, settlement: Settlement, wiring: Wiring) -> None:
        self.subscription = subscription
        self._settlement = settlement
        self._clock = wiring.clock
        self._over = asyncio.Event()
        self._dead_letter_tasks: set[asyncio.Task[None]] = set()  # bounded by the prefetch

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for deliveries and return up to ``limit``; return an empty list once stopped."""
        while found := await self.subscription.receive(limit):
            live: list[Delivery] = []
            for delivery in found:
                expired = expired_outcome(delivery.envelope, self._clock.time())
                if expired is None:
                    live.append(delivery)
                else:
                    self._dead_letter(delivery, expired)
            if live:
                return live
        return []

    def _dead_letter(self, delivery: Delivery, outcome: Dead) -> None:
        settling = self._settlement.settle(self.subscription, Job(delivery), outcome, self._over)
        task = asyncio.create_task(settling, name="qkit dead letter")
        self._dead_letter_tasks.add(task)
        task.add_done_callback(self._dead_letter_tasks.discard)

    async def aclose(self) -> None:
        """Wait for pending dead letters; release messages whose dead letter cannot be written."""
        self._over.set()
        if self._dead_letter_tasks:
            await asyncio.wait(self._dead_letter_tasks)


@asynccontextmanager
async def subscribe_raw(
    wiring: Wiring, route: Route, spec: SubscriptionSpec
) -> AsyncGenerator[RawSubscription, None]:
    """Open a raw subscription to an existing queue; the backend must be started."""
    producer = Producer(wiring, lambda operation: None)
    route.declared = True
    settlement = Settlement(wiring, route, spec, producer.dead_letter_writer(route))
    async with wiring.backend.subscribe(spec) as subscription:
        raw = RawSubscription(subscription, settlement, wiring)
        try:
            yield raw
        finally:
            await raw.aclose()
            await producer.drain()
