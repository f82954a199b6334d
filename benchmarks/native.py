"""The native engine in memory, and the whole SDK on it, as ratios in one run.

Beside the engine runs a bare ``asyncio.PriorityQueue``; beside the SDK runs taskiq's in-memory
broker, where it is installed. Repetitions are interleaved, medians are compared; absolute figures
differ from machine to machine and mean little. Writes ``benchmarks/native.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import BaseModel

from qkit import QueueService, Settings, consume
from qkit.native import Engine

BODY = b"x" * 100
Rates = dict[str, float]


class Order(BaseModel):
    """About a hundred bytes of JSON."""

    id: int
    total: float
    note: str = "x" * 60


async def bare_queue(count: int) -> Rates:
    """What asyncio itself can do, without ids, leases or acknowledgements."""
    queue: asyncio.PriorityQueue[tuple[int, int, bytes]] = asyncio.PriorityQueue()
    started = time.perf_counter()
    for number in range(count):
        await queue.put((5, number, BODY))
    filled = time.perf_counter()
    for _ in range(count):
        await queue.get()
    return _rates(count, started, filled, time.perf_counter())


async def engine(count: int) -> Rates:
    """Publish, then consume and acknowledge."""
    async with Engine() as engine:
        await engine.create("bench", max_depth=count)
        started = time.perf_counter()
        for _ in range(count):
            await engine.publish("bench", BODY)
        filled = time.perf_counter()
        for _ in range(count):
            delivery = await engine.consume("bench")
            assert delivery is not None
            await delivery.ack()
        return _rates(count, started, filled, time.perf_counter())


def _rates(count: int, started: float, filled: float, emptied: float) -> Rates:
    return {
        "publish": count / (filled - started),
        "consume": count / (emptied - filled),
        "cycle": count / (emptied - started),
    }


async def sdk(count: int) -> Rates:
    """Send → typed handler → acknowledged, all of it."""
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
        started = time.perf_counter()
        for _ in range(count):
            await service.send("bench", order)
        await done.wait()
        return {"whole": count / (time.perf_counter() - started)}


async def taskiq(count: int) -> Rates:
    """The quickest peer in memory, doing the same."""
    from taskiq import InMemoryBroker  # type: ignore[import-not-found]  # only if it is installed

    broker = InMemoryBroker(max_async_tasks=100)
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
    started = time.perf_counter()
    for _ in range(count):
        await task.kiq(order)
    await done.wait()
    rate = count / (time.perf_counter() - started)
    await broker.shutdown()
    return {"whole": rate}


def main() -> None:
    """Run everything and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="messages in a repetition")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each")
    options = parser.parse_args()
    logging.getLogger("qkit").setLevel(logging.CRITICAL)
    runs: dict[str, Callable[[int], Awaitable[Rates]]] = {
        "bare": bare_queue,
        "engine": engine,
        "sdk": sdk,
        "taskiq": taskiq,
    }
    seen: dict[str, list[Rates]] = {name: [] for name in runs}
    for _ in range(options.repeat):
        for name, run in runs.items():
            gc.collect()
            try:
                seen[name].append(asyncio.run(_timed(run, options.count)))
            except ImportError:
                continue
    rows = [
        ("engine publish / PriorityQueue.put", "engine", "bare", "publish"),
        ("engine consume + ack / PriorityQueue.get", "engine", "bare", "consume"),
        ("engine cycle / PriorityQueue cycle", "engine", "bare", "cycle"),
        ("whole SDK / taskiq in memory", "sdk", "taskiq", "whole"),
    ]
    results: dict[str, dict[str, float]] = {}
    for title, ours, theirs, figure in rows:
        if not seen[theirs]:
            print(f"{title:<44} {theirs} is not installed")
            continue
        pairs = zip(seen[ours], seen[theirs], strict=True)
        ratios = sorted(mine[figure] / other[figure] for mine, other in pairs)
        rate = statistics.median(item[figure] for item in seen[ours])
        ratio = statistics.median(ratios)
        results[title] = {"ratio": ratio, "low": ratios[0], "high": ratios[-1], "per_second": rate}
        print(f"{title:<44} {ratio:6.2f}  ({ratios[0]:.2f}–{ratios[-1]:.2f})  {rate:>10,.0f}/s")
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")


async def _timed(run: Callable[[int], Awaitable[Rates]], count: int) -> Rates:
    return await run(count)


if __name__ == "__main__":
    main()
