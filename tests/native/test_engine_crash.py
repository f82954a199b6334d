"""The engine is stopped in every way: killed at random, after each call to the disk, powerless.

What was told before and after each act is kept outside the engine (``tests.support.books``).
Seeds are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from qkit.native import Engine
from qkit.native.log.disk import Disk
from qkit.native.log.segment import name_of
from qkit.native.storage.storage import Storage
from qkit.testing import VirtualClock
from tests.support.books import Books
from tests.support.disk import Call, Mode, SimulatedDisk
from tests.support.engines import Seen, open_engine, view
from tests.support.history import live, prepare

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))
MODES: tuple[Mode, ...] = ("none", "prefix", "subset", "subset", "subset")


async def history(
    random: Random, clock: VirtualClock, steps: int, *, disk: SimulatedDisk | None = None
) -> SimulatedDisk:
    """A disk with a life behind it; what was told stands in its journal, between the calls."""
    disk = SimulatedDisk() if disk is None else disk
    disk.note("open")
    engine = await open_engine(
        disk,
        clock,
        segment_bytes=random.choice((600, 2000, 8000)),
        memory_limit=random.choice((0, 500, 1 << 20)),
    )
    await prepare(engine)
    await live(engine, random, disk.note, f"{random.randrange(1 << 40):x}", steps)
    disk.note("close")
    await engine.aclose()
    return disk


def told(calls: list[Call], books: Books) -> Books:
    for call in calls:
        if call.kind == "note":
            if isinstance(call.note, str):
                books.restart()
            else:
                books.tell(cast("tuple[Any, ...]", call.note))
    return books


async def recovered(disk: SimulatedDisk, clock: VirtualClock, random: Random) -> list[Any]:
    engine = await open_engine(disk, clock, memory_limit=random.choice((0, 500, 1 << 20)))
    assert all(item.kind in ("torn", "unsynced") for item in engine.storage.damage)
    found = await view(engine)
    await engine.aclose()
    return found


def instants(disk: SimulatedDisk) -> Iterator[int]:
    """Right before each call, when the most has been confirmed, and at the end."""
    for when, call in enumerate(disk.journal):
        if call.kind != "note":
            yield when
    yield len(disk.journal)


async def kill_everywhere(random: Random, clock: VirtualClock, steps: int) -> tuple[int, int]:
    disk = await history(random, clock, steps)
    books, before, count = Books(), 0, 0
    for when in instants(disk):
        told(disk.journal[before:when], books)
        before = when
        found = await recovered(disk.kill(when), clock, random)
        books.check(found)
        count += 1
    return count, books.confirmed


@pytest.mark.proves("002-log-3", "002-compaction-3", "002-testing-12", "002-summary-5")
async def test_killed_after_every_single_call_to_the_disk(clock):
    print("seed", SEED)
    random = Random(SEED)
    counts = [await kill_everywhere(random, clock, 12) for _ in range(2)]
    print(f"{sum(count for count, _ in counts)} kills, {counts}")
    assert all(count > 100 for count, _ in counts)


@pytest.mark.torture
@pytest.mark.timeout(1800)
async def test_killed_after_every_single_call_to_the_disk_of_many_lives(clock):
    print("seed", SEED + 1)
    random = Random(SEED + 1)
    counts = [await kill_everywhere(random, clock, 40) for _ in range(20)]
    print(f"{sum(count for count, _ in counts)} kills, {counts}")


async def test_killed_again_and_again_in_one_directory(clock):
    """Each round goes on where the last was killed, also in the middle of its recovery."""
    print("seed", SEED)
    random = Random(SEED)
    books, files, total = Books(), dict[str, bytes](), 0
    for _ in range(20):
        disk = await history(random, clock, 6, disk=SimulatedDisk(files))
        when = random.randint(0, len(disk.journal))
        told(disk.journal[:when], books)
        books.restart()
        killed = disk.kill(when)
        again = await history_of_recovery(killed, clock, random)
        found = await recovered(again, clock, random)
        books.check(found)
        books.restart(found)
        files = again.files()
        total += len(found)
    print(f"{books.confirmed} confirmations, {total} messages found")


async def history_of_recovery(
    disk: SimulatedDisk, clock: VirtualClock, random: Random
) -> SimulatedDisk:
    """A disk whose recovery was killed as well."""
    start = SimulatedDisk(disk.files())
    await recovered(start, clock, random)
    return start.kill(random.randint(0, len(start.journal)))


async def lose_power(clock: VirtualClock, seed: int, states: int) -> None:
    print("seed", seed)
    random = Random(seed)
    done = lives = 0
    while done < states:
        lives += 1
        disk = await history(random, clock, random.choice((6, 15)))
        for _ in range(min(100, states - done)):
            when = random.randint(0, len(disk.journal))
            books = told(disk.journal[:when], Books())
            mode = random.choice(MODES)
            after = disk.lose_power(when, random, mode)
            books.check(await recovered(after, clock, random), power_lost=True)
            # The power may go again while it recovers.
            again = after.lose_power(random.randint(0, len(after.journal)), random, mode)
            books.check(await recovered(again, clock, random), power_lost=True)
            done += 1
    print(f"{done} states of {lives} lives")


@pytest.mark.proves(
    "002-overview-1",
    "002-hybrid-1",
    "002-hybrid-6",
    "002-testing-12",
    "002-pitfalls-1",
    "002-summary-5",
)
async def test_power_loss_loses_no_confirmed_send(clock):
    await lose_power(clock, SEED, 1000)


@pytest.mark.torture
@pytest.mark.timeout(3600)
async def test_power_loss_loses_no_confirmed_send_in_10_000_states(clock):
    await lose_power(clock, SEED + 1, 10_000)


async def test_a_message_that_died_survives_the_loss_of_its_letter_queues_declaration(clock):
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock)
    await engine.create("orders")
    await engine.publish("orders", b"precious", message_id="1", ttl=1)
    stored = len(disk.files()[name_of(1)])  # and synced
    await clock.advance(2)
    data = bytearray(disk.files()[name_of(1)])
    await engine.aclose()

    # Neither the declaration of orders_dlq nor the burial is synced; a sector of the first is lost.
    data[data.index(b"orders_dlq", stored)] = 0
    engine = await open_engine(SimulatedDisk({name_of(1): bytes(data)}), clock)
    found = await view(engine)
    await engine.aclose()
    assert [item.id for item in found] == ["1"]


async def test_compaction_keeps_a_message_whose_letter_is_not_on_the_disk_yet(clock):
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock, segment_bytes=600)
    await engine.create("orders")
    for id in ("1", "2", "3"):
        await engine.publish("orders", b"x" * 300, message_id=id)
    first, second = await engine.consume("orders"), await engine.consume("orders")
    assert first is not None
    assert second is not None
    await second.ack()
    await first.nack(requeue=False)
    await engine.storage.maintain(rotate=False)
    after = disk.lose_power(len(disk.journal), Random(SEED), "none")
    await engine.aclose()

    engine = await open_engine(after, clock)
    found = await view(engine)
    await engine.aclose()
    assert {"1", "3"} <= {item.id for item in found}


class GatedDisk(Disk):
    """A disk that can be told to wait when a certain segment has been begun."""

    def __init__(self, path: Path, segment: int) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self._name = name_of(segment)
        self._begun = False

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._begun = new == self._name

    def sync_directory(self) -> None:
        super().sync_directory()
        if self._begun:
            self._begun = False
            self.waiting.set()
            assert self.gate.wait(60)


async def test_compaction_waits_for_the_answers_of_a_segment_that_was_just_completed(tmp_path):
    """The writer's thread ends a segment before the loop has heard what is in it."""
    disk = GatedDisk(tmp_path / "data", 3)
    engine = Engine()
    await engine.attach(Storage(disk, clock=engine.clock, segment_bytes=1_000))
    await engine.create("orders")
    await engine.publish("orders", bytes(600), message_id="first")  # segment 1 is full
    sends = asyncio.gather(
        *(engine.publish("orders", bytes(200), message_id=str(number)) for number in range(8))
    )
    await asyncio.to_thread(disk.waiting.wait, 10)
    tidy = asyncio.ensure_future(engine.storage.maintain(rotate=False))
    await asyncio.sleep(0.1)  # it looks at the segments meanwhile
    disk.gate.set()
    await sends
    await tidy
    await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "killed")
    await engine.aclose()

    engine = await open_engine(tmp_path / "killed")
    found = [item.id for item in await view(engine)]
    await engine.aclose()
    assert found == ["first", *(str(number) for number in range(8))]


# kill -9 of a real process


class Crasher:
    """The parent's end of ``tests.support.engine_crasher``; the pipe is always being read."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_crasher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=environment,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def round(self, order: str, patience: float) -> list[list[Any]]:
        """Let a child live for ``patience`` seconds from its first line on; what it told."""
        assert self._process.stdin is not None
        self._process.stdin.write(order.encode() + b"\n")
        self._process.stdin.flush()
        lines: list[list[Any]] = []
        pid = 0
        while not pid or not lines:  # the pid may come behind the first lines of the child
            line = json.loads(self._lines.get(timeout=60))
            if line[0] == "pid":
                pid = line[1]
                if patience < 0.02:
                    break  # it may not even have opened the directory
            else:
                lines.append(line)
        time.sleep(patience)
        os.kill(pid, signal.SIGKILL)
        while (line := json.loads(self._lines.get(timeout=60))) != ["dead"]:
            lines.append(line)
        return lines

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def seen(path: Path, random: Random) -> list[Seen]:
    engine = await open_engine(path, memory_limit=random.choice((0, 1000, 1 << 20)))
    assert all(item.kind == "torn" for item in engine.storage.damage)
    found = await view(engine)
    await engine.aclose()
    return found


def kill_rounds(tmp_path: Path, seed: int, rounds: int) -> None:
    print("seed", seed)
    random = Random(seed)
    crasher = Crasher()
    books, total = Books(), 0
    for round in range(rounds):
        path = tmp_path / f"engine-{round // 5}"
        if round and round % 5 == 0:
            total += books.confirmed
            books = Books()
            shutil.rmtree(tmp_path / f"engine-{round // 5 - 1}")
        fsync = random.choice(("always", "always", "interval", "never"))
        size, limit = random.choice((2000, 20_000, 1 << 20)), random.choice((0, 2000, 1 << 20))
        order = f"{path} {random.randrange(1 << 40)} {size} {limit} {fsync}"
        for line in crasher.round(order, random.uniform(0.005, 0.15)):
            books.tell(line)
        found = asyncio.run(seen(path, random))
        books.check(found)
        books.restart(found)
    crasher.close()
    total += books.confirmed
    print(f"{rounds} rounds, {total} confirmations checked")
    assert total > rounds


@pytest.mark.proves(
    "001-overview-2",
    "002-overview-1",
    "002-overview-2",
    "002-log-3",
    "002-delivery-1",
    "002-delivery-2",
    "002-delivery-3",
    "002-delivery-4",
    "002-delivery-6",
    "002-hybrid-1",
    "002-hybrid-6",
    "002-testing-12",
    "002-summary-1",
    "002-summary-2",
    "002-summary-5",
)
def test_kill_9_at_random_instants_loses_nothing_confirmed(tmp_path):
    kill_rounds(tmp_path, SEED, 25)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_kill_9_at_random_instants_500_times(tmp_path):
    kill_rounds(tmp_path, SEED + 1, 500)


CALLS = "pwrite64,fdatasync,fsync,rename,renameat,renameat2,unlink,unlinkat,ftruncate"


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_kill_9_at_every_call_to_the_disk_of_a_real_process(tmp_path):
    """As on the simulated disk, with the calls that a real one gets; the lives are not equal."""
    print("seed", SEED)
    random = Random(SEED)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "QKIT_CRASHER_STEPS": "8",
    }
    when = confirmed = 0
    while True:
        when += 1
        path = tmp_path / f"engine-{when}"
        command = [
            *("strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={CALLS}"),
            *("-e", f"inject={CALLS}:signal=SIGKILL:when={when}"),
            *(sys.executable, "-m", "tests.support.engine_crasher"),
            *(str(path), str(SEED + when), "1000", "500", "always"),
        ]
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=environment,
            timeout=60,
            check=False,
        )
        books = Books()
        for line in result.stdout.splitlines():
            books.tell(json.loads(line))
        books.check(asyncio.run(seen(path, random)))
        confirmed += books.confirmed
        shutil.rmtree(path)
        if result.returncode == 0:
            break
        assert result.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    print(f"{when} calls, {confirmed} confirmations checked")
    assert when > 50
