"""What the brokers' benchmarks time of qkit: sends, handled messages, the way of one message."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from benchmarks._in_memory import Order
from benchmarks._measure import Missing
from qkit import Backend, Envelope, QueueService, Settings, consume
from qkit._internal.ids import new_id

__all__ = [
    "IN_FLIGHT",
    "ORDER",
    "PREFETCH",
    "Countdown",
    "Trip",
    "address",
    "by_turns",
    "concurrently",
    "consuming",
    "consuming_batches",
    "dead_lettering_expired",
    "latencies",
    "one_by_one",
    "order_bytes",
    "sending",
    "service_of",
    "unique",
]

IN_FLIGHT = 100
PREFETCH = 100
TURNS = 8  # in which two are measured side by side
ORDER = Order(id=1, total=9.5)


def address(broker: str) -> str:
    """Where the broker is, from what ``scripts/brokers`` says."""
    url = os.environ.get(f"QKIT_TEST_{broker.upper()}_URL")
    if not url:
        raise Missing(f"no {broker}: run it with scripts/brokers run")
    return url


def unique(name: str) -> str:
    """A name that no other run uses: what is left of a former one must not be consumed."""
    return f"bench-{name}-{uuid.uuid4().hex[:8]}"


def order_bytes() -> bytes:
    """The body that all send."""
    return ORDER.model_dump_json().encode()


class Countdown:
    """Times handled messages from the first to the last: joining a group is not their cost."""

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._done = asyncio.Event()
        self._started = self._ended = 0.0

    def hit(self, number: int = 1) -> None:
        """So many more were handled."""
        if self._left == self._count:
            self._started = time.perf_counter()
        self._left -= number
        if self._left <= 0:
            self._ended = time.perf_counter()
            self._done.set()

    async def rate(self) -> float:
        """Messages a second, once the last was handled."""
        async with asyncio.timeout(300):  # a benchmark that stands still must say so
            await self._done.wait()
        return self._count / (self._ended - self._started)

    def rate_until_now(self) -> float:
        """Messages a second, for a worker that has just ended after its last acknowledgement."""
        return self._count / (time.perf_counter() - self._started)


async def one_by_one(count: int, send: Callable[[], Awaitable[object]]) -> float:
    """Messages a second, each awaited before the next."""
    started = time.perf_counter()
    for _ in range(count):
        await send()
    return count / (time.perf_counter() - started)


async def concurrently(count: int, send: Callable[[], Awaitable[object]]) -> float:
    """Messages a second with a hundred in flight."""

    async def some() -> None:
        for _ in range(count // IN_FLIGHT):
            await send()

    started = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
    return count // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - started)


async def by_turns(
    measure: Callable[[int, Callable[[], Awaitable[object]]], Awaitable[float]],
    count: int,
    *sends: Callable[[], Awaitable[object]],
) -> list[float]:
    """The rate of each, in turns: whatever else the machine does meets them all."""
    rates: list[list[float]] = [[] for _ in sends]
    for turn in range(TURNS):
        order = list(zip(rates, sends, strict=True))
        for found, send in order if turn % 2 else reversed(order):
            found.append(await measure(max(IN_FLIGHT, count // TURNS), send))
    return [statistics.median(found) for found in rates]


def service_of(settings: Settings, *handlers: object) -> QueueService:
    """A service with its handlers registered."""
    service = QueueService(settings)
    for handler in handlers:
        service.register(handler)
    return service


@asynccontextmanager
async def sending(settings: Settings, name: str) -> AsyncGenerator[QueueService, None]:
    """A service that only sends, its channel declared."""
    async with service_of(settings) as service:
        await service.send(name, ORDER)
        await service.purge(name)
        yield service
        await service.delete(name)


async def consuming(settings: Settings, name: str, count: int, prefetch: int = PREFETCH) -> float:
    """Messages a second that a typed handler gets, each acknowledged; the queue is full before."""
    countdown = Countdown(count)

    @consume(name, prefetch=prefetch)
    async def handle(order: Order) -> None:
        countdown.hit()

    async with service_of(settings) as service:
        await service.send_many(name, [ORDER] * count)
    async with service_of(settings, handle) as service:
        rate = await countdown.rate()
        await service.delete(name)
    return rate


async def consuming_batches(settings: Settings, name: str, count: int, size: int) -> float:
    """The same with a handler that takes a list."""
    countdown = Countdown(count)

    @consume(name, batch_size=size, batch_wait=0.1)
    async def handle(orders: list[Order]) -> None:
        countdown.hit(len(orders))

    async with service_of(settings) as service:
        await service.send_many(name, [ORDER] * count)
    async with service_of(settings, handle) as service:
        rate = await countdown.rate()
        await service.delete(name)
    return rate


async def dead_lettering_expired(
    settings: Settings, backend: Backend, name: str, count: int, *, broadcast: bool = False
) -> float:
    """Expired messages a second ahead of a live one, with one handler at a time.

    Each becomes a dead letter; the handler gets the message behind them.

    Args:
        settings: Settings of the service.
        backend: Its backend, not started.
        name: Name of the channel.
        count: Number of expired messages.
        broadcast: Use a topic instead of a queue.
    """
    done = asyncio.Event()

    @consume(name, concurrency=1, prefetch=PREFETCH, broadcast=broadcast)
    async def handle(order: Order) -> None:
        done.set()

    service = QueueService(settings, backend=backend)
    service.register(handle)
    async with service:
        service.pause(name)
        past, body = time.time() - 60, order_bytes()
        for start in range(0, count, 500):
            some = [
                Envelope(new_id(), body, expires_at=past) for _ in range(min(500, count - start))
            ]
            await backend.publish(name, some)
        await backend.publish(name, [Envelope(new_id(), body)])
        started = time.perf_counter()
        service.resume(name)
        async with asyncio.timeout(300):
            await done.wait()
        rate = count / (time.perf_counter() - started)
        found = len(await service.dead_letters(name).list(count + 1))
        assert found == count, f"{found} dead letters instead of {count}"
        await service.delete(name)
        await service.dead_letters(name).purge()
    return rate


class Trip:
    """Times one message after the other, from the call that sends it to the handler."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()

    def end(self) -> None:
        """The handler has it."""
        self._arrived.set()

    async def times(self, count: int, send: Callable[[], Awaitable[object]]) -> list[float]:
        """Seconds of each, with a rest between them."""
        seconds: list[float] = []
        for _ in range(count):
            started = time.perf_counter()
            await send()
            await self._arrived.wait()
            seconds.append(time.perf_counter() - started)
            self._arrived.clear()
            await asyncio.sleep(0.002)
        return seconds


async def latencies(
    settings: Settings, count: int, raw: Trip, send_raw: Callable[[], Awaitable[object]]
) -> tuple[float, float]:
    """The medians of the raw client and of qkit in milliseconds, taken in turns."""
    name, own = unique("latency"), Trip()

    @consume(name)
    async def handle(order: Order) -> None:
        own.end()

    theirs: list[float] = []
    ours: list[float] = []
    async with service_of(settings, handle) as service:
        for _ in range(TURNS):
            theirs += await raw.times(max(1, count // TURNS), send_raw)
            ours += await own.times(max(1, count // TURNS), lambda: service.send(name, ORDER))
        await service.delete(name)
    return 1000 * statistics.median(theirs), 1000 * statistics.median(ours)
