"""Native backend that uses an engine in this process."""

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
    """Implementation of ``Backend`` and ``Admin`` with an ``Engine``.

    Backends with the same ``engine`` share its queues.

    Args:
        clock: Clock of a new engine; the system clock by default.
        max_depth: ``max_depth`` of queues whose declaration does not set it; 100,000 by default.
        max_priority: ``max_priority`` of queues whose declaration does not set it; 9 by default.
        ack_deadline: Length of a lease in seconds, for queues whose declaration does not set it; 30
            by default.
        engine: Engine to use instead of a new one. It keeps its own clock and defaults, and the
            backend does not close it. By default the backend opens and closes an in-memory engine.

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
        self._dead_letter_callbacks: list[Callable[[DeadLetter], None]] = []
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Open the engine unless it was passed in; after ``aclose``, open a new, empty engine."""
        if self._owns_engine and not self._engine.running:
            if self._engine.closed:
                self._engine = Engine(clock=self._clock, defaults=self._defaults)
                for callback in self._dead_letter_callbacks:
                    self._engine.on_dead_letter(callback)
                for callback in self._drop_callbacks:
                    self._engine.on_dropped_letter(callback)
            await self._engine.__aenter__()
        await self.ping()

    async def declare(self, spec: QueueSpec) -> None:
        """Create the queue if it does not exist, and apply the fields that ``spec`` sets.

        If several declarations set the same field, the last one wins. If ``spec.again`` is set, an
        existing queue is left unchanged.

        Raises:
            ConfigError: The queue exists with a different ``broadcast``, or ``spec.replicas`` is
                greater than 1.
            QueueNotFound: ``spec.passive`` is set and the queue does not exist.
        """
        if spec.passive:
            self._engine.check_exists(spec.name, "declare")
            return
        if spec.again and spec.name in self._engine:
            return
        if spec.replicas > 1:
            raise ConfigError(
                "the native backend does not support replicas: set replicas=1",
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
        dead_letter = {"dead_letter": spec.dead_letter}
        if spec.consumed:
            await self._engine.declare(spec.name, values | dead_letter)
        else:
            await self._engine.declare(spec.name, values, defaults=dead_letter)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order.

        Raises:
            PartialSend: Some messages were not added; ``results`` has the outcome of each message.
        """
        results = await self._engine.publish_many(queue, envelopes)
        for result in results:
            if isinstance(result, QueueError):
                raise self._partial_send(results, queue)
        return results  # type: ignore[return-value]  # contains no errors

    def publish_now(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent] | None:
        """Add messages in order if that needs no wait, as in memory; otherwise return ``None``.

        Raises:
            PartialSend: Some messages were not added; ``results`` has the outcome of each message.
        """
        results = self._engine.publish_now(queue, envelopes)
        for result in results or ():
            if isinstance(result, QueueError):
                raise self._partial_send(results, queue)  # type: ignore[arg-type]  # not None
        return results  # type: ignore[return-value]  # contains no errors

    def _partial_send(self, results: list[Sent | QueueError], queue: str) -> QueueError:
        for result in results:
            if isinstance(result, QueueError):
                result.located(backend=self.name)
        return PartialSend.of(results, backend=self.name, queue=queue)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[NativeSubscription]:
        """Subscribe to a queue or to a group of a topic; create the group if it does not exist."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[NativeSubscription, None]:
        queue = self._engine.queue(spec.queue, "subscribe", spec.group)
        subscription = NativeSubscription(queue, spec, self._clock)
        await self._engine.written()  # wait until a new group is in the log
        queue.subscribe(subscription)
        try:
            yield subscription
        finally:
            queue.unsubscribe(subscription)
            await subscription.stop()
            subscription.release_uncharged()

    async def ping(self) -> None:
        """Check that the engine is open and writable.

        Raises:
            BackendUnavailable: It is not.
            LifecycleError: This is a fork of the process that opened the engine.
        """
        self._engine.check_process()
        if not self._engine.running:
            raise BackendUnavailable(
                "the engine is not open: start the backend first", backend=self.name
            )
        if self._engine.read_only:
            raise BackendUnavailable(
                "the engine is read-only after a disk failure: repair the disk, then restart",
                backend=self.name,
            )

    async def aclose(self) -> None:
        """Close the engine if this backend opened it; idempotent."""
        if self._owns_engine:
            await self._engine.aclose()

    # Admin

    async def queues(self) -> list[str]:
        """Return the names of all queues and topics."""
        return await self._engine.list()

    async def stats(self, queue: str) -> QueueStats:
        """Return the queue's statistics; for a topic, the sums over its groups."""
        return await self._engine.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages in delivery order, scheduled messages last."""
        return await self._engine.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight; return the number deleted."""
        return await self._engine.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with these ids that are not in flight; return the number deleted."""
        return await self._engine.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the queue and everything in it."""
        await self._engine.delete(queue)

    # DeadLetterSource and DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each message that the engine dead-letters.

        The engine dead-letters a message when its TTL expires, or when the lease of its last
        allowed delivery expires. The callback is also called if the queue has no dead-letter queue
        and the message is dropped.
        """
        self._dead_letter_callbacks.append(callback)
        self._engine.on_dead_letter(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter dropped because its queue was full."""
        self._drop_callbacks.append(callback)
        self._engine.on_dropped_letter(callback)
