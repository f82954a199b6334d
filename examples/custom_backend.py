"""A custom backend: FIFO queues in plain lists, with at-least-once delivery.

``qkit.conformance`` tests it. docs/backends.md explains the code and how to register ``open_toy``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import qkit
from qkit import Capabilities, Delivery, Envelope, QueueSpec, QueueStats, Sent, SubscriptionSpec
from qkit.backend import Support


@dataclass
class Queue:
    """Queue with ready messages, messages in flight by receipt, and an event for consumers."""

    spec: QueueSpec
    ready: list[Envelope] = field(default_factory=list)
    held: dict[object, Envelope] = field(default_factory=dict)
    deleted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Toy:
    """``Backend`` and ``Admin`` in memory; instances with the same ``queues`` act as one broker."""

    name: str = "toy"
    capabilities: Capabilities = Capabilities(
        redelivery=Support.NATIVE,
        ttl=Support.EMULATED,  # the envelope carries the expiry; qkit checks it
        key_order=Support.EMULATED,  # qkit orders messages by key
        dead_letters=Support.EMULATED,  # qkit writes them; Admin lists them
        prefetch=Support.EMULATED,
        batch=Support.EMULATED,
        **dict.fromkeys(("depth", "peek", "purge", "delete"), Support.NATIVE),
    )

    def __init__(self, queues: dict[str, Queue] | None = None) -> None:
        self._queues = queues if queues is not None else {}

    async def start(self) -> None: ...
    async def ping(self) -> None: ...
    async def aclose(self) -> None: ...

    async def declare(self, spec: QueueSpec) -> None:
        if spec.passive:
            self._queue(spec.name)
        self._queues.setdefault(spec.name, Queue(spec))

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        target = self._queue(queue)
        capacity = (target.spec.max_depth or 100_000) - len(target.ready) - len(target.held)
        excess = len(envelopes) - capacity
        if excess > 0 and not target.spec.drop_oldest:
            raise qkit.QueueFull(f"queue {queue!r} is full: consume messages first", queue=queue)
        del target.ready[: max(0, excess)]
        target.ready += [replace(item, headers=dict(item.headers)) for item in envelopes]
        target.changed.set()
        return [Sent(envelope.id) for envelope in envelopes]

    @asynccontextmanager
    async def subscribe(self, spec: SubscriptionSpec) -> AsyncGenerator[ToySubscription, None]:
        subscription = ToySubscription(self._queue(spec.queue), spec.prefetch)
        try:
            yield subscription
        finally:
            await subscription.stop()
            for delivery in list(subscription.deliveries.values()):
                await subscription.release(delivery, 0.0, count_attempt=False)

    async def queues(self) -> list[str]:
        return list(self._queues)

    async def stats(self, queue: str) -> QueueStats:
        found = self._queue(queue)
        return QueueStats(queue=queue, depth=len(found.ready), in_flight=len(found.held))

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        return [replace(item) for item in self._queue(queue).ready[:limit]]

    async def purge(self, queue: str) -> int:
        return await self.remove(queue, [item.id for item in self._queue(queue).ready])

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        ready, before = self._queue(queue).ready, len(self._queue(queue).ready)
        for wanted in ids:
            oldest = next((at for at, item in enumerate(ready) if item.id == wanted), before)
            del ready[oldest : oldest + 1]
        return before - len(ready)

    async def delete(self, queue: str) -> None:
        self._queue(queue).deleted = True
        self._queues.pop(queue).changed.set()

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            raise qkit.QueueNotFound(f"there is no queue {name!r}", backend="toy", queue=name)
        return self._queues[name]


class ToySubscription:
    """Subscription that keeps deliveries by receipt, so that a second settle fails."""

    def __init__(self, queue: Queue, prefetch: int) -> None:
        self.deliveries: dict[object, Delivery] = {}
        self._queue, self._prefetch, self._stopped = queue, prefetch, False

    async def receive(self, limit: int) -> list[Delivery]:
        # There is no await between the check and the claim, so a cancellation loses no message.
        while not self._stopped:
            if self._queue.deleted:
                raise qkit.SubscriptionLost("the queue was deleted", backend="toy")
            free = max(0, min(limit, self._prefetch - len(self.deliveries)))
            if envelopes := [self._queue.ready.pop(0) for _ in self._queue.ready[:free]]:
                return [self._hold(envelope) for envelope in envelopes]
            self._queue.changed.clear()
            await self._queue.changed.wait()
        return []

    def _hold(self, envelope: Envelope) -> Delivery:
        delivery = Delivery(replace(envelope), self._queue.spec.name, receipt := object())
        self._queue.held[receipt], self.deliveries[receipt] = envelope, delivery
        return delivery

    async def ack(self, delivery: Delivery) -> None:
        if self.deliveries.pop(delivery.receipt, None) is None:
            raise qkit.MessageNotFound("already settled", message_id=delivery.envelope.id)
        del self._queue.held[delivery.receipt]
        self._queue.changed.set()

    async def release(self, delivery: Delivery, _: float, *, count_attempt: bool = True) -> None:
        await self.ack(delivery)
        delivery.envelope.attempt += count_attempt
        self._queue.ready.insert(0, delivery.envelope)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        raise qkit.Unsupported("leases are not supported", backend="toy", operation="extend")

    async def stop(self) -> None:
        self._stopped = True
        self._queue.changed.set()


def open_toy(settings: qkit.Settings) -> Toy:
    return Toy()
