"""Helpers for tests that use a Kafka subscription without a service."""

from __future__ import annotations

import asyncio
from typing import Any

from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.kafka.subscription import KafkaSubscription

__all__ = ["spec", "take"]


def spec(name: str, **options: Any) -> SubscriptionSpec:
    """Return the spec of a subscription whose prefetch is larger than any test needs."""
    values: dict[str, Any] = {"group": "g", "consumer": "c", "prefetch": 100, **options}
    return SubscriptionSpec(queue=name, **values)


async def take(subscription: KafkaSubscription, count: int = 1) -> list[Delivery]:
    """Receive ``count`` deliveries, in as many calls as needed."""
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found
