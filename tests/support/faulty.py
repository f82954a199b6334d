"""The native engine behind faults: calls fail, wait or are never answered, as a test says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from qkit._internal.clock import Clock
from qkit.backend import Capabilities, Delivery, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.subscription import NativeSubscription
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["BLACK_HOLE", "FaultyBackend"]


class _BlackHole:
    """A call that is never answered."""


BLACK_HOLE: Final = _BlackHole()
Fault = BaseException | asyncio.Event | _BlackHole | Callable[[], None] | None


class FaultyBackend:
    """``NativeBackend`` whose calls meet what was scripted for them.

    ``calls`` has every call in the order in which it began: ``("publish", "orders")``, and
    ``published`` the ids of each publish that went through. It may be started again after
    ``aclose``, with empty queues.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        name: str = "faulty",
        capabilities: Capabilities | None = None,
        max_depth: int = 100_000,
    ) -> None:
        self.name = name
        self.calls: list[tuple[str, str]] = []
        self.published: list[list[str]] = []
        self.specs: list[QueueSpec] = []
        self._clock = clock
        self._max_depth = max_depth
        self._native = self._new()
        self.capabilities = capabilities or self._native.capabilities
        self._script: dict[str, deque[Fault]] = {}
        self._always: dict[str, Fault] = {}
        self._callbacks: list[Callable[[DeadLetter], None]] = []
        self._closed = False

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

    def _new(self) -> NativeBackend:
        return NativeBackend(clock=self._clock, max_depth=self._max_depth)

    # Backend

    async def start(self) -> None:
        await self.meet("start")
        if self._closed:
            self._native = self._new()
            self._closed = False
            for callback in self._callbacks:
                self._native.on_dead_letter(callback)
        await self._native.start()

    async def declare(self, spec: QueueSpec) -> None:
        await self.meet("declare", spec.name)
        self.specs.append(spec)
        await self._native.declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        await self.meet("publish", queue)
        sent = await self._native.publish(queue, envelopes)
        self.published.append([envelope.id for envelope in envelopes])
        return sent

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[FaultySubscription]:
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[FaultySubscription, None]:
        await self.meet("subscribe", spec.queue)
        async with self._native.subscribe(spec) as inner:
            yield FaultySubscription(self, inner, spec.queue)
        self.calls.append(("unsubscribe", spec.queue))

    async def ping(self) -> None:
        await self.meet("ping")
        await self._native.ping()

    async def aclose(self) -> None:
        try:
            await self.meet("aclose")
        finally:
            self._closed = True
            await self._native.aclose()

    # Admin and DeadLetterSource

    async def queues(self) -> list[str]:
        return await self._native.queues()

    async def stats(self, queue: str) -> QueueStats:
        return await self._native.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        return await self._native.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        return await self._native.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        await self.meet("remove", queue)
        return await self._native.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        await self._native.delete(queue)

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        self._callbacks.append(callback)
        self._native.on_dead_letter(callback)


class FaultySubscription:
    """A native subscription whose calls meet the backend's faults."""

    def __init__(self, backend: FaultyBackend, inner: NativeSubscription, queue: str) -> None:
        self._backend = backend
        self._inner = inner
        self._queue = queue

    async def receive(self, limit: int) -> list[Delivery]:
        await self._backend.meet("receive", self._queue)
        return await self._inner.receive(limit)

    async def ack(self, delivery: Delivery) -> None:
        await self._backend.meet("ack", self._queue)
        await self._inner.ack(delivery)

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        await self._backend.meet("release" if count_attempt else "give back", self._queue)
        await self._inner.release(delivery, delay, count_attempt=count_attempt)

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        await self._inner.extend(delivery, seconds)

    async def stop(self) -> None:
        await self._backend.meet("stop", self._queue)
        await self._inner.stop()
