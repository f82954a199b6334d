"""The native backend: qkit's boundary on the engine inside this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from qkit._internal.clock import Clock
from qkit.backend import BALANCES, Capabilities, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.subscription import NativeSubscription
from qkit.errors import BackendUnavailable, ConfigError, PartialSend, QueueError
from qkit.message import DeadLetter, Envelope, Sent
from qkit.native.config import QueueConfig
from qkit.native.engine import Engine

__all__ = ["NativeBackend"]


class NativeBackend:
    """The whole boundary on an ``Engine``: one in memory, unless another is given.

    Backends share queues when they are given the same ``engine``; one that was given is not
    closed here, and has its own defaults. ``max_depth``, ``max_priority`` and ``ack_deadline`` are
    those of queues for which no declaration sets them.

    >>> import asyncio
    >>> async def main() -> None:
    ...     backend = NativeBackend()
    ...     await backend.start()
    ...     await backend.declare(QueueSpec(name="orders"))
    ...     print(await backend.publish("orders", [Envelope("0190", b"{}")]))
    ...     await backend.aclose()
    >>> asyncio.run(main())
    [Sent(message_id='0190', position=0)]
    """

    name: str = "native"
    balances = BALANCES
    capabilities: Capabilities = MATRIX["native-memory"]

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        max_depth: int = 100_000,
        max_priority: int = 9,
        ack_deadline: float = 30.0,
        engine: Engine | None = None,
    ) -> None:
        self._owns_engine = engine is None
        self._defaults = QueueConfig(
            max_depth=max_depth,
            max_priority=max_priority,
            max_deliveries=None,
            ack_deadline=ack_deadline,
        )
        self._engine = engine or Engine(clock=clock, defaults=self._defaults)
        if self._engine.durable:
            self.capabilities = MATRIX["native-durable"]
        self._clock: Clock = self._engine.clock
        self._callbacks: list[Callable[[DeadLetter], None]] = []
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Open the engine, unless it was given; a new one if it was closed before."""
        if self._owns_engine and not self._engine.running:
            if self._engine.closed:
                self._engine = Engine(clock=self._clock, defaults=self._defaults)
                for callback in self._callbacks:
                    self._engine.on_dead_letter(callback)
                for callback in self._drop_callbacks:
                    self._engine.on_dropped_letter(callback)
            await self._engine.__aenter__()
        await self.ping()

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists, and set what the spec sets: the last declaration wins.

        Raises ``ConfigError`` when it exists as the other kind, and with ``passive``
        ``QueueNotFound`` when it does not exist.
        """
        if spec.passive:
            self._engine.check_exists(spec.name, "declare")
            return
        if spec.again and spec.name in self._engine:
            return
        if spec.replicas > 1:
            raise ConfigError(
                "the native backend is one process and keeps no replicas: set replicas=1",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )
        values: dict[str, object] = {
            "broadcast": spec.broadcast,
            "max_depth": spec.max_depth,
            "max_priority": spec.max_priority,
            "max_deliveries": spec.max_deliveries,
            "ack_deadline": spec.ack_deadline,
            "drop_oldest": spec.drop_oldest or None,
            "balance": spec.balance,
        }
        values = {field: value for field, value in values.items() if value is not None}
        letters = {"dead_letter": spec.dead_letter}
        if spec.consumed:
            await self._engine.declare(spec.name, values | letters)
        else:
            await self._engine.declare(spec.name, values, defaults=letters)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order, as many as can be; the others' errors are in ``PartialSend``."""
        results = await self._engine.publish_many(queue, envelopes)
        for result in results:
            if isinstance(result, QueueError):
                raise self._partial_send(results, queue)
        return results  # type: ignore[return-value]  # no error among them

    def _partial_send(self, results: list[Sent | QueueError], queue: str) -> QueueError:
        for result in results:
            if isinstance(result, QueueError):
                result.located(backend=self.name)
        return PartialSend.of(results, backend=self.name, queue=queue)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[NativeSubscription]:
        """Claim messages of a queue, or of a topic's group, which is declared by this."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[NativeSubscription, None]:
        queue = self._engine.queue(spec.queue, "subscribe", spec.group)
        subscription = NativeSubscription(queue, spec, self._clock)
        await self._engine.written()  # of the group, if it is new
        queue.subscribe(subscription)
        try:
            yield subscription
        finally:
            queue.unsubscribe(subscription)
            await subscription.stop()
            subscription.release_uncharged()

    async def ping(self) -> None:
        """Raise ``BackendUnavailable`` unless the engine is open and can be written to."""
        if not self._engine.running:
            raise BackendUnavailable(
                "the engine is not open: start the backend first", backend=self.name
            )
        if self._engine.read_only:
            raise BackendUnavailable(
                "the engine is read-only since its disk failed: look after the disk, then restart",
                backend=self.name,
            )

    async def aclose(self) -> None:
        """Close the engine if this backend opened it; idempotent."""
        if self._owns_engine:
            await self._engine.aclose()

    # Admin

    async def queues(self) -> list[str]:
        """The names of all queues and topics of the engine."""
        return await self._engine.list()

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        return await self._engine.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in order of delivery, delayed ones last."""
        return await self._engine.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return await self._engine.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        return await self._engine.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it."""
        await self._engine.delete(queue)

    # DeadLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each message whose lease or time to live ran out for good.

        Also for one that was dropped because its queue names no dead-letter queue.
        """
        self._callbacks.append(callback)
        self._engine.on_dead_letter(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._drop_callbacks.append(callback)
        self._engine.on_dropped_letter(callback)
