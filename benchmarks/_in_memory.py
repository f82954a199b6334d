"""Benchmarks of the in-memory engine against asyncio's queue, and of the SDK against taskiq.

Nothing waits for a disk here, so ratios and rates use CPU time, which varies less than wall-clock
time on a busy machine. Latencies use wall-clock time.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from benchmarks._measure import Figure, Missing, Scale, Suite
from qkit import QueueService, Settings, consume
from qkit.native import Engine

__all__ = ["BODY", "SUITES", "Order", "peer"]

BODY = b"x" * 100


class Order(BaseModel):
    """Message body of about 100 bytes as JSON."""

    id: int
    total: float
    note: str = "x" * 60


def peer(name: str) -> Any:
    """Import a module of requirements/bench.txt; raise ``Missing`` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} is not installed") from error


async def _bare_queue(count: int) -> tuple[float, float]:
    """Measure asyncio's queue, which has no ids, leases or acks."""
    queue: asyncio.PriorityQueue[tuple[int, int, bytes]] = asyncio.PriorityQueue()
    started = time.process_time()
    for number in range(count):
        await queue.put((5, number, BODY))
    filled = time.process_time()
    for _ in range(count):
        await queue.get()
    return filled - started, time.process_time() - filled


async def _engine(count: int) -> tuple[float, float]:
    async with Engine() as engine:
        await engine.create("bench", max_depth=count)
        started = time.process_time()
        for _ in range(count):
            await engine.publish("bench", BODY)
        filled = time.process_time()
        for _ in range(count):
            delivery = await engine.consume("bench")
            assert delivery is not None
            await delivery.ack()
        return filled - started, time.process_time() - filled


async def _in_memory(scale: Scale) -> Mapping[str, float]:
    count = scale.count
    put, get = await _bare_queue(count)
    publish, consumed = await _engine(count)
    return {
        "memory.publish": put / publish,
        "memory.consume": get / consumed,
        "memory.cycle": (put + get) / (publish + consumed),
        "memory.publish_rate": count / publish,
        "memory.consume_rate": count / consumed,
    }


async def _latency(scale: Scale) -> Mapping[str, float]:
    now = time.perf_counter
    publish: list[float] = []
    consumed: list[float] = []
    ack: list[float] = []
    async with Engine() as engine:
        await engine.create("bench", max_depth=scale.count)
        for _ in range(scale.count):
            started = now()
            await engine.publish("bench", BODY)
            publish.append(now() - started)
        for _ in range(scale.count):
            started = now()
            delivery = await engine.consume("bench")
            taken = now()
            assert delivery is not None
            await delivery.ack()
            ack.append(now() - taken)
            consumed.append(taken - started)
    return {
        "memory.publish_p99": _p99(publish),
        "memory.consume_p99": _p99(consumed),
        "memory.ack_p99": _p99(ack),
    }


def _p99(seconds: list[float]) -> float:
    return 1000 * sorted(seconds)[int(len(seconds) * 0.99)]


async def _sdk(count: int) -> float:
    """Measure the whole path: send, typed handler, ack."""
    done = asyncio.Event()
    handled = 0

    @consume("bench")
    async def handle(order: Order) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    service = QueueService(Settings(type="native"))
    service.register(handle)
    async with service:
        order = Order(id=1, total=9.5)
        started = time.process_time()
        for _ in range(count):
            await service.send("bench", order)
        await done.wait()
        return time.process_time() - started


async def _taskiq(count: int) -> float:
    """Measure the same path in taskiq, the fastest peer in memory."""
    broker = peer("taskiq").InMemoryBroker(max_async_tasks=100)
    done = asyncio.Event()
    handled = 0

    async def handle(order: Order) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    task = broker.task(handle)
    await broker.startup()
    order = Order(id=1, total=9.5)
    started = time.process_time()
    for _ in range(count):
        await task.kiq(order)
    await done.wait()
    spent = time.process_time() - started
    await broker.shutdown()
    return spent


async def _whole(scale: Scale) -> Mapping[str, float]:
    count = max(1, scale.count // 2)
    taskiq = await _taskiq(count)
    sdk = await _sdk(count)
    return {"sdk.whole": taskiq / sdk, "sdk.rate": count / sdk}


SUITES = (
    Suite(
        "memory",
        (
            Figure("memory.publish", "engine publish / PriorityQueue.put", 0.6),
            Figure("memory.consume", "engine consume + ack / PriorityQueue.get", 1.0),
            Figure("memory.cycle", "engine cycle / PriorityQueue cycle", 0.8),
            Figure("memory.publish_rate", "publishes per CPU second", 50_000, "/s"),
            Figure("memory.consume_rate", "consume + ack per CPU second", 100_000, "/s"),
        ),
        _in_memory,
    ),
    Suite(
        "latency",
        (
            Figure("memory.publish_p99", "publish, 99th percentile", 1.0, "ms", at_most=True),
            Figure("memory.consume_p99", "consume, 99th percentile", 0.5, "ms", at_most=True),
            Figure("memory.ack_p99", "ack, 99th percentile", 0.5, "ms", at_most=True),
        ),
        _latency,
    ),
    Suite(
        "sdk",
        (
            Figure("sdk.whole", "whole SDK, send to ack / taskiq in memory", 4.0),
            Figure("sdk.rate", "whole SDK, messages per CPU second", None, "/s"),
        ),
        _whole,
    ),
)
