"""Benchmarks of the durable engine against raw appends to a file and queues based on SQLite.

All of them write to the same file system. Synced writes are measured in wall-clock time, unsynced
writes in CPU time (user and system).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._in_memory import BODY, peer
from benchmarks._measure import Figure, Missing, Scale, Suite
from qkit._internal.ids import new_id
from qkit.native import Engine
from qkit.native.log.encode import encode_publish
from qkit.native.log.segment import FRAME_SIZE

__all__ = ["IN_FLIGHT", "RECORD", "SUITES", "run_concurrently"]

IN_FLIGHT = 100
RECORD = b"r" * (len(encode_publish(1, 1, new_id(), BODY)) + FRAME_SIZE)  # size of qkit's


async def run_concurrently(
    count: int,
    one: Callable[[], Awaitable[object]],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Call ``one`` about ``count`` times, 100 calls at a time, and return the seconds per call."""

    async def worker(share: int) -> None:
        for _ in range(share):
            await one()

    started = clock()
    share = max(1, count // IN_FLIGHT)
    await asyncio.gather(*[worker(share) for _ in range(IN_FLIGHT)])
    return (clock() - started) / (share * IN_FLIGHT)


def _raw(path: Path, count: int, group: int, *, sync: bool) -> float:
    """Return the seconds per record when ``group`` records are written in one call."""
    clock = time.perf_counter if sync else time.process_time
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    records = [RECORD] * group
    started = clock()
    if group == 1:
        for _ in range(count):
            os.write(fd, RECORD)
    else:
        for _ in range(max(1, count // group)):
            os.write(fd, b"".join(records))
            if sync:
                os.fdatasync(fd)
    spent = clock() - started
    os.close(fd)
    return spent / (max(1, count // group) * group)


async def _qkit(path: Path, count: int, fsync: Any) -> tuple[float, float]:
    """Return the seconds per publish and the seconds per consume with ack."""
    clock = time.process_time if fsync == "never" else time.perf_counter
    async with await Engine.open(path, fsync=fsync) as engine:
        await engine.create("bench", max_depth=count + IN_FLIGHT)

        async def settle() -> None:
            delivery = await engine.consume("bench", timeout=None)
            assert delivery is not None
            await delivery.ack()

        sent = await run_concurrently(count, lambda: engine.publish("bench", BODY), clock)
        return sent, await run_concurrently(count, settle, clock)


async def _mixed(path: Path, count: int) -> float:
    """Return the seconds per message with 100 producers and 100 consumers running concurrently."""
    async with await Engine.open(path, fsync="always") as engine:
        await engine.create("bench", max_depth=count + IN_FLIGHT)

        async def settle() -> None:
            delivery = await engine.consume("bench", timeout=None)
            assert delivery is not None
            await delivery.ack()

        spent = await asyncio.gather(
            run_concurrently(count, lambda: engine.publish("bench", BODY)),
            run_concurrently(count, settle),
        )
        return max(spent)


async def _send(scale: Scale) -> Mapping[str, float]:
    path = scale.directory
    always, never = "always", "never"
    groups = _raw(path / "groups", scale.count, IN_FLIGHT, sync=True)
    sent, settled = await _qkit(path / always, scale.count, always)
    again = _raw(path / "groups", scale.count, IN_FLIGHT, sync=True)
    groups = (groups + again) / 2  # mean of before and after, because disk speed varies
    single = _raw(path / "single", scale.count, 1, sync=False)
    grouped = _raw(path / "grouped", scale.count, IN_FLIGHT, sync=False)
    unsynced, _ = await _qkit(path / never, scale.count, never)
    return {
        "durable.send": groups / sent,
        "durable.send_rate": 1 / sent,
        "durable.settle_rate": 1 / settled,
        "never.send": single / unsynced,
        "never.send_grouped": grouped / unsynced,
        "never.send_rate": 1 / unsynced,
    }


# Peers: each put is on disk before it returns; what else is synced depends on the peer. ``relaxed``
# is measured with unsynced gets and acks, as in qkit.


class _Peer:
    """Timer of a peer: seconds per put, per get with ack, and per unsynced get with ack."""

    def __init__(self, count: int) -> None:
        self.count = count

    def run(
        self,
        put: Callable[[], object],
        settle: Callable[[], object],
        connection: sqlite3.Connection,
    ) -> tuple[float, float, float]:
        connection.execute("PRAGMA synchronous = FULL")
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        sent = self._time(put)
        settled = self._time(settle)
        self._time(put)
        connection.execute("PRAGMA synchronous = NORMAL")
        return sent, settled, self._time(settle)

    def _time(self, one: Callable[[], object]) -> float:
        started = time.perf_counter()
        for _ in range(self.count):
            one()
        return (time.perf_counter() - started) / self.count


def _persist_queue(path: Path, count: int) -> tuple[float, float, float]:
    queue = peer("persistqueue").FIFOSQLiteQueue(str(path), auto_commit=True)
    try:
        return _Peer(count).run(
            lambda: queue.put(BODY), lambda: queue.get(block=False), queue._conn
        )
    finally:
        queue.close()


def _persist_queue_ack(path: Path, count: int) -> tuple[float, float, float]:
    queue = peer("persistqueue").SQLiteAckQueue(str(path), auto_commit=True)

    def settle() -> None:
        item = queue.get(block=False, raw=True)
        queue.ack(id=item["pqid"])

    try:
        return _Peer(count).run(lambda: queue.put(BODY), settle, queue._conn)
    finally:
        queue.close()


def _huey(path: Path, count: int) -> tuple[float, float, float]:
    path.mkdir()
    storage = peer("huey.storage").SqliteStorage("bench", str(path / "huey.db"), fsync=True)
    try:
        return _Peer(count).run(lambda: storage.enqueue(BODY), storage.dequeue, storage.conn)
    finally:
        storage.close()


def _litequeue(path: Path, count: int) -> tuple[float, float, float]:
    path.mkdir()
    queue = peer("litequeue").LiteQueue(str(path / "lite.db"))
    body = BODY.decode()
    try:
        return _Peer(count).run(
            lambda: queue.put(body), lambda: queue.done(queue.pop().message_id), queue.conn
        )
    finally:
        queue.close()


PEERS: dict[str, Callable[[Path, int], tuple[float, float, float]]] = {
    "persist-queue": _persist_queue,
    "persist-queue with ack": _persist_queue_ack,
    "huey": _huey,
    "litequeue": _litequeue,
}


async def _peers(scale: Scale) -> Mapping[str, float]:
    count = scale.of(300, 5)
    best, relaxed, failures = float("inf"), float("inf"), list[str]()
    for name, run in PEERS.items():
        try:
            sent, settled, unsynced_settle = run(scale.directory / name, count)
        except Missing as reason:
            failures.append(str(reason))
            continue
        best = min(best, sent + settled)
        relaxed = min(relaxed, sent + unsynced_settle)
    if failures:  # the best peer is known only if all of them ran
        raise Missing(", ".join(failures))
    sent, settled = await _qkit(scale.directory / "phases", scale.count, "always")
    mixed = await _mixed(scale.directory / "mixed", scale.count)
    return {
        "durable.cycle": best / (sent + settled),
        "durable.cycle_mixed": best / mixed,
        "durable.cycle_relaxed": relaxed / (sent + settled),
        "durable.cycle_rate": 1 / (sent + settled),
        "peers.cycle_rate": 1 / best,
    }


SUITES = (
    Suite(
        "durable",
        (
            Figure("durable.send", "fsync always: send / raw groups of 100 with fdatasync", 0.3),
            Figure("durable.send_rate", "fsync always: sends", None, "/s"),
            Figure("durable.settle_rate", "fsync always: consume + ack", None, "/s"),
            Figure("never.send", "fsync never: send / raw writes of one record", 0.25),
            Figure("never.send_grouped", "fsync never: send / raw writes of 100 records"),
            Figure("never.send_rate", "fsync never: sends per CPU second", None, "/s"),
        ),
        _send,
    ),
    Suite(
        "peers",
        (
            Figure("durable.cycle", "send, then consume + ack / best SQLite peer", 15.0),
            Figure("durable.cycle_mixed", "send and consume + ack at once / best SQLite peer"),
            Figure("durable.cycle_relaxed", "send, then consume + ack / peers with unsynced gets"),
            Figure("durable.cycle_rate", "send + consume + ack", None, "/s"),
            Figure("peers.cycle_rate", "best SQLite peer: put + get + ack", None, "/s"),
        ),
        _peers,
    ),
)
