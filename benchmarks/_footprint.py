"""Benchmarks of memory per message and per queue, and of how costs grow with size."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Mapping

from benchmarks._in_memory import BODY
from benchmarks._measure import Figure, Scale, Suite
from qkit.native import Engine

__all__ = ["SUITES"]


def _used() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _memory(scale: Scale) -> Mapping[str, float]:
    """Measure memory with tracemalloc; all messages share one body, so it is not counted."""
    count, queues = scale.of(50_000, 500), scale.of(1_000, 20)
    tracemalloc.start()
    try:
        async with Engine() as engine:
            await engine.create("bench", max_depth=count)
            before = _used()
            for _ in range(count):
                await engine.publish("bench", BODY)
            queued = _used()
            for _ in range(count):
                await engine.consume("bench")
            held = _used()
            for number in range(queues):
                await engine.create(f"queue-{number}")
            declared = _used()
        async with await Engine.open(scale.directory / "engine", fsync="never") as engine:
            await engine.create("bench", max_depth=count)
            empty = _used()
            for _ in range(count):
                await engine.publish("bench", BODY)
            durable = _used()
    finally:
        tracemalloc.stop()
    return {
        "footprint.message": (queued - before) / count,
        "footprint.in_flight": (held - queued) / count,
        "footprint.queue": (declared - held) / queues,
        "footprint.durable": (durable - empty) / count,
    }


async def _publish(engine: Engine, names: list[str]) -> float:
    started = time.process_time()
    for name in names:
        await engine.publish(name, BODY)
    return time.process_time() - started


async def _many_queues(scale: Scale) -> Mapping[str, float]:
    number = scale.of(10_000, 50)
    async with Engine() as engine:
        names = [f"queue-{at}" for at in range(number)]
        for name in names:
            await engine.create(name)
        await engine.create("one", max_depth=10 * number)
        one = ["one"] * number
        await _publish(engine, one + names)  # the first message of a queue allocates its bucket
        many = single = 0.0
        for _ in range(4):
            single += await _publish(engine, one)
            many += await _publish(engine, names)
    return {"scale.queues": many / single, "scale.queues_bare": await _many_bare_queues(number)}


async def _many_bare_queues(number: int) -> float:
    """Measure the same ratio with asyncio's queues, where only CPU caches make a difference."""
    queues: list[asyncio.PriorityQueue[tuple[int, int, bytes]]]
    queues = [asyncio.PriorityQueue() for _ in range(number)]
    one = [asyncio.PriorityQueue[tuple[int, int, bytes]]()] * number
    spent: dict[int, float] = {}
    for turn in range(5):
        for targets in (one, queues):
            started = time.process_time()
            for at, queue in enumerate(targets):
                await queue.put((5, turn * number + at, BODY))
            if turn:
                key = id(targets)
                spent[key] = spent.get(key, 0.0) + time.process_time() - started
    return spent[id(queues)] / spent[id(one)]


async def _at_depth(depth: int, rounds: int, chunk: int = 500) -> tuple[float, float]:
    async with Engine() as engine:
        await engine.create("bench", max_depth=depth + chunk)
        for _ in range(depth):
            await engine.publish("bench", BODY)
        gc.collect()
        publish = consumed = 0.0
        for _ in range(rounds):
            started = time.process_time()
            for _ in range(chunk):
                await engine.publish("bench", BODY)
            filled = time.process_time()
            for _ in range(chunk):
                delivery = await engine.consume("bench")
                assert delivery is not None
                await delivery.ack()
            consumed += time.process_time() - filled
            publish += filled - started
        return publish, consumed


async def _depth(scale: Scale) -> Mapping[str, float]:
    rounds = scale.of(100, 2)
    before = await _at_depth(1_000, rounds)
    deep = await _at_depth(scale.of(1_000_000, 5_000), rounds)
    after = await _at_depth(1_000, rounds)
    return {
        "scale.depth_publish": deep[0] / ((before[0] + after[0]) / 2),
        "scale.depth_consume": deep[1] / ((before[1] + after[1]) / 2),
    }


SUITES = (
    Suite(
        "footprint",
        (
            Figure("footprint.message", "queued message without its body", 200, "B", at_most=True),
            Figure("footprint.in_flight", "additional memory in flight", 150, "B", at_most=True),
            Figure("footprint.queue", "empty queue", 1_300, "B", at_most=True),
            Figure("footprint.durable", "queued durable message without its body", None, "B"),
        ),
        _memory,
    ),
    Suite(
        "queues",
        (
            Figure("scale.queues", "publish to 10,000 queues / to one", 1.2, at_most=True),
            Figure("scale.queues_bare", "PriorityQueue.put to 10,000 queues / to one"),
        ),
        _many_queues,
    ),
    Suite(
        "depth",
        (
            Figure("scale.depth_publish", "publish at depth 1,000,000 / 1,000", 1.2, at_most=True),
            Figure("scale.depth_consume", "consume + ack at 1,000,000 / 1,000", 1.2, at_most=True),
        ),
        _depth,
    ),
)
