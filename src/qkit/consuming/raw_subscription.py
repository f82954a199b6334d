"""``RawSubscription``: messages for a caller without a handler, such as ``qkit consume``."""

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
    """Receives what has not expired; what has is dead-lettered, as before a handler.

    How often a message may be delivered is not limited.

    Attributes:
        subscription: The backend's, to settle what was received.
    """

    def __init__(self, subscription: Subscription, settlement: Settlement, wiring: Wiring) -> None:
        self.subscription = subscription
        self._settlement = settlement
        self._clock = wiring.clock
        self._over = asyncio.Event()
        self._refusals: set[asyncio.Task[None]] = set()  # at most as many as the prefetch

    async def receive(self, limit: int) -> list[Delivery]:
        """Return up to ``limit`` deliveries as soon as there are any; none once stopped."""
        while found := await self.subscription.receive(limit):
            live: list[Delivery] = []
            for delivery in found:
                expired = expired_outcome(delivery.envelope, self._clock.time())
                if expired is None:
                    live.append(delivery)
                else:
                    self._refuse(delivery, expired)
            if live:
                return live
        return []

    def _refuse(self, delivery: Delivery, outcome: Dead) -> None:
        settling = self._settlement.settle(self.subscription, Job(delivery), outcome, self._over)
        task = asyncio.create_task(settling, name="qkit refusal")
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)

    async def aclose(self) -> None:
        """Wait for dead letters that are being written; what cannot be written goes back."""
        self._over.set()
        if self._refusals:
            await asyncio.wait(self._refusals)


@asynccontextmanager
async def subscribe_raw(
    wiring: Wiring, route: Route, spec: SubscriptionSpec
) -> AsyncGenerator[RawSubscription, None]:
    """Subscribe to a queue that exists, with a backend that was started."""
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
