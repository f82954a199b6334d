"""Recovery after truncation, bit flips, power loss and kill -9. Random tests print their seed."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from qkit.errors import Damage, LogDamaged, LogVersion, ReadOnly
from qkit.native.log.log import Log
from qkit.native.log.segment import FRAME_SIZE, HEADER_SIZE, name_of, read_header, scan
from tests.native.log.test_segment import of_version
from tests.support.crasher import content, number
from tests.support.disk import Mode, SimulatedDisk

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))


def recovered(disk: SimulatedDisk, *, repair: bool = False) -> tuple[list[int], list[Damage]]:
    log = Log(disk, repair=repair)
    return [number(entry.content) for entry in log.recover()], log.damage


async def small_log(*, close: bool = True, segment_bytes: int = 1 << 20) -> SimulatedDisk:
    """Return a disk with a log of twelve records, written in groups of one, two and three."""
    disk = SimulatedDisk()
    log = Log(disk, segment_bytes=segment_bytes)
    list(log.recover())
    log.start()
    records = [content(at, at * 5) for at in range(12)]
    for group in (records[:1], records[1:3], records[3:6], records[6:7], records[7:9], records[9:]):
        await asyncio.gather(*(log.writer.append([record]) for record in group))
    files = disk.files()
    await log.close()
    return SimulatedDisk(disk.files() if close else files)


def ends(data: bytes) -> list[int]:
    """Return the end offset of each record in a segment of ``small_log``."""
    header, _ = read_header(data, 1)
    assert header is not None
    return [at + FRAME_SIZE + int.from_bytes(data[at : at + 4], "little")
            for at in scan(data, header.salt).offsets]  # fmt: skip


# Truncation


@pytest.mark.proves("002-log-2", "002-testing-2", "002-pitfalls-2")
@pytest.mark.parametrize("close", [True, False])
async def test_a_log_cut_at_any_byte_recovers_the_exact_prefix(close):
    data = (await small_log(close=close)).files()[name_of(1)]
    end_of = ends(data)
    for cut in range(len(data) + 1):
        disk = SimulatedDisk({name_of(1): data[:cut]})
        found, damage = recovered(disk)

        complete = sum(end <= cut for end in end_of)
        assert found == list(range(complete))
        assert all(item.kind == "torn" for item in damage)
        assert sum(item.length for item in damage) == cut - len(disk.files().get(name_of(1), b""))
        if cut not in (0, HEADER_SIZE, *end_of) and not close:
            # A cut just after a mark is also between two frames.
            assert damage or cut - max(end for end in (HEADER_SIZE, *end_of) if end <= cut) == 23
        assert recovered(SimulatedDisk(disk.files())) == (found, [])


async def test_a_cut_log_can_be_appended_to(tmp_path):
    data = (await small_log()).files()[name_of(1)]
    for cut in (0, 10, 79, 80, 85, 120, 300, len(data) - 1):
        disk = SimulatedDisk({name_of(1): data[:cut]})
        log = Log(disk)
        before = [number(entry.content) for entry in log.recover()]
        log.start()
        await log.writer.append([content(77)])
        await log.close()
        assert recovered(SimulatedDisk(disk.files())) == ([*before, 77], [])


async def test_a_cut_segment_with_a_successor_raises():
    files = (await small_log(segment_bytes=200)).files()
    assert len(files) > 3
    data = files[name_of(2)]
    for cut in range(len(data)):
        disk = SimulatedDisk({**files, name_of(2): data[:cut]})
        with pytest.raises(LogDamaged, match="segment 2") as raised:
            recovered(disk)
        assert raised.value.damage[0].segment == 2
        assert disk.files()[name_of(2)] == data[:cut]  # unchanged


# Flipped bits


def flips(data: bytes, random: Random) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        yield at, bytes(flipped)


def repaired(disk: SimulatedDisk, at: int) -> tuple[list[int], list[Damage]] | None:
    """Repair the log and return the result, or ``None`` if no repair is needed.

    Also check that a failed open changes no file.
    """
    before = disk.files()
    try:
        recovered(SimulatedDisk(before))
    except LogDamaged as error:
        damage = error.damage
    else:
        return None
    with pytest.raises(LogDamaged):
        recovered(disk)
    assert disk.files() == before
    assert any(item.offset <= at < item.offset + item.length for item in damage)
    found = recovered(disk, repair=True)
    assert disk.files()[name_of(1) + ".damaged-1"] == before[name_of(1)]
    return found


@pytest.mark.parametrize("close", [True, False])
async def test_a_flipped_bit_in_any_byte_is_reported_and_never_yields_a_wrong_payload(close):
    print("seed", SEED)
    data = (await small_log(close=close)).files()[name_of(1)]
    end_of = ends(data)
    for at, flipped in flips(data, Random(SEED)):
        disk = SimulatedDisk({name_of(1): flipped})
        found, damage = repaired(disk, at) or recovered(disk)  # number() checks payloads
        assert damage
        # At most one record is lost: the one with the flipped bit.
        hit = next((index for index, end in enumerate(end_of) if at < end), 12)
        assert found in (list(range(12)), [index for index in range(12) if index != hit])
        # After a clean close, a mark shows that all records were synced, so every loss raises.
        # After a crash, a power loss may have damaged the last group; its damage is only reported.
        raised = any(item.kind == "damaged" for item in damage)
        assert raised or found == list(range(12)) or (not close and hit > 8)
        assert recovered(SimulatedDisk(disk.files())) == (found, [])


async def test_a_flipped_bit_in_an_older_segment_raises_or_is_repaired():
    print("seed", SEED)
    files = (await small_log(segment_bytes=200)).files()
    for at, flipped in flips(files[name_of(2)], Random(SEED)):
        disk = SimulatedDisk({**files, name_of(2): flipped})
        if at < HEADER_SIZE:
            found, damage = recovered(disk)
            assert found == list(range(12))
            assert [item.kind for item in damage] == ["header"]
            continue
        with pytest.raises(LogDamaged, match="segment 2"):
            recovered(disk)
        found, damage = recovered(disk, repair=True)
        assert damage
        assert 11 <= len(found) <= 12
        assert recovered(SimulatedDisk(disk.files())) == (found, [])


async def test_a_segment_without_a_header_is_renamed_only_by_a_repair():
    files = (await small_log(segment_bytes=200)).files()
    intact, _ = recovered(SimulatedDisk(files))
    for target in (2, len(files)):
        lost = bytes(HEADER_SIZE) + files[name_of(target)][HEADER_SIZE:]
        disk = SimulatedDisk({**files, name_of(target): lost})
        with pytest.raises(LogDamaged, match="header"):
            recovered(disk)
        found, _ = recovered(disk, repair=True)
        assert set(found) < set(intact)
        assert disk.files()[name_of(target) + ".damaged-1"] == lost
        log = Log(disk)
        list(log.recover())
        log.start()
        segment, _ = await log.writer.append([content(50)])
        assert segment != target
        await log.close()


async def test_a_segment_of_another_log_is_reported_as_damage():
    files = (await small_log(segment_bytes=200)).files()
    other = (await small_log(segment_bytes=200)).files()
    with pytest.raises(LogDamaged, match="another log"):
        recovered(SimulatedDisk({**files, name_of(3): other[name_of(3)]}))


async def test_a_corrupt_length_does_not_allocate_memory_for_it(tmp_path):
    data = bytearray((await small_log()).files()[name_of(1)])
    first = HEADER_SIZE + 10 + 13 + 5  # after the mark and record 0
    for length in (2**31, 2**32 - 1, 1 << 20):
        data[first : first + 4] = length.to_bytes(4, "little")
        disk = SimulatedDisk({name_of(1): bytes(data)})
        tracemalloc.start()
        with pytest.raises(LogDamaged):
            recovered(disk)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * len(data) + 64_000


@pytest.mark.parametrize("version", [0, 2])
async def test_another_format_is_rejected_before_any_file_is_changed(version):
    files = (await small_log(segment_bytes=200)).files()
    files[name_of(3)] = of_version(version) + b"whatever a later format holds"
    files[name_of(9) + ".0.tmp"] = b"x"
    disk = SimulatedDisk(files)
    with pytest.raises(LogVersion, match="segment 3 has format"):
        recovered(disk, repair=True)
    assert disk.files() == files


# Power loss


async def busy_log(random: Random) -> SimulatedDisk:
    """Return a log that was rotated, rewritten and trimmed.

    Notes in the disk's journal say which records were issued, confirmed and dropped.
    """
    disk = SimulatedDisk()
    log = Log(disk, segment_bytes=random.choice((300, 1000, 4000)))
    list(log.recover())
    log.start()
    last = 0

    def issue() -> bytes:
        nonlocal last
        last += 1
        disk.note(("issued", last))
        return content(last, random.choice((0, 10, 60, 200)))

    async def sender() -> None:
        for _ in range(random.randint(1, 6)):
            log.writer.append_nowait([issue()])
            written = log.writer.written()
            if written is not None and random.random() < 0.8:
                await written

    def confirm(mine: int, _: object) -> None:
        disk.note(("acked", mine))

    async def synced_sender() -> None:
        for _ in range(random.randint(1, 6)):
            record = issue()
            future = log.writer.append([record])
            future.add_done_callback(partial(confirm, number(record)))
            await future

    for _ in range(3):
        await asyncio.gather(*(sender() for _ in range(2)), *(synced_sender() for _ in range(3)))
        if random.random() < 0.3:
            disk.capacity = sum(map(len, disk.files().values())) + 100
            await asyncio.gather(
                *(log.writer.append([issue()]) for _ in range(3)), return_exceptions=True
            )
            disk.capacity = None
        sealed = [segment for segment, _ in log.segments()]
        for segment in random.sample(sealed, min(len(sealed), 2)):
            records = [entry.content for entry in log.entries(segment)]
            kept = [record for record in records if random.random() < 0.7]
            disk.note(("dropped", [number(record) for record in records if record not in kept]))
            if kept:
                log.install(log.rewrite(segment, kept))
            else:
                log.remove([segment])
    await log.close()
    return disk


def books(disk: SimulatedDisk, when: int) -> tuple[set[int], set[int]]:
    """Return the records that must exist, and those that may, after ``when`` disk calls."""
    must: set[int] = set()
    may: set[int] = set()
    for call in disk.journal[:when]:
        if call.kind == "note":
            match call.note:
                case ("issued", int(issued)):
                    may.add(issued)
                case ("acked", int(acked)):
                    must.add(acked)
                case ("dropped", list(dropped)):
                    must.difference_update(dropped)
    return must, may


def check_state(disk: SimulatedDisk, when: int, random: Random, mode: Mode) -> None:
    must, may = books(disk, when)
    after = disk.lose_power(when, random, mode)
    found, damage = recovered(after)
    assert must <= set(found) <= may
    assert found == sorted(set(found))
    assert all(item.kind in ("torn", "unsynced") for item in damage)
    # The power may fail again during recovery.
    again = after.lose_power(random.randint(0, len(after.journal)), random, mode)
    second, _ = recovered(again)
    assert must <= set(second) <= may
    assert recovered(SimulatedDisk(after.files())) == (found, [])


async def lose_power(seed: int, states: int) -> None:
    random = Random(seed)
    done = logs = 0
    modes: tuple[Mode, ...] = ("none", "prefix", "subset", "subset", "subset")
    while done < states:
        logs += 1
        disk = await busy_log(random)
        for _ in range(min(100, states - done)):
            when = random.randint(0, len(disk.journal))
            check_state(disk, when, random, random.choice(modes))
            done += 1
    print(f"{done} states of {logs} logs")


async def test_a_power_loss_loses_no_synced_record():
    print("seed", SEED)
    await lose_power(SEED, 400)


@pytest.mark.torture
async def test_a_power_loss_loses_no_synced_record_in_12_000_states():
    print("seed", SEED + 1)
    await lose_power(SEED + 1, 12_000)


async def test_a_kill_after_any_disk_call_loses_no_confirmed_record():
    print("seed", SEED)
    random = Random(SEED)
    for _ in range(3):
        disk = await busy_log(random)
        for when in range(len(disk.journal) + 1):
            check_state(disk, when, random, "all")


async def test_records_recovered_after_a_kill_survive_a_power_loss():
    print("seed", SEED)
    random = Random(SEED)
    for _ in range(3):
        disk = await busy_log(random)
        for when in range(len(disk.journal) + 1):
            killed = disk.kill(when)
            found, _ = recovered(killed)
            without_power = killed.lose_power(len(killed.journal), random, "none")
            assert recovered(without_power) == (found, []), when


async def test_records_recovered_after_a_failed_sync_survive_a_power_loss():
    disk = SimulatedDisk()
    log = Log(disk)
    list(log.recover())
    log.start()
    await log.writer.append([content(1)])
    disk.fail["sync"] = disk.fail["truncate"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(ReadOnly):
        await log.writer.append([content(2)])
    await log.close()

    # The write could not be undone. Once its record is recovered, it must survive a power loss.
    assert recovered(disk) == ([1, 2], [])
    without_power = disk.lose_power(len(disk.journal), Random(SEED), "none")
    assert recovered(without_power) == ([1, 2], [])


async def test_a_hole_among_unsynced_records_is_closed_and_later_records_are_kept():
    disk = await small_log(close=False)
    data = bytearray(disk.files()[name_of(1)])
    hole = ends(bytes(data))[9] + 5  # inside record 10, in the last group
    data[hole : hole + 30] = bytes(30)
    disk = SimulatedDisk({name_of(1): bytes(data)})
    found, damage = recovered(disk)

    assert found == [*range(10), 11]
    assert [item.kind for item in damage] == ["unsynced"]
    assert list(disk.files()) == [name_of(1)]


# kill -9


def kill_rounds(tmp_path: Path, seed: int, rounds: int) -> None:
    print("seed", seed)
    random = Random(seed)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.crasher"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as crasher:
        assert crasher.stdin is not None
        assert crasher.stdout is not None
        total = 0
        for round in range(rounds):
            path = tmp_path / f"log-{round // 5}"
            if round % 5 == 0:
                issued, acked = set[int](), set[int]()
            crasher.stdin.write(f"{path} {random.randrange(1 << 30)}\n".encode())
            crasher.stdin.flush()
            lines = crasher.stdout
            # The child's first lines may precede its pid, because both processes write to one pipe.
            early: list[bytes] = []
            while not (line := lines.readline()).startswith(b"pid"):
                assert line, "the crasher process exited"
                early.append(line)
            pid = int(line.split()[1])
            time.sleep(random.uniform(0.001, 0.08))
            os.kill(pid, signal.SIGKILL)
            while (line := lines.readline()) != b"dead\n":
                assert line, "the crasher process exited"
                early.append(line)
            for line in early:
                what, value = line.split()
                (issued if what == b"i" else acked).add(int(value))
            total += len(acked)
            log = Log.open(path)
            found = [number(entry.content) for entry in log.recover()]
            assert all(item.kind == "torn" for item in log.damage)
            asyncio.run(log.close())
            assert acked <= set(found) <= issued, f"round {round}"
            assert found == sorted(set(found))
        crasher.stdin.close()
    print(f"{rounds} rounds, {total} confirmed records checked")
    assert total


@pytest.mark.slow
def test_kill_9_at_random_times_loses_no_confirmed_record(tmp_path):
    kill_rounds(tmp_path, SEED, 20)


@pytest.mark.torture
def test_kill_9_at_random_times_loses_no_confirmed_record_in_500_rounds(tmp_path):
    kill_rounds(tmp_path, SEED + 1, 500)
