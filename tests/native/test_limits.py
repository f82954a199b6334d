"""Hostile names, symbolic links, other processes, and limits on growth."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from qkit import QueueService, Settings
from qkit.errors import (
    ConfigError,
    InvalidName,
    LogLocked,
    QueueError,
    QueueFull,
    QueueNotFound,
    StorageError,
)
from qkit.native import Engine
from qkit.native.bulk import BulkWriter, commit
from qkit.native.catalogue import MAX_QUEUES
from qkit.native.log.encode import encode_declare, encode_publish
from qkit.observability.metrics import MAX_CHANNELS, Counters
from tests.support.engines import open_engine, view

LOOKALIKES = "ordérs", "orde\u0301rs", "оrders", "orders\u200b", "ORDERS\ufe0f"
HOSTILE = (
    "../x",
    "..",
    ".",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "nul\0byte",
    "line\r\nfeed",
    "x\n",
    "",
    " ",
    "n" * 300,
    "n" * 201,
    *LOOKALIKES,
)


def all_paths(path: Path) -> set[str]:
    return {str(item.relative_to(path)) for item in path.rglob("*")}


# Names


async def test_invalid_names_are_rejected_and_create_no_file(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    async with await Engine.open(tmp_path / "root" / "data") as engine:
        await engine.create("orders")
        await engine.create("news", broadcast=True)
        before = all_paths(tmp_path)
        for name in HOSTILE:
            with pytest.raises(InvalidName):
                await engine.create(name)
            with pytest.raises(InvalidName):
                await engine.consume("news", group=name)
            with pytest.raises(InvalidName):
                await engine.register("orders", name)
            with pytest.raises(InvalidName):
                await engine.register("news", "consumer", group=name)
            for work in (
                engine.publish(name, b""),
                engine.consume(name),
                engine.peek(name),
                engine.stats(name),
                engine.purge(name),
                engine.delete(name),
                engine.dead_letters(name),
            ):
                with pytest.raises(QueueNotFound):
                    await work
        assert all_paths(tmp_path) == before
        assert await engine.list() == ["news", "orders"]
        assert await engine.consumers("news") == []
    async with await Engine.open(tmp_path / "root" / "data") as engine:
        assert await engine.list() == ["news", "orders"]
    assert not any("\r" in record.getMessage() for record in caplog.records)


async def test_similar_names_do_not_collide(tmp_path):
    names = ["orders", "Orders", "orders.", "orders-", "orders_", "-orders", "a" * 200, "con"]
    async with await Engine.open(tmp_path) as engine:
        for name in names:
            await engine.create(name)
            await engine.publish(name, name.encode())
    async with await Engine.open(tmp_path) as engine:
        assert {item.queue: item.body for item in await view(engine)} == {
            name: name.encode() for name in names
        }


@pytest.mark.parametrize("name", ["nul\0byte", "line\r\nfeed"])
async def test_an_invalid_path_creates_no_file_elsewhere(tmp_path, name):
    try:
        async with await Engine.open(tmp_path / name):
            pass
    except (StorageError, ValueError, ConfigError):
        assert all_paths(tmp_path) == set()
    else:
        assert {Path(item).parts[0] for item in all_paths(tmp_path)} == {name}


async def test_any_text_in_ids_keys_and_headers_is_preserved(clock, tmp_path):
    texts = ["", "\0", "\r\n", "{", "{}", '{"a": 1}', "é", "😀", "\x1f", "a\0b\0c", "x" * 5000]
    engine = await open_engine(tmp_path, clock)
    await engine.create("orders")
    expected: list[tuple[str, str | None, dict[str, str]]] = []
    for text in texts:
        for headers in ({}, {"h": text}, {text: "v", "other": text}):
            expected.append((f"id{text}", text or None, headers))
            await engine.publish(
                "orders", b"", message_id=f"id{text}", key=text or None, headers=headers
            )
    await engine.aclose()
    engine = await open_engine(tmp_path, clock)
    found = [(item.id, item.key, item.headers) for item in await engine.peek("orders", 1000)]
    await engine.aclose()
    assert found == expected


async def test_a_message_that_does_not_fit_into_a_record_is_rejected_and_frees_its_capacity(
    clock, tmp_path
):
    engine = await open_engine(tmp_path, clock)
    await engine.create("orders", max_depth=2)
    bad: list[dict[str, Any]] = [
        {"key": "\udfff"},
        {"message_id": "\ud800"},
        {"message_id": "i" * 70_000},
        {"key": "k" * 70_000},
    ]
    for options in bad * 3:
        with pytest.raises((QueueError, ValueError)) as raised:
            await engine.publish("orders", b"", **options)
        assert not isinstance(raised.value, QueueFull)
    for _ in range(2):
        await engine.publish("orders", b"")
    with pytest.raises(QueueFull):
        await engine.publish("orders", b"")
    await engine.aclose()
    engine = await open_engine(tmp_path, clock)
    assert (await engine.stats("orders")).depth == 2
    await engine.aclose()


async def test_a_bulk_file_with_an_invalid_queue_name_is_rejected(tmp_path, caplog):
    with pytest.raises(InvalidName), BulkWriter(tmp_path, "job", 0) as part:
        part.put("../x", b"")
    for job in ("../x", "..", ".hidden", "a/b", "nul\0", "a\r\nb", "j" * 300, ""):
        with pytest.raises(ConfigError):
            BulkWriter(tmp_path, job, 0)
    assert all_paths(tmp_path) <= {"inbox", "inbox/.job"}


async def test_a_forged_bulk_file_with_an_invalid_queue_name_is_rejected(tmp_path):
    with BulkWriter(tmp_path, "job", 0) as part:
        part._add(encode_declare(1, "../x\r\n"))
        part._add(encode_publish(1, 0, "id", b""))
    commit(tmp_path, "job")
    async with await Engine.open(tmp_path) as engine:
        with contextlib.suppress(QueueError):
            await engine.import_bulk_files()
        names = await engine.list()
    assert names == []


async def test_a_consumer_name_cannot_inject_log_lines(clock, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    engine = await open_engine(tmp_path, clock)
    await engine.create("orders", max_retries=0)
    await engine.publish("orders", b"", message_id="a\r\nb")
    assert await engine.consume("orders", consumer="evil\r\nname", ack_deadline=1)
    await clock.advance(2)
    (letter,) = await engine.dead_letters("orders")
    await engine.aclose()
    assert letter.message_id == "a\r\nb"
    assert not any("\r" in record.getMessage() for record in caplog.records)


# Files


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


async def fill(path: Path) -> None:
    """Create an engine directory with several segments, a rewritten one and a snapshot."""
    engine = await open_engine(path, segment_bytes=2_000)
    await engine.create("orders")
    for number in range(30):
        await engine.publish("orders", bytes(200), message_id=str(number))
    for _ in range(20):
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.ack()
    await engine.storage.maintain()
    await engine.aclose()


@pytest.mark.usefixtures("umask")
async def test_all_files_of_an_engine_are_private_to_its_owner(tmp_path):
    data = tmp_path / "data"
    await fill(data)
    assert list(data.glob("log/*.snap"))
    for path in (data, *data.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


async def test_files_of_a_bulk_writer_are_not_writable_by_others(tmp_path):
    before = os.umask(0)
    try:
        with BulkWriter(tmp_path, "job", 0) as part:
            part.put("orders", b"")
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }
    assert modes.pop("inbox/.job/00000000.seg") == 0o600
    assert modes == {"inbox": 0o700, "inbox/.job": 0o700}


async def test_a_bulk_writer_follows_no_symbolic_link(tmp_path):
    data, target = tmp_path / "data", tmp_path / "target"
    await fill(data)
    target.mkdir()
    (data / "inbox").symlink_to(target)
    with contextlib.suppress(StorageError, OSError), BulkWriter(data, "job", 0) as part:
        part.put("orders", b"")
    assert all_paths(target) == set()


@pytest.mark.parametrize("place", ["", "LOCK", "log", "log/00000001.seg", "snapshot"])
async def test_a_planted_symbolic_link_is_rejected_and_its_target_is_unchanged(tmp_path, place):
    data, target = tmp_path / "data", tmp_path / "target"
    await fill(data)
    planted = next(data.glob("log/*.snap")) if place == "snapshot" else data / place
    planted.rename(target)
    planted.symlink_to(target)
    before = {path: path.read_bytes() for path in (target, *target.rglob("*")) if path.is_file()}
    with pytest.raises(StorageError, match="symbolic link"):
        await Engine.open(data)
    after = {path: path.read_bytes() for path in (target, *target.rglob("*")) if path.is_file()}
    assert after == before
    # The failed open has no lasting effect: without the link, the engine opens.
    planted.unlink()
    target.rename(planted)
    async with await Engine.open(data) as engine:
        assert (await engine.stats("orders")).depth == 10


async def test_a_symbolic_link_instead_of_the_inbox_is_not_followed(tmp_path):
    data, target = tmp_path / "data", tmp_path / "target"
    with BulkWriter(target, "job", 0) as part:
        part.put("orders", b"")
    commit(target, "job")
    await fill(data)
    (data / "inbox").symlink_to(target / "inbox")
    async with await Engine.open(data) as engine:
        assert await engine.import_bulk_files() == 0
    (data / "inbox").unlink()
    (data / "inbox").mkdir()
    (data / "inbox" / "job").symlink_to(target / "inbox" / "job")
    async with await Engine.open(data) as engine:
        assert await engine.import_bulk_files() == 0
    assert (target / "inbox" / "job" / "00000000.seg").exists()


async def test_a_second_process_is_rejected_with_the_pid_of_the_engine_owner(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from qkit.native import Engine\n"
        "async def main():\n"
        "    async with await Engine.open(sys.argv[1]) as engine:\n"
        "        await engine.create('orders')\n"
        "        await engine.publish('orders', b'one')\n"
        "        print('ready', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220  the test may block its loop
        [sys.executable, "-c", code, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        with pytest.raises(LogLocked, match=f"process {owner.pid}") as rejected:
            await Engine.open(tmp_path / "data")
        assert rejected.value.pid == owner.pid
        owner.kill()
    # The system releases the lock of a killed process.
    async with await Engine.open(tmp_path / "data") as engine:
        assert [item.body for item in await engine.peek("orders")] == [b"one"]
        with pytest.raises(LogLocked, match=f"process {os.getpid()}"):
            await Engine.open(tmp_path / "data")


# Growth


def resident() -> int:
    """Return the resident memory of the process in bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def size_of(path: Path) -> int:
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


async def poison(path: Path, count: int, keep: int) -> None:
    engine = await open_engine(path, fsync="never", segment_bytes=1 << 20, memory_limit=1 << 20)
    await engine.create("orders", max_retries=0, dead_letter_max_depth=keep)
    dropped = 0

    def count_dropped(letter: object) -> None:
        nonlocal dropped
        dropped += 1

    engine.on_dropped_letter(count_dropped)

    async def consume_and_nack() -> None:
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.nack()

    chunk = 500
    used: list[int] = []
    for start in range(0, count, chunk):
        await asyncio.gather(*(engine.publish("orders", b"poison" * 20) for _ in range(chunk)))
        await asyncio.gather(*(consume_and_nack() for _ in range(chunk)))
        if (start // chunk) % max(1, count // chunk // 10) == 0:
            await engine.storage.maintain()
        if start > 2 * keep:
            used.append(resident())
    stats = await engine.stats("orders_dlq")
    assert (stats.depth, stats.dropped_total, dropped) == (keep, count - keep, count - keep)
    assert (await engine.stats("orders")).dead_lettered_total == count
    growth = max(used) - used[0]
    await engine.storage.maintain()
    size = size_of(path)
    print(f"{count} poison messages: {growth >> 10} KiB more memory, {size >> 10} KiB of files")
    assert growth < 16 << 20
    assert size < 8 << 20
    await engine.aclose()
    engine = await open_engine(path)
    assert len(await engine.dead_letters("orders", count)) == keep
    await engine.aclose()


@pytest.mark.proves("002-index-4", "002-compaction-5", "002-testing-11")
async def test_poison_messages_fill_neither_memory_nor_disk(tmp_path):
    await poison(tmp_path, 6_000, 1_000)


@pytest.mark.full
@pytest.mark.timeout(1_800)
async def test_many_poison_messages_fill_neither_memory_nor_disk(tmp_path):
    await poison(tmp_path, 50_000, 1_000)


@pytest.mark.torture
@pytest.mark.timeout(3600)
async def test_a_million_poison_messages_fill_neither_memory_nor_disk(tmp_path):
    await poison(tmp_path, 1_000_000, 1_000)


async def bytes_for_each_queue(engine: Engine, count: int) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(count):
            await engine.create(f"queue-{number}")
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()


@pytest.mark.proves("000-figures-6", "001-concurrency-2")
async def test_many_queues_need_little_memory(tmp_path):
    async with Engine() as engine:
        memory = await bytes_for_each_queue(engine, 1_000)
    async with await Engine.open(tmp_path, fsync="never") as engine:
        durable = await bytes_for_each_queue(engine, 1_000)
    print(f"an empty queue: {memory:.0f} bytes in memory, {durable:.0f} in a directory")
    assert max(memory, durable) < 5_000
    async with await Engine.open(tmp_path) as engine:
        assert len(await engine.list()) == 1_000


@pytest.mark.proves("000-figures-8", "001-concurrency-2", "002-place-2")
async def test_an_empty_queue_needs_about_a_kilobyte():
    async with Engine() as engine:
        assert await bytes_for_each_queue(engine, 2_000) < 1_600


@pytest.mark.torture
@pytest.mark.timeout(1800)
async def test_declarations_beyond_the_queue_limit_are_rejected(tmp_path):
    async with await Engine.open(tmp_path, fsync="never") as engine:
        each = await bytes_for_each_queue(engine, MAX_QUEUES)
        print(f"an empty queue: {each:.0f} bytes")
        for number in range(MAX_QUEUES, 100_000):
            with pytest.raises(ConfigError):
                await engine.create(f"queue-{number}")
        assert engine.catalogue.rejected == 100_000 - MAX_QUEUES
        await engine.storage.maintain()
    async with await Engine.open(tmp_path) as engine:
        assert len(await engine.list()) == MAX_QUEUES


def test_the_number_of_metric_labels_is_limited():
    counters = Counters()
    for number in range(100_000):
        counters.for_channel(f"queue-{number}").sent += 1
    metrics = counters.snapshot()
    assert len(metrics.channels) <= MAX_CHANNELS + 1
    assert metrics.messages_sent == 100_000


async def test_the_number_of_queues_is_limited_and_rejections_are_counted(monkeypatch):
    monkeypatch.setattr("qkit.native.catalogue.MAX_QUEUES", 50)
    async with Engine() as engine:
        for number in range(100):
            with contextlib.suppress(ConfigError):
                await engine.create(f"q{number}")
        assert len(await engine.list()) == 50
        assert engine.catalogue.rejected == 50
        with pytest.raises(ConfigError, match="which is the limit: delete some"):
            await engine.create("another")
        await engine.create("q1")  # an existing queue is accepted
        await engine.delete("q1")
        await engine.create("another")


async def test_the_number_of_channels_of_a_service_is_limited_and_rejections_are_counted(
    monkeypatch,
):
    monkeypatch.setattr("qkit.handlers.route.MAX_ROUTES", 50)
    async with QueueService(Settings(type="native")) as service:
        for number in range(60):
            with contextlib.suppress(ConfigError):
                await service.send(f"user-{number}", 1)
        with pytest.raises(ConfigError, match="put variable data in the body"):
            await service.send("another", 1)
        await service.send("user-1", 2)
        metrics = service.metrics()
        assert metrics.channels_refused == 11
        assert metrics.messages_sent == 51


async def test_a_dead_letter_queue_is_created_even_beyond_the_queue_limit(monkeypatch):
    monkeypatch.setattr("qkit.native.catalogue.MAX_QUEUES", 1)
    async with Engine() as engine:
        await engine.create("orders")
        await engine.publish("orders", b"1")
        delivery = await engine.consume("orders")
        assert delivery is not None
        await delivery.nack(requeue=False)
        assert len(await engine.dead_letters("orders")) == 1
