"""Benchmarks of opening a durable engine, and of event-loop lag while its log is maintained."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks._durable import IN_FLIGHT
from benchmarks._in_memory import BODY
from benchmarks._measure import Figure, Scale, Suite
from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit.backends.native.backend import NativeBackend
from qkit.message import Envelope
from qkit.native import Engine
from qkit.native.log.disk import Disk
from qkit.native.storage.storage import Storage

__all__ = ["SUITES"]

PUBLISH_BATCH_SIZE = 1_000  # messages per call that fills a log
TICK_SECONDS = 0.001


@asynccontextmanager
async def _without_maintenance(path: Path, segment_bytes: int = 64 << 20) -> AsyncGenerator[Engine]:
    """Open an engine without automatic maintenance of its log."""
    engine = Engine(clock=SystemClock())
    clock = engine.clock
    storage = Storage(Disk(path), clock=clock, fsync="never", segment_bytes=segment_bytes)
    await engine.attach(storage)
    maintenance = storage._maintenance_task
    assert maintenance is not None
    maintenance.cancel()
    async with engine:
        yield engine


async def _fill(engine: Engine, queue: str, count: int) -> None:
    backend = NativeBackend(engine=engine)
    for start in range(0, count, PUBLISH_BATCH_SIZE):
        number = min(PUBLISH_BATCH_SIZE, count - start)
        await backend.publish(queue, [Envelope(new_id(), BODY) for _ in range(number)])


async def _settle(engine: Engine, queue: str, count: int) -> None:
    async def worker(share: int) -> None:
        for _ in range(share):
            delivery = await engine.consume(queue)
            assert delivery is not None
            await delivery.ack()

    await asyncio.gather(*[worker(count // IN_FLIGHT) for _ in range(IN_FLIGHT)])


async def _open(path: Path) -> float:
    gc.collect()
    started = time.perf_counter()
    engine = await Engine.open(path, fsync="never")
    spent = time.perf_counter() - started
    await engine.aclose()
    return spent


async def _maintain(path: Path, *, compact: bool = True) -> None:
    async with _without_maintenance(path) as engine:
        await engine.storage.maintain(compact=compact)


def _delete_snapshots(path: Path) -> None:
    for snapshot in path.rglob("*.snap"):
        snapshot.unlink()


async def _recovery(scale: Scale) -> Mapping[str, float]:
    records = scale.of(1_000_000, 3_000)
    # One third publishes, one third claims, one third acks; 1 % of the messages stay unsettled.
    settled = scale.directory / "settled"
    async with _without_maintenance(settled) as engine:
        await engine.create("bench", max_depth=records)
        number = records // 3
        for _ in range(10):  # fill and settle in turns, because a real queue is rarely deep
            await _fill(engine, "bench", number // 10)
            await _settle(engine, "bench", number // 10 * 99 // 100)
    await _maintain(settled, compact=False)
    settled_snapshot = await _open(settled)
    _delete_snapshots(settled)
    log = await _open(settled)
    await _maintain(settled)
    tidied = await _open(settled)

    live = scale.directory / "live"
    async with _without_maintenance(live) as engine:
        await engine.create("bench", max_depth=records)
        await _fill(engine, "bench", records)
    await _maintain(live)
    with_snapshot = await _open(live)
    _delete_snapshots(live)
    without = await _open(live)
    shutil.rmtree(settled)
    shutil.rmtree(live)
    return {
        "recovery.settled": log / settled_snapshot,
        "recovery.settled_seconds": log,
        "recovery.settled_tidied": log / tidied,
        "recovery.live": without / with_snapshot,
        "recovery.live_seconds": without,
        "recovery.live_snapshot_seconds": with_snapshot,
    }


class _LagMonitor:
    """Context manager that measures the longest delay of a periodic task on the event loop."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.own = 0.0  # the same in CPU time of the loop's thread only

    async def __aenter__(self) -> _LagMonitor:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        while True:
            before, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_SECONDS)
            self.longest = max(self.longest, time.perf_counter() - before - TICK_SECONDS)
            self.own = max(self.own, time.thread_time() - worked)


async def _compaction(scale: Scale) -> Mapping[str, float]:
    """Publish while compacting a log; in half of its segments, 40 % of the messages are live."""
    live, reserve = scale.of(1_000_000, 5_000), scale.of(10_000, 100)
    segment = scale.of(8 << 20, 64 << 10)
    dense = segment // 180  # approximate number of messages in a segment
    sparse = dense * 2 // 5
    async with _without_maintenance(scale.directory / "engine", segment) as engine:
        await engine.create("kept", max_depth=2 * live)
        await engine.create("purged", max_depth=2 * live)
        remaining = live - reserve
        while remaining > 0:
            await _fill(engine, "kept", min(remaining, dense))
            remaining -= dense
            for _ in range(10):
                await _fill(engine, "kept", max(0, min(remaining, sparse // 10)))
                await _fill(engine, "purged", (dense - sparse) // 10)
                remaining -= sparse // 10
        await engine.purge("purged")
        gc.collect()
        published = 0

        async def publish() -> None:
            nonlocal published
            while published < reserve:
                published += 1
                await engine.publish("kept", BODY)
                await asyncio.sleep(TICK_SECONDS)

        publisher = asyncio.create_task(publish())
        async with _LagMonitor() as idle:
            await asyncio.sleep(scale.of(3, 0))
        started = time.perf_counter()
        async with _LagMonitor() as lag:
            await engine.storage.maintain()
        spent = time.perf_counter() - started
        publisher.cancel()
        await asyncio.wait([publisher])
    return {
        "compaction.lag": 1000 * lag.longest,
        "compaction.lag_own": 1000 * lag.own,
        "compaction.lag_idle": 1000 * idle.longest,
        "compaction.seconds": spent,
    }


SUITES = (
    Suite(
        "recovery",
        (
            Figure(
                "recovery.settled", "1,000,000 records, 99 % settled: without / with snapshot", 10.0
            ),
            Figure("recovery.settled_seconds", "99 % settled: without snapshot", None, "s"),
            Figure("recovery.settled_tidied", "99 % settled: without / compacted with snapshot"),
            Figure("recovery.live", "1,000,000 live messages: without / with snapshot"),
            Figure("recovery.live_seconds", "live messages: without snapshot", None, "s"),
            Figure("recovery.live_snapshot_seconds", "live messages: with snapshot", None, "s"),
        ),
        _recovery,
        costly=True,
    ),
    Suite(
        "compaction",
        (
            Figure(
                "compaction.lag",
                "longest loop lag at 1,000,000 live messages",
                50,
                "ms",
                at_most=True,
            ),
            Figure("compaction.lag_own", "longest CPU time of the loop in a tick", None, "ms"),
            Figure("compaction.lag_idle", "longest loop lag without maintenance", None, "ms"),
            Figure("compaction.seconds", "duration of the maintenance", None, "s"),
        ),
        _compaction,
        costly=True,
    ),
)
