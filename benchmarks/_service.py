"""Measurements that all broker benchmarks share: send rates, consume rates and latencies."""

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
    "LatencyTimer",
    "address",
    "alternate",
    "batch_consume_rate",
    "concurrent_rate",
    "consume_rate",
    "create_service",
    "expired_rate",
    "median_latencies",
    "order_bytes",
    "sending_service",
    "sequential_rate",
    "unique",
]

IN_FLIGHT = 100
PREFETCH = 100
ROUNDS = 8  # alternations between the measured clients
ORDER = Order(id=1, total=9.5)


def address(broker: str) -> str:
    """Return the URL of a broker from the environment, where ``scripts/brokers run`` sets it."""
    url = os.environ.get(f"QKIT_TEST_{broker.upper()}_URL")
    if not url:
        raise Missing(f"no URL of {broker}: run the benchmark with scripts/brokers run")
    return url


def unique(name: str) -> str:
    """Return a unique name, so that messages of an earlier run are not consumed."""
    return f"bench-{name}-{uuid.uuid4().hex[:8]}"


def order_bytes() -> bytes:
    """Return ``ORDER`` as JSON, the message body of all broker benchmarks."""
    return ORDER.model_dump_json().encode()


class Countdown:
    """Timer from the first handled message to the last, which excludes the consumer's start."""

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._done = asyncio.Event()
        self._started = self._ended = 0.0

    def hit(self, number: int = 1) -> None:
        """Count handled messages."""
        if self._left == self._count:
            self._started = time.perf_counter()
        self._left -= number
        if self._left <= 0:
            self._ended = time.perf_counter()
            self._done.set()

    async def rate(self) -> float:
        """Wait for the last message, and return the messages per second."""
        async with asyncio.timeout(300):  # fail if the benchmark hangs
            await self._done.wait()
        return self._count / (self._ended - self._started)

    def rate_until_now(self) -> float:
        """Return the messages per second up to this call, made after the last message was acked."""
        return self._count / (time.perf_counter() - self._started)


async def sequential_rate(count: int, send: Callable[[], Awaitable[object]]) -> float:
    """Return the messages per second with one send in flight."""
    started = time.perf_counter()
    for _ in range(count):
        await send()
    return count / (time.perf_counter() - started)


async def concurrent_rate(count: int, send: Callable[[], Awaitable[object]]) -> float:
    """Return the messages per second with 100 sends in flight."""

    async def some() -> None:
        for _ in range(count // IN_FLIGHT):
            await send()

    started = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
    return count // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - started)


async def alternate(
    measure: Callable[[int, Callable[[], Awaitable[object]]], Awaitable[float]],
    count: int,
    *sends: Callable[[], Awaitable[object]],
) -> list[float]:
    """Return the median rate of each send, measured in turns so that load affects all equally."""
    rates: list[list[float]] = [[] for _ in sends]
    for turn in range(ROUNDS):
        order = list(zip(rates, sends, strict=True))
        for found, send in order if turn % 2 else reversed(order):
            found.append(await measure(max(IN_FLIGHT, count // ROUNDS), send))
    return [statistics.median(found) for found in rates]


def create_service(settings: Settings, *handlers: object) -> QueueService:
    """Return a service with registered handlers."""
    service = QueueService(settings)
    for handler in handlers:
        service.register(handler)
    return service


@asynccontextmanager
async def sending_service(settings: Settings, name: str) -> AsyncGenerator[QueueService, None]:
    """Start a service without handlers that has declared the channel; delete it afterwards."""
    async with create_service(settings) as service:
        await service.send(name, ORDER)
        await service.purge(name)
        yield service
        await service.delete(name)


async def consume_rate(
    settings: Settings, name: str, count: int, prefetch: int = PREFETCH
) -> float:
    """Return the messages per second of a typed handler that consumes a filled queue."""
    countdown = Countdown(count)

    @consume(name, prefetch=prefetch)
    async def handle(order: Order) -> None:
        countdown.hit()

    async with create_service(settings) as service:
        await service.send_many(name, [ORDER] * count)
    async with create_service(settings, handle) as service:
        rate = await countdown.rate()
        await service.delete(name)
    return rate


async def batch_consume_rate(settings: Settings, name: str, count: int, size: int) -> float:
    """Return the messages per second of a batch handler that consumes a filled queue."""
    countdown = Countdown(count)

    @consume(name, batch_size=size, batch_wait=0.1)
    async def handle(orders: list[Order]) -> None:
        countdown.hit(len(orders))

    async with create_service(settings) as service:
        await service.send_many(name, [ORDER] * count)
    async with create_service(settings, handle) as service:
        rate = await countdown.rate()
        await service.delete(name)
    return rate


async def expired_rate(
    settings: Settings, backend: Backend, name: str, count: int, *, broadcast: bool = False
) -> float:
    """Return how many expired messages per second are dead-lettered with ``concurrency=1``.

    The measurement ends when all expired messages are dead letters and the handler has received
    the live message behind them.

    Args:
        settings: Settings of the service.
        backend: Backend of the service, not started.
        name: Name of the channel.
        count: Number of expired messages.
        broadcast: Use a topic instead of a queue.
    """
    left, done = count + 1, asyncio.Event()

    def hit(_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    @consume(name, concurrency=1, prefetch=PREFETCH, broadcast=broadcast)
    async def handle(order: Order) -> None:
        hit(order)

    service = QueueService(settings, backend=backend)
    service.register(handle)
    service.on("dead_letter", hit)
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
        assert found == count, f"expected {count} dead letters, found {found}"
        await service.delete(name)
        await service.dead_letters(name).purge()
    return rate


class LatencyTimer:
    """Timer of single messages, from the call of send until the handler runs."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()

    def end(self) -> None:
        """Stop the timer; called by the handler."""
        self._arrived.set()

    async def times(self, count: int, send: Callable[[], Awaitable[object]]) -> list[float]:
        """Send messages one by one, with pauses, and return the latency of each in seconds."""
        seconds: list[float] = []
        for _ in range(count):
            started = time.perf_counter()
            await send()
            await self._arrived.wait()
            seconds.append(time.perf_counter() - started)
            self._arrived.clear()
            await asyncio.sleep(0.002)
        return seconds


async def median_latencies(
    settings: Settings,
    count: int,
    plain_timer: LatencyTimer,
    send_plain: Callable[[], Awaitable[object]],
) -> tuple[float, float]:
    """Return the median latencies of the plain client and qkit in ms, measured in turns."""
    name, timer = unique("latency"), LatencyTimer()

    @consume(name)
    async def handle(order: Order) -> None:
        timer.end()

    plain_times: list[float] = []
    qkit_times: list[float] = []
    async with create_service(settings, handle) as service:
        for _ in range(ROUNDS):
            plain_times += await plain_timer.times(max(1, count // ROUNDS), send_plain)
            qkit_times += await timer.times(
                max(1, count // ROUNDS), lambda: service.send(name, ORDER)
            )
        await service.delete(name)
    return 1000 * statistics.median(plain_times), 1000 * statistics.median(qkit_times)
