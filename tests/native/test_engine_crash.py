"""Recovery of an engine after kills at random times, kills at each disk call, and power losses.

The tests record each action before and after it, outside the engine
(``tests.support.crash_model``). Random tests print their seed.
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
from tests.support.crash_model import CrashModel
from tests.support.disk import Call, Mode, SimulatedDisk
from tests.support.engines import Seen, open_engine, view
from tests.support.workload import prepare, run_workload

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))
MODES: tuple[Mode, ...] = ("none", "prefix", "subset", "subset", "subset")


async def history(
    random: Random, clock: VirtualClock, steps: int, *, disk: SimulatedDisk | None = None
) -> SimulatedDisk:
    """Run a random history; return its disk, whose journal records actions and disk calls."""
    disk = SimulatedDisk() if disk is None else disk
    disk.note("open")
    engine = await open_engine(
        disk,
        clock,
        segment_bytes=random.choice((600, 2000, 8000)),
        memory_limit=random.choice((0, 500, 1 << 20)),
    )
    await prepare(engine)
    await run_workload(engine, random, disk.note, f"{random.randrange(1 << 40):x}", steps)
    disk.note("close")
    await engine.aclose()
    return disk


def record(calls: list[Call], model: CrashModel) -> CrashModel:
    for call in calls:
        if call.kind == "note":
            if isinstance(call.note, str):
                model.restart()
            else:
                model.record(cast("tuple[Any, ...]", call.note))
    return model


async def recovered(disk: SimulatedDisk, clock: VirtualClock, random: Random) -> list[Any]:
    engine = await open_engine(disk, clock, memory_limit=random.choice((0, 500, 1 << 20)))
    assert all(item.kind in ("torn", "unsynced") for item in engine.storage.damage)
    found = await view(engine)
    await engine.aclose()
    return found


def kill_points(disk: SimulatedDisk) -> Iterator[int]:
    """Yield the journal index of each disk call, and the end of the journal.

    Just before a disk call, all confirmations that depend on earlier calls have arrived.
    """
    for when, call in enumerate(disk.journal):
        if call.kind != "note":
            yield when
    yield len(disk.journal)


async def kill_everywhere(random: Random, clock: VirtualClock, steps: int) -> tuple[int, int]:
    disk = await history(random, clock, steps)
    model, before, count = CrashModel(), 0, 0
    for when in kill_points(disk):
        record(disk.journal[before:when], model)
        before = when
        found = await recovered(disk.kill(when), clock, random)
        model.check(found)
        count += 1
    return count, model.confirmed


@pytest.mark.proves("002-log-3", "002-compaction-3", "002-testing-12", "002-summary-5")
async def test_a_kill_after_any_disk_call_loses_no_confirmed_action(clock):
    print("seed", SEED)
    random = Random(SEED)
    counts = [await kill_everywhere(random, clock, 12) for _ in range(2)]
    print(f"{sum(count for count, _ in counts)} kills, {counts}")
    assert all(count > 100 for count, _ in counts)


@pytest.mark.torture
@pytest.mark.timeout(1800)
async def test_a_kill_after_any_disk_call_loses_no_confirmed_action_in_many_histories(clock):
    print("seed", SEED + 1)
    random = Random(SEED + 1)
    counts = [await kill_everywhere(random, clock, 40) for _ in range(20)]
    print(f"{sum(count for count, _ in counts)} kills, {counts}")


async def test_repeated_kills_in_one_directory_lose_no_confirmed_action(clock):
    """Each round continues with the files of the previous one; recoveries are killed too."""
    print("seed", SEED)
    random = Random(SEED)
    model, files, total = CrashModel(), dict[str, bytes](), 0
    for _ in range(20):
        disk = await history(random, clock, 6, disk=SimulatedDisk(files))
        when = random.randint(0, len(disk.journal))
        record(disk.journal[:when], model)
        model.restart()
        killed = disk.kill(when)
        again = await kill_during_recovery(killed, clock, random)
        found = await recovered(again, clock, random)
        model.check(found)
        model.restart(found)
        files = again.files()
        total += len(found)
    print(f"{model.confirmed} confirmations, {total} messages found")


async def kill_during_recovery(
    disk: SimulatedDisk, clock: VirtualClock, random: Random
) -> SimulatedDisk:
    """Run recovery on a copy of the disk; return its state after a kill at a random disk call."""
    start = SimulatedDisk(disk.files())
    await recovered(start, clock, random)
    return start.kill(random.randint(0, len(start.journal)))


async def lose_power(clock: VirtualClock, seed: int, states: int) -> None:
    print("seed", seed)
    random = Random(seed)
    done = histories = 0
    while done < states:
        histories += 1
        disk = await history(random, clock, random.choice((6, 15)))
        for _ in range(min(100, states - done)):
            when = random.randint(0, len(disk.journal))
            model = record(disk.journal[:when], CrashModel())
            mode = random.choice(MODES)
            after = disk.lose_power(when, random, mode)
            model.check(await recovered(after, clock, random), power_lost=True)
            # The power may fail again during recovery.
            again = after.lose_power(random.randint(0, len(after.journal)), random, mode)
            model.check(await recovered(again, clock, random), power_lost=True)
            done += 1
    print(f"{done} states of {histories} histories")


@pytest.mark.proves(
    "002-overview-1",
    "002-hybrid-1",
    "002-hybrid-6",
    "002-testing-12",
    "002-pitfalls-1",
    "002-summary-5",
)
async def test_a_power_loss_loses_no_confirmed_send(clock):
    await lose_power(clock, SEED, 1000)


@pytest.mark.torture
@pytest.mark.timeout(3600)
async def test_a_power_loss_loses_no_confirmed_send_in_10_000_states(clock):
    await lose_power(clock, SEED + 1, 10_000)


async def test_a_dead_message_survives_the_loss_of_its_dead_letter_queues_declaration(clock):
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock)
    await engine.create("orders")
    await engine.publish("orders", b"precious", message_id="1", ttl=1)
    stored = len(disk.files()[name_of(1)])  # all of it is synced
    await clock.advance(2)
    data = bytearray(disk.files()[name_of(1)])
    await engine.aclose()

    # Neither the declaration of orders_dlq nor the dead letter is synced. Damage the declaration.
    data[data.index(b"orders_dlq", stored)] = 0
    engine = await open_engine(SimulatedDisk({name_of(1): bytes(data)}), clock)
    found = await view(engine)
    await engine.aclose()
    assert [item.id for item in found] == ["1"]


async def test_compaction_keeps_a_message_until_its_dead_letter_is_synced(clock):
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
    """A disk that blocks at a gate after it has created a given segment."""

    def __init__(self, path: Path, segment: int) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self._name = name_of(segment)
        self._created = False

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._created = new == self._name

    def sync_directory(self) -> None:
        super().sync_directory()
        if self._created:
            self._created = False
            self.waiting.set()
            assert self.gate.wait(60)


async def test_compaction_waits_until_a_sealed_segment_is_indexed(tmp_path):
    """The writer thread seals a segment before the loop has indexed its messages."""
    disk = GatedDisk(tmp_path / "data", 3)
    engine = Engine()
    await engine.attach(Storage(disk, clock=engine.clock, segment_bytes=1_000))
    await engine.create("orders")
    await engine.publish("orders", bytes(600), message_id="first")  # segment 1 is full
    sends = asyncio.gather(
        *(engine.publish("orders", bytes(200), message_id=str(number)) for number in range(8))
    )
    await asyncio.to_thread(disk.waiting.wait, 10)
    maintenance = asyncio.ensure_future(engine.storage.maintain(rotate=False))
    await asyncio.sleep(0.1)  # maintenance lists the segments meanwhile
    disk.gate.set()
    await sends
    await maintenance
    await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "killed")
    await engine.aclose()

    engine = await open_engine(tmp_path / "killed")
    found = [item.id for item in await view(engine)]
    await engine.aclose()
    assert found == ["first", *(str(number) for number in range(8))]


# kill -9 of a real process


class Crasher:
    """A process of ``tests.support.engine_crasher``, and a thread that reads its output."""

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

    def round(self, arguments: str, seconds: float) -> list[list[Any]]:
        """Kill a child ``seconds`` after its first line; return the actions it reported."""
        assert self._process.stdin is not None
        self._process.stdin.write(arguments.encode() + b"\n")
        self._process.stdin.flush()
        lines: list[list[Any]] = []
        pid = 0
        while not pid or not lines:  # the child's first lines may precede its pid
            line = json.loads(self._lines.get(timeout=60))
            if line[0] == "pid":
                pid = line[1]
                if seconds < 0.02:
                    break  # kill the child even if it has not opened the directory yet
            else:
                lines.append(line)
        time.sleep(seconds)
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


async def recovered_messages(path: Path, random: Random) -> list[Seen]:
    engine = await open_engine(path, memory_limit=random.choice((0, 1000, 1 << 20)))
    assert all(item.kind == "torn" for item in engine.storage.damage)
    found = await view(engine)
    await engine.aclose()
    return found


def kill_rounds(tmp_path: Path, seed: int, rounds: int) -> None:
    print("seed", seed)
    random = Random(seed)
    crasher = Crasher()
    model, total = CrashModel(), 0
    for round in range(rounds):
        path = tmp_path / f"engine-{round // 5}"
        if round and round % 5 == 0:
            total += model.confirmed
            model = CrashModel()
            shutil.rmtree(tmp_path / f"engine-{round // 5 - 1}")
        fsync = random.choice(("always", "always", "interval", "never"))
        size, limit = random.choice((2000, 20_000, 1 << 20)), random.choice((0, 2000, 1 << 20))
        arguments = f"{path} {random.randrange(1 << 40)} {size} {limit} {fsync}"
        for line in crasher.round(arguments, random.uniform(0.005, 0.15)):
            model.record(line)
        found = asyncio.run(recovered_messages(path, random))
        model.check(found)
        model.restart(found)
    crasher.close()
    total += model.confirmed
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
def test_kill_9_at_random_times_loses_no_confirmed_action(tmp_path):
    kill_rounds(tmp_path, SEED, 25)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_kill_9_at_random_times_loses_no_confirmed_action_in_500_rounds(tmp_path):
    kill_rounds(tmp_path, SEED + 1, 500)


CALLS = "pwrite64,fdatasync,fsync,rename,renameat,renameat2,unlink,unlinkat,ftruncate"


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_kill_9_at_every_disk_call_of_a_real_process_loses_no_confirmed_action(tmp_path):
    """Kill run N at its Nth disk call, until a run completes. Each run has its own history."""
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
        model = CrashModel()
        for line in result.stdout.splitlines():
            model.record(json.loads(line))
        model.check(asyncio.run(recovered_messages(path, random)))
        confirmed += model.confirmed
        shutil.rmtree(path)
        if result.returncode == 0:
            break
        assert result.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    print(f"{when} calls, {confirmed} confirmations checked")
    assert when > 50
