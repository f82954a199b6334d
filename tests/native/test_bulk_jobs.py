"""Bulk jobs with user-defined ids: each is published once per queue, even across versions."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from qkit.errors import ConfigError, StorageError
from qkit.native import Engine
from qkit.native.bulk import BulkWriter, check_identity, commit, identity, published_jobs
from qkit.native.bulk_jobs import commit_once, job_name
from qkit.testing import VirtualClock


def publish(path: Path, job_id: str, queue: str, *, count: int = 2, to: str | None = None) -> bool:
    with BulkWriter(path, "staged", 0) as part:
        for number in range(count):
            part.put(to or queue, b"%d" % number)
    return commit_once(path, "staged", job_id, queue, letters=f"{queue}_dlq")


def publish_with_old_version(path: Path, job_id: str, queue: str, *, count: int = 2) -> None:
    """Publish like an older version, which named the bulk file after the job only."""
    with BulkWriter(path, "staged", 0) as part:
        for number in range(count):
            part.put(queue, b"old %d" % number)
    assert commit(path, "staged", name=job_id)


async def depths(path: Path, *queues: str) -> list[int]:
    with VirtualClock() as clock:
        async with await Engine.open(path, clock=clock) as engine:
            await engine.import_bulk_files()
            known = await engine.list()
            return [len(await engine.peek(name, 100)) if name in known else 0 for name in queues]


async def test_a_job_is_published_once_to_each_queue(tmp_path: Path) -> None:
    assert publish(tmp_path, "J", "a")
    assert publish(tmp_path, "J", "b")
    assert not publish(tmp_path, "J", "b"), "published again while the job is in the inbox"
    assert await depths(tmp_path, "a", "b") == [2, 2]
    assert not publish(tmp_path, "J", "a"), "published again while the job is in the log"
    assert publish(tmp_path, "K", "a")
    assert await depths(tmp_path, "a", "b") == [4, 2]
    assert [item.name for item in (tmp_path / "inbox").iterdir()] == []


async def test_a_job_is_not_published_again_after_its_messages_were_compacted(
    tmp_path: Path,
) -> None:
    publish(tmp_path, "J", "a")
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            await engine.import_bulk_files()
            assert await engine.purge("a") == 2
            for _ in range(2):
                await engine.storage.log.rotate()
                await engine.storage.maintain()
            assert not publish(tmp_path, "J", "a")
            assert publish(tmp_path, "J", "b")


@pytest.mark.parametrize("waits", [True, False], ids=["in the inbox", "in the log"])
async def test_a_job_of_an_older_version_counts_as_published_to_its_queue(
    tmp_path: Path, waits: bool
) -> None:
    publish_with_old_version(tmp_path, "J", "a")
    if not waits:
        assert await depths(tmp_path, "a") == [2]
    assert not publish(tmp_path, "J", "a")
    assert publish(tmp_path, "J", "b"), "not published to the second queue"
    assert await depths(tmp_path, "a", "b") == [2, 2]


async def test_a_job_of_an_older_version_with_only_invalid_rows_counts_as_published(
    tmp_path: Path,
) -> None:
    publish_with_old_version(tmp_path, "J", "a_dlq")
    assert await depths(tmp_path, "a_dlq") == [2]
    assert not publish(tmp_path, "J", "a")


async def test_a_job_of_an_older_version_with_an_unknown_queue_is_not_published_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish_with_old_version(tmp_path, "J", "a")
    publish_with_old_version(tmp_path, "empty", "a", count=0)
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            await engine.import_bulk_files()
            await engine.purge("a")
            for _ in range(2):
                await engine.storage.log.rotate()
                await engine.storage.maintain()
    with caplog.at_level(logging.WARNING, logger="qkit.native"):
        assert not publish(tmp_path, "J", "a")
    assert "no longer contains its queue" in caplog.text
    assert publish(tmp_path, "empty", "a"), "a job without messages blocked its id"


def test_job_names_are_valid_and_unique() -> None:
    long = "x" * 200
    names = {job_name(job, queue) for job in (long, "x" * 199, "J") for queue in ("a", "b")}
    assert len(names) == 6
    assert max(map(len, names)) == 200
    with pytest.raises(ConfigError, match="a job name must be"):
        job_name("no/name", "a")


def test_a_different_directory_at_the_same_path_is_rejected(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    known = identity(directory)
    assert identity(directory) == known
    check_identity(directory, known)
    assert (directory / "ID").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in directory.iterdir()] == ["ID"]
    directory.rename(tmp_path / "other")
    with pytest.raises(StorageError, match="not the directory of the driver"):
        check_identity(directory, known)
    assert not directory.exists()
    assert identity(directory) != known
    with pytest.raises(StorageError, match="not the directory of the driver"):
        check_identity(directory, known)
    assert published_jobs(directory) == []
