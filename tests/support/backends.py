"""Scripted backend for tests, which injects faults and records calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields, replace

from qkit.backend import Capabilities, Delivery, QueueSpec, SubscriptionSpec, Support
from qkit.errors import MessageNotFound, QueueError
from qkit.message import Envelope, Sent

__all__ = ["ScriptedBackend", "can"]

Call = tuple[object, ...]
Step = BaseException | asyncio.Event | float | Callable[[], Awaitable[object]] | None


def can(**but: Support) -> Capabilities:
    """Return ``Capabilities`` with native support for everything except the given ones."""
    everything = {item.name: Support.NATIVE for item in fields(Capabilities)}
    return Capabilities(**(everything | but))


class ScriptedBackend:
    """Backend with in-memory queues, whose next calls fail or hang as scripted.

    ``calls`` lists the calls in order, for example ``("publish", queue, id)``, ``("ack", id)``,
    ``("release", id, delay, count_attempt)``, ``("subscribe", queue)`` or ``("extend", id)``. A
    call is recorded when it succeeds. A scripted error is recorded as ``("failed", operation)``.
    """

    def __init__(
        self,
        capabilities: Capabilities | None = None,
        *,
        lease: float | None = None,
        gathers_acks: bool = False,
    ):
        self.name = "scripted"
        self.capabilities = capabilities if capabilities is not None else can()
        self.calls: list[Call] = []
        self.declared: list[QueueSpec] = []
        self.queues: dict[str, deque[Envelope]] = {}
        self.held: dict[str, Envelope] = {}
        self.most_held = 0
        self._lease = lease
        self._kind = GatheringSubscription if gathers_acks else ScriptedSubscription
        self._script: dict[str, deque[Step]] = {}
        self._arrived = asyncio.Event()
        self._live: list[ScriptedSubscription] = []

    # Faults

    def script(self, operation: str, *steps: Step) -> None:
        """Add steps for the next calls of an operation, one for each call.

        A step is an error to raise, an event to wait for, a number of seconds to sleep, a coroutine
        function to run, or ``None`` to do nothing.
        """
        self._script.setdefault(operation, deque()).extend(steps)
        self._arrived.set()  # wake a parked receive, which then runs its next step

    def put(self, queue: str, *envelopes: Envelope) -> None:
        """Add messages to a queue without recording a call."""
        self.queues.setdefault(queue, deque()).extend(envelopes)
        self._arrived.set()

    def lose(self, *ids: str) -> None:
        """Revoke deliveries and report them to their consumers as lost."""
        for subscription in self._live:
            subscription.lose(ids)

    def count(self, operation: str) -> int:
        """Return the number of recorded calls of an operation."""
        return sum(call[0] == operation for call in self.calls)

    def of(self, *operations: str) -> list[Call]:
        """Return the calls of these operations, in order."""
        return [call for call in self.calls if call[0] in operations]

    async def _step(self, operation: str) -> None:
        steps = self._script.get(operation)
        step = steps.popleft() if steps else None
        if isinstance(step, BaseException):
            self.calls.append(("failed", operation))
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif callable(step):
            await step()
        elif step is not None:
            await asyncio.sleep(step)

    # Backend

    async def start(self) -> None:
        await self._step("start")

    async def declare(self, spec: QueueSpec) -> None:
        self.declared.append(spec)
        self.queues.setdefault(spec.name, deque())

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        await self._step("publish")
        for envelope in envelopes:
            self.calls.append(("publish", queue, envelope.id))
            self.put(queue, replace(envelope, headers=dict(envelope.headers)))
        return [Sent(envelope.id) for envelope in envelopes]

    def subscribe(
        self, spec: SubscriptionSpec
    ) -> AbstractAsyncContextManager[ScriptedSubscription]:
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncIterator[ScriptedSubscription]:
        await self._step("subscribe")
        self.calls.append(("subscribe", spec.queue))
        subscription = self._kind(self, spec, self._lease)
        self._live.append(subscription)
        try:
            yield subscription
        finally:
            self._live.remove(subscription)
            for envelope in subscription.held.values():
                self.queues[spec.queue].appendleft(envelope)
                self.calls.append(("release uncounted", envelope.id))
            self._arrived.set()

    async def ping(self) -> None:
        await self._step("ping")

    async def aclose(self) -> None:
        self.calls.append(("aclose",))


class ScriptedSubscription:
    """Subscription of a ``ScriptedBackend``."""

    def __init__(self, backend: ScriptedBackend, spec: SubscriptionSpec, lease: float | None):
        self._backend = backend
        self._queue = spec.queue
        self._lease = lease
        self.held: dict[str, Envelope] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._loss_callbacks: list[Callable[[Sequence[Delivery]], None]] = []

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        self._loss_callbacks.append(callback)

    def lose(self, ids: Sequence[str]) -> None:
        lost = [self._deliveries[id] for id in ids if self.held.pop(id, None) is not None]
        for callback in self._loss_callbacks:
            callback(lost)

    async def receive(self, limit: int) -> list[Delivery]:
        backend = self._backend
        queue = backend.queues[self._queue]
        while True:
            await backend._step("receive")
            if queue:
                break
            backend._arrived.clear()
            await backend._arrived.wait()
        taken = [queue.popleft() for _ in range(min(limit, len(queue)))]
        for envelope in taken:
            self.held[envelope.id] = envelope
        backend.most_held = max(backend.most_held, len(self.held))
        found = [
            Delivery(replace(item, headers=dict(item.headers)), self._queue, item.id, self._lease)
            for item in taken
        ]
        self._deliveries.update((delivery.envelope.id, delivery) for delivery in found)
        return found

    def _settled(self, delivery: Delivery) -> Envelope:
        try:
            return self.held.pop(delivery.envelope.id)
        except KeyError:
            raise MessageNotFound("the delivery was already settled") from None

    async def ack(self, delivery: Delivery) -> None:
        await self._backend._step("ack")
        self._settled(delivery)
        self._backend.calls.append(("ack", delivery.envelope.id))

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        await self._backend._step("release")
        envelope = self._settled(delivery)
        self._backend.calls.append(("release", envelope.id, delay, count_attempt))
        again = replace(
            envelope,
            headers=dict(delivery.envelope.headers),
            attempt=envelope.attempt + count_attempt,
        )
        asyncio.get_running_loop().call_later(delay, self._backend.put, self._queue, again)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        await self._backend._step("extend")
        self._backend.calls.append(("extend", delivery.envelope.id))

    async def stop(self) -> None:
        await self._backend._step("stop")
        self._backend.calls.append(("stop", self._queue))


class GatheringSubscription(ScriptedSubscription):
    """Subscription with ``ack_many``, recorded as ``("ack_many", ids…)``."""

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        await self._backend._step("ack_many")
        results: list[QueueError | None] = []
        for delivery in deliveries:
            try:
                self._settled(delivery)
            except MessageNotFound as error:
                results.append(error)
            else:
                results.append(None)
        self._backend.calls.append(("ack_many", *(item.envelope.id for item in deliveries)))
        return results
