"""The Redis pub/sub backend: every subscriber hears every message, at most once."""

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
    """``PUBLISH`` and ``SUBSCRIBE``: a message that nobody hears is gone, which is no error.

    Such messages are counted in ``unheard`` and logged.

    A topic (``QueueSpec.broadcast``) is a channel of Redis, and nothing of it is on the server. A
    queue is a list without leases: the dead letters are kept there, and so can be listed and sent
    again.

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
        """Connect, or raise ``BackendUnavailable``."""
        await self._lists.start()

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure that a queue exists; a topic needs nothing."""
        if spec.broadcast:
            self._topics.add(spec.name)
        else:
            self._queues.add(spec.name)
            await self._lists.declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Tell messages to whoever listens now, hundreds in one round trip."""
        publisher = self._lists if queue in self._queues else self._publisher
        return await publisher.publish(queue, envelopes)

    @property
    def unheard(self) -> int:
        """Number of messages that no subscriber received."""
        return self._publisher.unheard

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Listen to a topic, or consume a queue."""
        return self._subscription(spec) if spec.broadcast else self._lists.subscribe(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[PubSubSubscription, None]:
        subscription = PubSubSubscription(self._connection.parameters, spec)
        try:
            with translate_errors("subscribe", spec.queue):
                await subscription.open()
            yield subscription
        finally:
            await asyncio.shield(subscription.leave())

    async def ping(self) -> None:
        """Raise ``BackendUnavailable`` unless the server answers."""
        await self._lists.ping()

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        await self._lists.aclose()

    # Admin: of the queues, for a topic has nothing to look at

    async def queues(self) -> list[str]:
        """The topics that were used here, and all queues of this server."""
        return sorted(self._topics.union(await self._lists.queues()))

    async def stats(self, queue: str) -> QueueStats:
        """A queue's figures."""
        return await self._lists.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """A queue's next messages."""
        return await self._lists.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Empty a queue."""
        return await self._lists.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages of a queue."""
        return await self._lists.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        await self._lists.delete(queue)

    # DroppedLetterSource

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._lists.on_dropped_letter(callback)


def from_settings(settings: Settings, clock: Clock) -> RedisPubSubBackend:
    """Build the backend that the settings describe, not yet started.

    Args:
        settings: Settings with ``type="redis"`` and ``mode="pubsub"``.
        clock: Time of the service.
    """
    return RedisPubSubBackend(ConnectionParameters.from_settings(settings), clock=clock)
