"""Redis pub/sub backend: every subscriber receives every message, at most once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from qkit._internal.clock import Clock, SystemClock
from qkit.backend import Capabilities, QueueSpec, QueueStats, Subscription, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.redis.connection import ConnectionParameters
from qkit.backends.redis.errors import BACKEND, translate_errors
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.backends.redis.pubsub_publisher import PubSubPublisher
from qkit.backends.redis.pubsub_subscription import PubSubSubscription
from qkit.message import DeadLetter, Envelope, Sent
from qkit.settings.model import Settings

__all__ = ["RedisPubSubBackend", "from_settings"]


class RedisPubSubBackend:
    """``Backend`` and ``Admin`` on ``PUBLISH`` and ``SUBSCRIBE``.

    A topic (``QueueSpec.broadcast``) is a Redis channel, whose messages the server does not store.
    A message published without a subscriber is lost. This is not an error, but it is logged and
    counted in ``unheard``. A queue is a list without leases. Dead letters are stored in such
    queues, so they can be listed and replayed.

    Args:
        parameters: Connection parameters, or a URL.
        clock: Clock of the service; the system clock by default.

    >>> backend = RedisPubSubBackend("redis://localhost:6379/0")
    >>> backend.capabilities.supports("queues")
    False
    """

    name: str = BACKEND
    capabilities: Capabilities = MATRIX["redis-pubsub"]

    def __init__(
        self,
        parameters: ConnectionParameters | str,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._lists = RedisListBackend(parameters, clock=clock, reliable=False)
        self._connection = self._lists.connection
        self._publisher = PubSubPublisher(
            self._connection, clock if clock is not None else SystemClock()
        )
        self._queues: set[str] = set()
        self._topics: set[str] = set()

    # Backend

    async def start(self) -> None:
        """Connect to the server; raise ``BackendUnavailable`` if it does not respond."""
        await self._lists.start()

    async def declare(self, spec: QueueSpec) -> None:
        """Create a queue if needed; a topic is only remembered in this process."""
        if spec.broadcast:
            self._topics.add(spec.name)
        else:
            self._queues.add(spec.name)
            await self._lists.declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Publish messages to the current subscribers of a topic, or add them to a queue."""
        publisher = self._lists if queue in self._queues else self._publisher
        return await publisher.publish(queue, envelopes)

    @property
    def unheard(self) -> int:
        """Number of messages that were published without a subscriber, and so lost."""
        return self._publisher.unheard

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to a topic or to a queue."""
        return self._subscription(spec) if spec.broadcast else self._lists.subscribe(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[PubSubSubscription, None]:
        self._connection.check_loop()
        subscription = PubSubSubscription(self._connection.parameters, spec)
        try:
            with translate_errors("subscribe", spec.queue):
                await subscription.open()
            yield subscription
        finally:
            await asyncio.shield(subscription.leave())

    async def ping(self) -> None:
        """Check that the server responds; raise ``BackendUnavailable`` otherwise."""
        await self._lists.ping()

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        await self._lists.aclose()

    # Admin, for queues only, because the server stores nothing for a topic

    async def queues(self) -> list[str]:
        """Return the topics declared here and all queues on the server, sorted by name."""
        return sorted(self._topics.union(await self._lists.queues()))

    async def stats(self, queue: str) -> QueueStats:
        """Return a queue's statistics."""
        return await self._lists.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages of a queue, in delivery order."""
        return await self._lists.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete all messages of a queue; return the number deleted."""
        return await self._lists.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with these ids from a queue; return the number deleted."""
        return await self._lists.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete a queue and all its messages."""
        await self._lists.delete(queue)

    # DroppedLetterSource

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter dropped because its queue was full."""
        self._lists.on_dropped_letter(callback)


def from_settings(settings: Settings, clock: Clock) -> RedisPubSubBackend:
    """Create the backend that the settings describe; the caller starts it.

    Args:
        settings: Settings with ``type="redis"`` and ``mode="pubsub"``.
        clock: Clock of the service.
    """
    return RedisPubSubBackend(ConnectionParameters.from_settings(settings), clock=clock)
