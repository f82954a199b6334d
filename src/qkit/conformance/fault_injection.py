"""Backend wrapper that lets a scenario inject faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from qkit.backend import (
    AckMany,
    Backend,
    Balance,
    Capabilities,
    ConsumerBalancing,
    Delivery,
    ExtendMany,
    QueueSpec,
    StandbyReporting,
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
    """Backend that forwards every call to another backend.

    Override a method to make its calls fail, wait or be recorded. The methods of a subscription
    (``receive``, ``ack``, ``release``, ...) are methods of this class too, with the wrapped
    subscription as their first argument. If ``ack`` is overridden, ``ack_many`` calls it for each
    delivery; ``extend`` and ``extend_many`` behave alike.

    Args:
        inner: The backend to wrap.

    Attributes:
        inner: The wrapped backend.
        name: Name of the wrapped backend.
        capabilities: Capabilities of the wrapped backend.
        balances: Values of ``QueueSpec.balance`` that the wrapped backend supports; may be empty.

    Example:
        >>> from qkit import BackendUnavailable
        >>> from qkit.backends.native.backend import NativeBackend
        >>> from qkit.conformance import FaultInjectingBackend
        >>> class FailsOnce(FaultInjectingBackend):
        ...     failures = 1
        ...     async def publish(self, queue, envelopes):
        ...         if self.failures:
        ...             self.failures -= 1
        ...             raise BackendUnavailable("connection reset")
        ...         return await super().publish(queue, envelopes)
        >>> FailsOnce(NativeBackend()).name
        'native'
    """

    def __init__(self, inner: Backend) -> None:
        self._live: set[_Subscription] = set()
        self.wrap(inner)

    def wrap(self, inner: Backend) -> None:
        """Replace the wrapped backend.

        Args:
            inner: The backend to wrap.

        Example:
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import FaultInjectingBackend
            >>> backend = FaultInjectingBackend(NativeBackend())
            >>> replacement = NativeBackend()
            >>> backend.wrap(replacement)
            >>> backend.inner is replacement
            True
        """
        self.inner = inner
        self.name: str = inner.name
        self.balances: frozenset[Balance] = (
            inner.balances if isinstance(inner, ConsumerBalancing) else frozenset()
        )
        self.capabilities: Capabilities = inner.capabilities
        # Set optional methods on the instance, so that ``isinstance`` with a runtime-checkable
        # protocol gives the same result as for the wrapped backend.
        for name in _OPTIONAL:
            if hasattr(inner, name) and not hasattr(type(self), name):
                setattr(self, name, getattr(inner, name))

    def sever(self) -> None:
        """Break every open subscription as if the connection were lost.

        A ``receive`` that is waiting, and every later call except ``stop``, raises
        ``SubscriptionLost``.

        Example:
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import FaultInjectingBackend
            >>> FaultInjectingBackend(NativeBackend()).sever()
        """
        for subscription in self._live:
            subscription.sever()

    # Backend

    async def start(self) -> None:
        """Start the wrapped backend.

        Raises:
            BackendUnavailable: The broker cannot be reached.

        Example:
            >>> from qkit import BackendUnavailable
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class CannotStart(FaultInjectingBackend):
            ...     async def start(self):
            ...         raise BackendUnavailable("no route to host")
        """
        await self.inner.start()

    async def declare(self, spec: QueueSpec) -> None:
        """Declare a queue or topic on the wrapped backend.

        Args:
            spec: The declaration.

        Raises:
            QueueError: The wrapped backend could not declare it.

        Example:
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class CountsDeclarations(FaultInjectingBackend):
            ...     count = 0
            ...     async def declare(self, spec):
            ...         self.count += 1
            ...         await super().declare(spec)
        """
        await self.inner.declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Publish messages on the wrapped backend.

        Args:
            queue: Name of the queue or topic.
            envelopes: The messages.

        Returns:
            One result per message, in the same order.

        Raises:
            QueueError: The wrapped backend did not accept all messages.

        Example:
            >>> from qkit import QueueFull
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class AlwaysFull(FaultInjectingBackend):
            ...     async def publish(self, queue, envelopes):
            ...         raise QueueFull(f"{queue} is full", queue=queue)
        """
        return await self.inner.publish(queue, envelopes)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Open a subscription whose calls go through this backend.

        To make the call fail, override ``subscribing``.

        Args:
            spec: The subscription to open.

        Returns:
            A context manager that opens and closes the subscription.

        Example:
            >>> import asyncio
            >>> from qkit import QueueSpec, SubscriptionSpec
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import FaultInjectingBackend
            >>> async def main() -> None:
            ...     backend = FaultInjectingBackend(NativeBackend())
            ...     await backend.start()
            ...     await backend.declare(QueueSpec(name="orders"))
            ...     spec = SubscriptionSpec(queue="orders", group="g", consumer="c", prefetch=1)
            ...     async with backend.subscribe(spec) as subscription:
            ...         await subscription.stop()
            ...     await backend.aclose()
            >>> asyncio.run(main())
        """
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncGenerator[Subscription, None]:
        await self.subscribing(spec)
        async with self.inner.subscribe(spec) as inner:
            reports = isinstance(inner, StandbyReporting)
            subscription = (_StandbySubscription if reports else _Subscription)(self, inner)
            self._live.add(subscription)
            try:
                yield subscription
            finally:
                self._live.discard(subscription)

    async def ping(self) -> None:
        """Check that the broker of the wrapped backend responds.

        Raises:
            BackendUnavailable: The broker does not respond.

        Example:
            >>> from qkit import BackendUnavailable
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class NeverResponds(FaultInjectingBackend):
            ...     async def ping(self):
            ...         raise BackendUnavailable("no response")
        """
        await self.inner.ping()

    async def aclose(self) -> None:
        """Close the wrapped backend.

        Example:
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class RecordsClose(FaultInjectingBackend):
            ...     closed = False
            ...     async def aclose(self):
            ...         self.closed = True
            ...         await super().aclose()
        """
        await self.inner.aclose()

    # Subscription calls, for overriding

    async def subscribing(self, spec: SubscriptionSpec) -> None:
        """Do nothing; override this to run code before a subscription is opened.

        Args:
            spec: The subscription that will be opened.

        Example:
            >>> from qkit import BackendUnavailable
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class CannotSubscribe(FaultInjectingBackend):
            ...     async def subscribing(self, spec):
            ...         raise BackendUnavailable("no response")
        """

    async def receive(self, subscription: Subscription, limit: int) -> list[Delivery]:
        """Receive deliveries from the wrapped subscription.

        Args:
            subscription: The wrapped subscription.
            limit: Maximum number of deliveries.

        Returns:
            The deliveries.

        Raises:
            SubscriptionLost: The subscription is broken.

        Example:
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class ReceivesOneByOne(FaultInjectingBackend):
            ...     async def receive(self, subscription, limit):
            ...         return await super().receive(subscription, 1)
        """
        return await subscription.receive(limit)

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        """Acknowledge a delivery.

        Args:
            subscription: The wrapped subscription.
            delivery: The delivery.

        Raises:
            QueueError: The wrapped subscription could not acknowledge it.

        Example:
            >>> from qkit import BackendUnavailable
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class AckFails(FaultInjectingBackend):
            ...     async def ack(self, subscription, delivery):
            ...         raise BackendUnavailable("no response")
        """
        await subscription.ack(delivery)

    async def release(
        self, subscription: Subscription, delivery: Delivery, delay: float, count_attempt: bool
    ) -> None:
        """Release a delivery, so that its message is delivered again.

        Args:
            subscription: The wrapped subscription.
            delivery: The delivery.
            delay: Seconds until the message may be delivered again.
            count_attempt: Whether the delivery counts as an attempt.

        Raises:
            QueueError: The wrapped subscription could not release it.

        Example:
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class IgnoresDelays(FaultInjectingBackend):
            ...     async def release(self, subscription, delivery, delay, count_attempt):
            ...         await super().release(subscription, delivery, 0.0, count_attempt)
        """
        await subscription.release(delivery, delay, count_attempt=count_attempt)

    async def extend(self, subscription: Subscription, delivery: Delivery, seconds: float) -> None:
        """Extend the lease of a delivery.

        Args:
            subscription: The wrapped subscription.
            delivery: The delivery.
            seconds: Time from now until the lease expires.

        Raises:
            QueueError: The lease is lost, or the backend has no leases.

        Example:
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class NeverExtends(FaultInjectingBackend):
            ...     async def extend(self, subscription, delivery, seconds):
            ...         return None
        """
        await subscription.extend(delivery, seconds)

    async def ack_many(
        self, subscription: Subscription, deliveries: Sequence[Delivery]
    ) -> list[QueueError | None]:
        """Acknowledge several deliveries.

        ``ack`` is called for each delivery if it is overridden or if the wrapped subscription has
        no ``ack_many``.

        Args:
            subscription: The wrapped subscription.
            deliveries: The deliveries.

        Returns:
            One entry per delivery: ``None``, or the error if it could not be acknowledged.

        Example:
            >>> from qkit import BackendUnavailable
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class AckManyFails(FaultInjectingBackend):
            ...     async def ack_many(self, subscription, deliveries):
            ...         return [BackendUnavailable("no response") for _ in deliveries]
        """
        if isinstance(subscription, AckMany) and type(self).ack is FaultInjectingBackend.ack:
            return await subscription.ack_many(deliveries)
        return [await _error_of(self.ack(subscription, delivery)) for delivery in deliveries]

    async def extend_many(
        self, subscription: Subscription, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Extend the leases of several deliveries.

        ``extend`` is called for each delivery if it is overridden or if the wrapped subscription
        has no ``extend_many``.

        Args:
            subscription: The wrapped subscription.
            deliveries: The deliveries.
            seconds: Time from now until the leases expire.

        Returns:
            One entry per delivery: ``None``, or the error if its lease could not be extended.

        Example:
            >>> from qkit import AckDeadlineExceeded
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class LosesLeases(FaultInjectingBackend):
            ...     async def extend_many(self, subscription, deliveries, seconds):
            ...         return [AckDeadlineExceeded("lease lost") for _ in deliveries]
        """
        overridden = type(self).extend is not FaultInjectingBackend.extend
        if isinstance(subscription, ExtendMany) and not overridden:
            return await subscription.extend_many(deliveries, seconds)
        return [
            await _error_of(self.extend(subscription, delivery, seconds)) for delivery in deliveries
        ]

    async def stopping(self, subscription: Subscription) -> None:
        """Do nothing; override this to run code before a subscription stops.

        Args:
            subscription: The wrapped subscription.

        Example:
            >>> from qkit.conformance import FaultInjectingBackend
            >>> class CountsStops(FaultInjectingBackend):
            ...     stops = 0
            ...     async def stopping(self, subscription):
            ...         self.stops += 1
        """


async def _error_of(call: Coroutine[Any, Any, None]) -> QueueError | None:
    try:
        await call
    except QueueError as error:
        return error
    return None


class _Subscription:
    """Subscription that routes its calls through the wrapper and can be severed."""

    def __init__(self, backend: FaultInjectingBackend, inner: Subscription) -> None:
        self._backend = backend
        self._inner = inner
        self._severed = False
        self._receiving: asyncio.Timeout | None = None
        # Set optional methods on the instance, so that ``isinstance`` with a runtime-checkable
        # protocol gives the same result as for the wrapped subscription.
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
            raise SubscriptionLost("the connection was lost (injected fault)")

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


class _StandbySubscription(_Subscription):
    """The same for a subscription that reports whether it is on standby."""

    @property
    def standby(self) -> bool:
        inner = self._inner
        return isinstance(inner, StandbyReporting) and inner.standby
