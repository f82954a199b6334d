"""The Redis pub/sub backend: every subscriber hears every message, at most once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.logging import logger
from qkit.backend import Capabilities, QueueSpec, QueueStats, Subscription, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.redis import codec
from qkit.backends.redis.connection import Address
from qkit.backends.redis.errors import BACKEND, translated
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.backends.redis.pubsub_subscription import Listening
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["RedisPubSubBackend"]

LOG_INTERVAL_SECONDS: Final = 60.0  # between two warnings about one channel without subscribers


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
        address: Address | str,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.unheard = 0
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._log_again: dict[str, float] = {}  # when to log again of a channel without subscribers
        self._lists = RedisListBackend(address, clock=clock, reliable=False)
        self._link = self._lists.link
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
        if queue in self._queues:
            return await self._lists.publish(queue, envelopes)
        with translated("publish", queue):
            for batch in codec.batches(envelopes):
                receivers: list[int] = await self._link.commands(
                    [("PUBLISH", queue, codec.encode(envelope)) for envelope in batch]
                )
                if 0 in receivers:
                    self._not_heard(queue, receivers.count(0))
        return [Sent(envelope.id) for envelope in envelopes]

    def _not_heard(self, queue: str, count: int) -> None:
        """Count messages that no subscriber received; log it once a minute for each channel."""
        self.unheard += count
        now = self._clock.monotonic()
        if now >= self._log_again.get(queue, now):
            self._log_again[queue] = now + LOG_INTERVAL_SECONDS
            logger.warning(
                "%s: %d messages were published and no subscriber received them: pub/sub keeps "
                "nothing, they are lost",
                queue,
                count,
                extra={"queue": queue},
            )

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Listen to a topic, or consume a queue."""
        return self._listening(spec) if spec.broadcast else self._lists.subscribe(spec)

    @asynccontextmanager
    async def _listening(self, spec: SubscriptionSpec) -> AsyncGenerator[Listening, None]:
        listening = Listening(self._link.address, spec)
        try:
            with translated("subscribe", spec.queue):
                await listening.open()
            yield listening
        finally:
            await asyncio.shield(listening.leave())

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

    # DeadLetterSource, DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each message of a queue whose time to live ran out."""
        self._lists.on_dead_letter(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._lists.on_dropped_letter(callback)
