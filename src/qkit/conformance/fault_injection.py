"""A backend that wraps a backend: scenarios override the calls that shall fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from qkit.backend import (
    AckMany,
    Backend,
    Balance,
    ConsumerBalancing,
    Delivery,
    ExtendMany,
    QueueSpec,
    Subscription,
    SubscriptionSpec,
)
from qkit.errors import QueueError, SubscriptionLost
from qkit.message import Envelope, Sent

__all__ = ["FaultInjectingBackend"]

_OPTIONAL = (
    "queues",
    "stats",
    "peek",
    "purge",
    "remove",
    "delete",
    "on_dead_letter",
    "on_dropped_letter",
)


class FaultInjectingBackend:
    """Passes every call on; override a method to inject a fault.

    ``receive``, ``ack`` and the others get the subscription on which they are called. Where
    ``ack`` or ``extend`` is overridden, calls for many deliveries call it for each.
    """

    def __init__(self, inner: Backend) -> None:
        self._live: set[_Subscription] = set()
        self.wrap(inner)

    def wrap(self, inner: Backend) -> None:
        """Pass calls on to ``inner`` from now on."""
        self.inner = inner
        self.name = inner.name
        self.balances: frozenset[Balance] = (
            inner.balances if isinstance(inner, ConsumerBalancing) else frozenset()
        )
        self.capabilities = inner.capabilities
        for name in _OPTIONAL:  # on the instance, so that a runtime protocol sees what is there
            if hasattr(inner, name) and not hasattr(type(self), name):
                setattr(self, name, getattr(inner, name))

    def sever(self) -> None:
        """Break every open subscription, as a lost connection does."""
        for subscription in self._live:
            subscription.sever()

    # Backend

    async def start(self) -> None:
        await self.inner.start()

    async def declare(self, spec: QueueSpec) -> None:
        await self.inner.declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        return await self.inner.publish(queue, envelopes)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncGenerator[Subscription, None]:
        await self.subscribing(spec)
        async with self.inner.subscribe(spec) as inner:
            subscription = _Subscription(self, inner)
            self._live.add(subscription)
            try:
                yield subscription
            finally:
                self._live.discard(subscription)

    async def ping(self) -> None:
        await self.inner.ping()

    async def aclose(self) -> None:
        await self.inner.aclose()

    # What a subscription does, to be overridden

    async def subscribing(self, spec: SubscriptionSpec) -> None:
        """Before a subscription is opened."""

    async def receive(self, subscription: Subscription, limit: int) -> list[Delivery]:
        return await subscription.receive(limit)

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        await subscription.ack(delivery)

    async def release(
        self, subscription: Subscription, delivery: Delivery, delay: float, count_attempt: bool
    ) -> None:
        await subscription.release(delivery, delay, count_attempt=count_attempt)

    async def extend(self, subscription: Subscription, delivery: Delivery, seconds: float) -> None:
        await subscription.extend(delivery, seconds)

    async def ack_many(
        self, subscription: Subscription, deliveries: Sequence[Delivery]
    ) -> list[QueueError | None]:
        if isinstance(subscription, AckMany) and type(self).ack is FaultInjectingBackend.ack:
            return await subscription.ack_many(deliveries)
        return [await _error_of(self.ack(subscription, delivery)) for delivery in deliveries]

    async def extend_many(
        self, subscription: Subscription, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        own = type(self).extend is not FaultInjectingBackend.extend
        if isinstance(subscription, ExtendMany) and not own:
            return await subscription.extend_many(deliveries, seconds)
        return [
            await _error_of(self.extend(subscription, delivery, seconds)) for delivery in deliveries
        ]

    async def stopping(self, subscription: Subscription) -> None:
        """Before a subscription stops."""


async def _error_of(call: Coroutine[Any, Any, None]) -> QueueError | None:
    try:
        await call
    except QueueError as error:
        return error
    return None


class _Subscription:
    """A subscription whose calls go through the wrapper, and that can be severed."""

    def __init__(self, backend: FaultInjectingBackend, inner: Subscription) -> None:
        self._backend = backend
        self._inner = inner
        self._severed = False
        self._receiving: asyncio.Timeout | None = None
        # On the instance, so that a runtime protocol sees what is there.
        if isinstance(inner, AckMany):
            self.ack_many = self._ack_many
        if isinstance(inner, ExtendMany):
            self.extend_many = self._extend_many
        for name in ("on_lost", "on_settlement"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def sever(self) -> None:
        self._severed = True
        if self._receiving is not None and not self._receiving.expired():
            self._receiving.reschedule(asyncio.get_running_loop().time())

    def _check(self) -> None:
        if self._severed:
            raise SubscriptionLost("the connection was lost, as the scenario wants it")

    async def receive(self, limit: int) -> list[Delivery]:
        self._check()
        try:
            async with asyncio.timeout(None) as self._receiving:
                return await self._backend.receive(self._inner, limit)
        except TimeoutError:
            self._check()
            raise
        finally:
            self._receiving = None

    async def ack(self, delivery: Delivery) -> None:
        self._check()
        await self._backend.ack(self._inner, delivery)

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        self._check()
        await self._backend.release(self._inner, delivery, delay, count_attempt)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        self._check()
        await self._backend.extend(self._inner, delivery, seconds)

    async def _ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        self._check()
        return await self._backend.ack_many(self._inner, deliveries)

    async def _extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        self._check()
        return await self._backend.extend_many(self._inner, deliveries, seconds)

    async def stop(self) -> None:
        await self._backend.stopping(self._inner)
        await self._inner.stop()
