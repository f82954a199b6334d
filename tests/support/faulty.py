"""Native backend whose calls fail, wait or never return, as scripted by a test."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from qkit._internal.clock import Clock
from qkit.backend import Capabilities, Delivery, QueueSpec, Subscription, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import FaultInjectingBackend
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["BLACK_HOLE", "FaultyBackend"]


class _BlackHole:
    """Fault that makes a call never return."""


BLACK_HOLE: Final = _BlackHole()
Fault = BaseException | asyncio.Event | _BlackHole | Callable[[], None] | None


class FaultyBackend(FaultInjectingBackend):
    """``NativeBackend`` with scripted faults.

    ``calls`` lists all calls in the order they started, for example ``("publish", "orders")``.
    ``published`` has a list of message ids for each successful publish. After ``aclose`` the
    backend may be started again, with empty queues. ``native`` is the wrapped backend.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        name: str = "faulty",
        capabilities: Capabilities | None = None,
        max_depth: int = 100_000,
    ) -> None:
        self._clock = clock
        self._max_depth = max_depth
        self.native = self._new()
        super().__init__(self.native)
        self.name = name
        if capabilities is not None:
            self.capabilities = capabilities
        self.calls: list[tuple[str, str]] = []
        self.published: list[list[str]] = []
        self.specs: list[QueueSpec] = []
        self._script: dict[str, deque[Fault]] = {}
        self._always: dict[str, Fault] = {}
        self._callbacks: list[Callable[[DeadLetter], None]] = []
        self._closed = False

    def _new(self) -> NativeBackend:
        return NativeBackend(clock=self._clock, max_depth=self._max_depth)

    # Faults

    def script(self, call: str, *faults: Fault) -> None:
        """Inject the faults into the next calls, one into each; ``None`` lets a call succeed."""
        self._script.setdefault(call, deque()).extend(faults)

    def always(self, call: str, fault: Fault) -> None:
        """Inject a fault into every call that has no scripted fault, until ``heal``."""
        self._always[call] = fault

    def heal(self, call: str) -> None:
        """Remove all faults of a call."""
        self._always.pop(call, None)
        self._script.pop(call, None)

    def count(self, call: str) -> int:
        """Return how often ``call`` was called."""
        return sum(name == call for name, _ in self.calls)

    def names(self, *but: str) -> list[str]:
        """Return the names of the calls in order, without ``but`` and consecutive duplicates."""
        found = [name for name, _ in self.calls if name not in but]
        return [name for index, name in enumerate(found) if index == 0 or found[index - 1] != name]

    async def meet(self, call: str, subject: str = "") -> None:
        """Record a call and inject its next fault, if any."""
        self.calls.append((call, subject))
        script = self._script.get(call)
        fault = script.popleft() if script else self._always.get(call)
        if isinstance(fault, BaseException):
            raise fault
        if isinstance(fault, asyncio.Event):
            await fault.wait()
        elif isinstance(fault, _BlackHole):
            await asyncio.get_running_loop().create_future()
        elif fault is not None:
            fault()

    # Backend

    async def start(self) -> None:
        await self.meet("start")
        if self._closed:
            name, capabilities = self.name, self.capabilities
            self.native = self._new()
            self.wrap(self.native)
            self.name, self.capabilities = name, capabilities
            self._closed = False
            for callback in self._callbacks:
                self.native.on_dead_letter(callback)
        await super().start()

    async def declare(self, spec: QueueSpec) -> None:
        await self.meet("declare", spec.name)
        self.specs.append(spec)
        await super().declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        await self.meet("publish", queue)
        sent = await super().publish(queue, envelopes)
        self.published.append([envelope.id for envelope in envelopes])
        return sent

    async def subscribing(self, spec: SubscriptionSpec) -> None:
        await self.meet("subscribe", spec.queue)

    async def ping(self) -> None:
        await self.meet("ping")
        await super().ping()

    async def aclose(self) -> None:
        try:
            await self.meet("aclose")
        finally:
            self._closed = True
            await super().aclose()

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        await self.meet("remove", queue)
        return await self.native.remove(queue, ids)

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        self._callbacks.append(callback)
        self.native.on_dead_letter(callback)

    # Subscription

    async def receive(self, subscription: Subscription, limit: int) -> list[Delivery]:
        await self.meet("receive")
        return await subscription.receive(limit)

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        await self.meet("ack", delivery.queue)
        await subscription.ack(delivery)

    async def release(
        self, subscription: Subscription, delivery: Delivery, delay: float, count_attempt: bool
    ) -> None:
        await self.meet("release" if count_attempt else "release uncounted", delivery.queue)
        await subscription.release(delivery, delay, count_attempt=count_attempt)

    async def stopping(self, subscription: Subscription) -> None:
        await self.meet("stop")
