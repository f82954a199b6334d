"""How long a durable engine takes to open, and how long tidying its log holds the event loop."""

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

TOGETHER = 1_000  # messages of one publish while a log is made
TICK = 0.001


@asynccontextmanager
async def _untidied(path: Path, segment_bytes: int = 64 << 20) -> AsyncGenerator[Engine]:
    """An engine whose log is tidied only when it is asked for."""
    engine = Engine(clock=SystemClock())
    clock = engine.clock
    storage = Storage(Disk(path), clock=clock, fsync="never", segment_bytes=segment_bytes)
    await engine.attach(storage)
    keeper = storage._maintenance_task
    assert keeper is not None
    keeper.cancel()
    async with engine:
        yield engine


async def _fill(engine: Engine, queue: str, count: int) -> None:
    backend = NativeBackend(engine=engine)
    for start in range(0, count, TOGETHER):
        number = min(TOGETHER, count - start)
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


async def _tidy(path: Path, *, compact: bool = True) -> None:
    async with _untidied(path) as engine:
        await engine.storage.maintain(compact=compact)


def _without_snapshot(path: Path) -> None:
    for snapshot in path.rglob("*.snap"):
        snapshot.unlink()


async def _recovery(scale: Scale) -> Mapping[str, float]:
    records = scale.of(1_000_000, 3_000)
    # A third are publishes, a third claims, a third acks, but for one message in a hundred.
    settled = scale.directory / "settled"
    async with _untidied(settled) as engine:
        await engine.create("bench", max_depth=records)
        number = records // 3
        for _ in range(10):  # in turns: a real queue is never so deep
            await _fill(engine, "bench", number // 10)
            await _settle(engine, "bench", number // 10 * 99 // 100)
    await _tidy(settled, compact=False)
    short = await _open(settled)
    _without_snapshot(settled)
    log = await _open(settled)
    await _tidy(settled)
    tidied = await _open(settled)

    live = scale.directory / "live"
    async with _untidied(live) as engine:
        await engine.create("bench", max_depth=records)
        await _fill(engine, "bench", records)
    await _tidy(live)
    with_snapshot = await _open(live)
    _without_snapshot(live)
    without = await _open(live)
    shutil.rmtree(settled)
    shutil.rmtree(live)
    return {
        "recovery.settled": log / short,
        "recovery.settled_seconds": log,
        "recovery.settled_tidied": log / tidied,
        "recovery.live": without / with_snapshot,
        "recovery.live_seconds": without,
        "recovery.live_snapshot_seconds": with_snapshot,
    }


class _Lag:
    """The longest time for which the loop did not come round to a tick, while it is entered."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.own = 0.0  # the loop's own work in that time: not what other threads or programs took

    async def __aenter__(self) -> _Lag:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        while True:
            before, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK)
            self.longest = max(self.longest, time.perf_counter() - before - TICK)
            self.own = max(self.own, time.thread_time() - worked)


async def _compaction(scale: Scale) -> Mapping[str, float]:
    """Half of the segments are two fifths wanted; others publish all the while."""
    live, spare = scale.of(1_000_000, 5_000), scale.of(10_000, 100)
    segment = scale.of(8 << 20, 64 << 10)
    dense = segment // 180  # about the messages of a segment
    sparse = dense * 2 // 5
    async with _untidied(scale.directory / "engine", segment) as engine:
        await engine.create("kept", max_depth=2 * live)
        await engine.create("gone", max_depth=2 * live)
        left = live - spare
        while left > 0:
            await _fill(engine, "kept", min(left, dense))
            left -= dense
            for _ in range(10):
                await _fill(engine, "kept", max(0, min(left, sparse // 10)))
                await _fill(engine, "gone", (dense - sparse) // 10)
                left -= sparse // 10
        await engine.purge("gone")
        gc.collect()
        published = 0

        async def publish() -> None:
            nonlocal published
            while published < spare:
                published += 1
                await engine.publish("kept", BODY)
                await asyncio.sleep(TICK)

        publisher = asyncio.create_task(publish())
        async with _Lag() as idle:
            await asyncio.sleep(scale.of(3, 0))
        started = time.perf_counter()
        async with _Lag() as lag:
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
            Figure("recovery.settled_seconds", "the same: without", None, "s"),
            Figure("recovery.settled_tidied", "the same: without / compacted and with snapshot"),
            Figure("recovery.live", "1,000,000 live messages: without / with snapshot"),
            Figure("recovery.live_seconds", "the same: without", None, "s"),
            Figure("recovery.live_snapshot_seconds", "the same: with", None, "s"),
        ),
        _recovery,
        costly=True,
    ),
    Suite(
        "compaction",
        (
            Figure(
                "compaction.lag",
                "the loop's longest lag at 1,000,000 live",
                50,
                "ms",
                at_most=True,
            ),
            Figure("compaction.lag_own", "of that, longest work of the loop itself", None, "ms"),
            Figure("compaction.lag_idle", "longest lag with nothing to tidy", None, "ms"),
            Figure("compaction.seconds", "time that tidying took", None, "s"),
        ),
        _compaction,
        costly=True,
    ),
)
