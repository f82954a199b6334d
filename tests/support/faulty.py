"""The native engine behind faults: calls fail, wait or are never answered, as a test says."""

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
    """A call that is never answered."""


BLACK_HOLE: Final = _BlackHole()
Fault = BaseException | asyncio.Event | _BlackHole | Callable[[], None] | None


class FaultyBackend(FaultInjectingBackend):
    """``NativeBackend`` whose calls meet what was scripted for them.

    ``calls`` has every call in the order in which it began: ``("publish", "orders")``, and
    ``published`` the ids of each publish that went through. It may be started again after
    ``aclose``, with empty queues. ``native`` is the backend behind the faults.
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

    # What a test says

    def script(self, call: str, *faults: Fault) -> None:
        """What the next calls of that name meet, one each; ``None`` goes through."""
        self._script.setdefault(call, deque()).extend(faults)

    def always(self, call: str, fault: Fault) -> None:
        """What every call of that name meets, until ``heal``."""
        self._always[call] = fault

    def heal(self, call: str) -> None:
        """Calls of that name go through again."""
        self._always.pop(call, None)
        self._script.pop(call, None)

    def count(self, call: str) -> int:
        """How often it was called."""
        return sum(name == call for name, _ in self.calls)

    def names(self, *but: str) -> list[str]:
        """The names of the calls in order, repetitions left out."""
        found = [name for name, _ in self.calls if name not in but]
        return [name for place, name in enumerate(found) if place == 0 or found[place - 1] != name]

    async def meet(self, call: str, subject: str = "") -> None:
        """Record a call and meet its fault."""
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
        await self.meet("release" if count_attempt else "give back", delivery.queue)
        await subscription.release(delivery, delay, count_attempt=count_attempt)

    async def stopping(self, subscription: Subscription) -> None:
        await self.meet("stop")
