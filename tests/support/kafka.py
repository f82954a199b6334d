"""A consumer of Kafka in a test, below the service."""

from __future__ import annotations

import asyncio
from typing import Any

from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.kafka.subscription import KafkaSubscription

__all__ = ["spec", "take"]


def spec(name: str, **options: Any) -> SubscriptionSpec:
    """A subscription to a queue, with room for all of a test's messages."""
    values: dict[str, Any] = {"group": "g", "consumer": "c", "prefetch": 100, **options}
    return SubscriptionSpec(queue=name, **values)


async def take(subscription: KafkaSubscription, count: int = 1) -> list[Delivery]:
    """So many deliveries, however many calls that needs."""
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found
