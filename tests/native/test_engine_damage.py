"""Recovery of an engine from truncated files and flipped bits. Random tests print their seed."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import NamedTuple

import pytest

from qkit.errors import Damage, LogDamaged
from qkit.native import Engine
from qkit.native.log.record import Declare, decode
from qkit.native.log.segment import FRAME_SIZE, HEADER_SIZE, name_of, read_header, scan
from qkit.testing import VirtualClock
from tests.support.crash_model import body_of
from tests.support.disk import SimulatedDisk
from tests.support.engines import Seen, open_engine, view

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))
BIG = 1 << 20


async def actions(engine: Engine) -> AsyncIterator[None]:
    """Run a short history; yield after each action."""

    async def publish(queue: str, id: str, **options: float) -> None:
        await engine.publish(queue, body_of(id)[:40], message_id=id, **options)  # type: ignore[arg-type]

    await engine.create("orders", max_retries=1)
    yield
    await engine.create("news", broadcast=True, dead_letter=False)
    yield
    for group in ("a", "b"):
        assert await engine.consume("news", group=group) is None
        await engine.written()
        yield
    for id in ("1", "2", "3"):
        await publish("orders", id)
        yield
    await publish("news", "4")
    yield
    await publish("orders", "5", delay=1000)
    yield
    for how in ("ack", "dead", "requeue"):
        delivery = await engine.consume("orders")
        assert delivery is not None
        yield
        if how == "ack":
            await delivery.ack()
        else:
            await delivery.nack(how == "requeue")
        yield
    await publish("orders", "6", ttl=1000)
    yield
    assert await engine.remove("orders", ["5"]) == 1
    yield
    delivery = await engine.consume("news", group="a")
    assert delivery is not None
    yield
    await delivery.ack()
    yield
    assert await engine.consume("orders")  # the last allowed delivery of message 3
    yield
    await publish("orders", "7")
    yield


class Stage(NamedTuple):
    """End of the log after an action, and the messages recovered after a kill at that point."""

    segment: int
    size: int
    found: list[Seen]


async def recovered(files: dict[str, bytes], clock: VirtualClock, **options: bool) -> list[Seen]:
    engine = await open_engine(SimulatedDisk(files), clock, **options)
    try:
        return await view(engine)
    finally:
        await engine.aclose()


async def run_history(
    clock: VirtualClock, *, segment_bytes: int = BIG, close: bool = False, maintain: bool = False
) -> tuple[dict[str, bytes], list[Stage]]:
    disk = SimulatedDisk()
    engine = await open_engine(disk, clock, segment_bytes=segment_bytes)
    stops = [disk.files() async for _ in actions(engine)]
    if maintain:
        await engine.storage.maintain()
        await engine.publish("orders", body_of("8")[:40], message_id="8")
    files = disk.files()
    await engine.aclose()
    stages: list[Stage] = []
    for stop in stops:
        last = segments(stop)[-1]
        stages.append(Stage(int(last[:8]), len(stop[last]), await recovered(stop, clock)))
    return (disk.files() if close else files), stages


def segments(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if name.endswith(".seg"))


# Truncation


@pytest.mark.proves("002-pitfalls-2")
@pytest.mark.parametrize("segment_bytes", [BIG, 700], ids=["one-segment", "several"])
async def test_an_engine_cut_at_any_byte_recovers_the_exact_prefix_of_its_history(
    clock, segment_bytes
):
    files, stages = await run_history(clock, segment_bytes=segment_bytes)
    last = segments(files)[-1]
    number = int(last[:8])
    for cut in range(len(files[last]) + 1):
        found = await recovered({**files, last: files[last][:cut]}, clock)
        reached = [stage.found for stage in stages if (stage.segment, stage.size) <= (number, cut)]
        assert found == (reached[-1] if reached else []), cut


async def test_a_cut_in_an_older_segment_raises(clock):
    files, stages = await run_history(clock, segment_bytes=700)
    names = segments(files)
    assert len(names) >= 3
    sent = {item.id for stage in stages for item in stage.found}
    for name in names[:-1]:
        for cut in range(0, len(files[name]), 7):
            damaged = {**files, name: files[name][:cut]}
            with pytest.raises(LogDamaged, match=f"segment {int(name[:8])}"):
                await recovered(damaged, clock)
            found = await recovered(damaged, clock, repair=True)
            assert {item.id for item in found} <= sent
            assert all(item.body == body_of(item.id)[:40] for item in found)


# Flipped bits


def flips(data: bytes, random: Random) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        yield at, bytes(flipped)


def declarations(data: bytes) -> list[range]:
    """Return the byte ranges of the DECLARE records of a segment."""
    header, _ = read_header(data, 1)
    assert header is not None
    found: list[range] = []
    for offset in scan(data, header.salt).offsets:
        length = int.from_bytes(data[offset : offset + 4], "little")
        start = offset + FRAME_SIZE
        if isinstance(decode(data[start : start + length]), Declare):
            found.append(range(offset, start + length))
    return found


Found = dict[tuple[str, str | None, str], bool]


def states(found: list[Seen]) -> Found:
    assert all(item.body == body_of(item.id)[:40] for item in found), "wrong payload"
    assert len({(item.queue, item.group, item.id) for item in found}) == len(found)
    return {(item.queue, item.group, item.id): item.dead for item in found}


async def outcome(
    files: dict[str, bytes], clock: VirtualClock, *, repair: bool = False
) -> tuple[Found, list[Damage]]:
    engine = await open_engine(SimulatedDisk(files), clock, repair=repair)
    try:
        return states(await view(engine)), engine.storage.damage
    finally:
        await engine.aclose()


async def reported_damage(files: dict[str, bytes], clock: VirtualClock) -> list[Damage]:
    """Return the damage that is reported when the log is opened without a repair."""
    try:
        await outcome(files, clock)
    except LogDamaged as error:
        return list(error.damage)
    return []


@pytest.mark.parametrize(
    "close",
    [
        pytest.param(True, id="closed"),
        pytest.param(False, id="killed", marks=pytest.mark.torture),
    ],
)
async def test_a_flipped_bit_is_reported_and_never_yields_a_wrong_payload(clock, close):
    print("seed", SEED)
    files, stages = await run_history(clock, close=close)
    data = files[name_of(1)]
    intact = (await outcome(files, clock))[0]
    sent = {key for stage in stages for key in states(stage.found)}
    declared = declarations(data)
    for at, flipped in flips(data, Random(SEED)):
        damaged = {**files, name_of(1): flipped}
        reported = await reported_damage(damaged, clock)
        if reported:
            assert any(item.offset <= at < item.offset + item.length for item in reported)
        found, damage = await outcome(damaged, clock, repair=bool(reported))
        # After a clean close, the log opens without a repair only if no message is lost.
        assert reported or not close or found == intact
        assert damage, at
        assert {key[2] for key in found} <= {key[2] for key in sent}
        if not any(at in place for place in declared):
            # At most one record is lost: a message (in all groups of a topic) or a change to one.
            assert len({key[2] for key in intact.keys() - found.keys()}) <= 1, at


async def test_a_repair_keeps_the_messages_of_a_queue_whose_declaration_is_damaged(clock):
    files, _ = await run_history(clock, close=True)
    data = bytearray(files[name_of(1)])
    data[data.index(b"orders")] ^= 1
    damaged = {**files, name_of(1): bytes(data)}
    with pytest.raises(LogDamaged):
        await recovered(damaged, clock)
    intact, found = await recovered(files, clock), await recovered(damaged, clock, repair=True)
    alive = {item.id for item in intact if not item.dead}
    assert alive
    assert alive <= {item.id for item in found}  # in a queue with a new name


# Snapshots


async def test_a_damaged_snapshot_is_ignored(clock):
    print("seed", SEED)
    files, _ = await run_history(clock, segment_bytes=700, maintain=True)
    (name,) = [name for name in files if name.endswith(".snap")]
    intact = await recovered(files, clock)
    assert len(intact) > 4
    data = files[name]
    bad = [data[:cut] for cut in range(0, len(data), 7)]
    bad += [flipped for _, flipped in flips(data, Random(SEED))]
    for other in bad:
        engine = await open_engine(SimulatedDisk({**files, name: other}), clock)
        found, damage = await view(engine), engine.storage.damage
        await engine.aclose()
        assert found == intact
        assert [item.kind for item in damage] == ["snapshot"]


async def drain(engine: Engine) -> dict[str, bytes]:
    """Consume all messages, including dead letters; return their bodies by message id."""
    found: dict[str, bytes] = {}
    for name in await engine.list():
        for group in ("a", "b") if name == "news" else (None,):
            while (delivery := await engine.consume(name, group=group)) is not None:
                found[delivery.message_id] = delivery.body
    return found


@pytest.mark.proves("002-index-6")
async def test_damage_in_segments_that_a_snapshot_covers_is_found_when_they_are_read(clock, caplog):
    """Opening does not read segments that a snapshot covers, so damage there is found later."""
    print("seed", SEED)
    caplog.set_level(logging.ERROR, "qkit")
    files, _ = await run_history(clock, segment_bytes=700, maintain=True)
    (snapshot,) = [name for name in files if name.endswith(".snap")]
    covered = [name for name in segments(files) if int(name[:8]) <= int(snapshot[:8])]
    engine = await open_engine(SimulatedDisk(files), clock)
    intact = await drain(engine)
    await engine.aclose()
    random = Random(SEED)
    missing = 0
    for name in covered:
        bad = [flipped for at, flipped in flips(files[name], random) if at % 3 == 0]
        bad += [files[name][:cut] for cut in range(HEADER_SIZE, len(files[name]), 20)]
        for other in bad:
            caplog.clear()
            damaged = {**files, name: other}
            try:
                engine = await open_engine(SimulatedDisk(damaged), clock)
            except LogDamaged:
                engine = await open_engine(SimulatedDisk(damaged), clock, repair=True)
            damage = engine.storage.damage
            found = await drain(engine)
            await engine.aclose()
            assert all(body == body_of(id)[:40] for id, body in found.items())
            if intact.keys() - found.keys():
                missing += 1
                assert damage or "cannot be read" in caplog.text, (name, len(other))
    assert missing


@pytest.mark.parametrize("left", [b"", bytes(HEADER_SIZE)], ids=["empty", "no-header"])
async def test_an_emptied_segment_that_a_snapshot_covers_is_reported(clock, caplog, left):
    files, _ = await run_history(clock, segment_bytes=700, maintain=True)
    intact = await recovered(files, clock)
    files[name_of(1)] = left + files[name_of(1)][len(left) :] if left else b""
    caplog.clear()
    try:
        engine = await open_engine(SimulatedDisk(files), clock)
    except LogDamaged:
        return
    found, damage = await view(engine), engine.storage.damage
    await engine.aclose()
    assert len(found) == len(intact) or damage or caplog.text


async def test_a_repair_covers_segments_of_a_snapshot_and_lists_the_lost_messages(clock, caplog):
    files, _ = await run_history(clock, segment_bytes=700, maintain=True)
    (snapshot,) = [name for name in files if name.endswith(".snap")]
    covered = [name for name in segments(files) if int(name[:8]) <= int(snapshot[:8])]
    intact = await recovered(files, clock)
    random = Random(SEED)
    lost = 0
    for name in covered:
        bad = [flipped for at, flipped in flips(files[name], random) if at % 12 == 0]
        bad += [files[name][:cut] for cut in range(0, len(files[name]), 150)]
        for other in bad:
            disk = SimulatedDisk({**files, name: other})
            engine = await open_engine(disk, clock, repair=True)
            damage = " ".join(map(str, engine.storage.damage))
            found = await view(engine)  # peek and dead_letters raise no error
            await engine.aclose()
            missing = [item for item in intact if item not in found]
            lost += bool(missing)
            assert all(f"message {item.id!r} of" in damage for item in missing), name
            assert await recovered(disk.files(), clock) == found, "the repair is permanent"
    assert lost
