"""Bulk files of named jobs: one per queue, also when an older version published one of them."""

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


def publish_as_before(path: Path, job_id: str, queue: str, *, count: int = 2) -> None:
    """Do what an older version did: the bulk file is named after the job alone."""
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


async def test_a_job_counts_once_for_each_queue(tmp_path: Path) -> None:
    assert publish(tmp_path, "J", "a")
    assert publish(tmp_path, "J", "b")
    assert not publish(tmp_path, "J", "b"), "it waits in the inbox"
    assert await depths(tmp_path, "a", "b") == [2, 2]
    assert not publish(tmp_path, "J", "a"), "it is in the log"
    assert publish(tmp_path, "K", "a")
    assert await depths(tmp_path, "a", "b") == [4, 2]
    assert [item.name for item in (tmp_path / "inbox").iterdir()] == []


async def test_a_job_counts_once_after_its_messages_were_consumed_and_compacted(
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
async def test_what_an_older_version_published_counts_for_its_queue(
    tmp_path: Path, waits: bool
) -> None:
    publish_as_before(tmp_path, "J", "a")
    if not waits:
        assert await depths(tmp_path, "a") == [2]
    assert not publish(tmp_path, "J", "a")
    assert publish(tmp_path, "J", "b"), "an older version skipped it: its rows are not there"
    assert await depths(tmp_path, "a", "b") == [2, 2]


async def test_a_job_of_an_older_version_that_had_only_invalid_rows_counts(tmp_path: Path) -> None:
    publish_as_before(tmp_path, "J", "a_dlq")
    assert await depths(tmp_path, "a_dlq") == [2]
    assert not publish(tmp_path, "J", "a")


async def test_a_job_of_an_older_version_whose_queue_is_forgotten_is_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish_as_before(tmp_path, "J", "a")
    publish_as_before(tmp_path, "empty", "a", count=0)
    with VirtualClock() as clock:
        async with await Engine.open(tmp_path, clock=clock) as engine:
            await engine.import_bulk_files()
            await engine.purge("a")
            for _ in range(2):
                await engine.storage.log.rotate()
                await engine.storage.maintain()
    with caplog.at_level(logging.WARNING, logger="qkit.native"):
        assert not publish(tmp_path, "J", "a")
    assert "no longer tells to which queue" in caplog.text
    assert publish(tmp_path, "empty", "a"), "it had published nothing"


def test_names_fit_and_differ() -> None:
    long = "x" * 200
    names = {job_name(job, queue) for job in (long, "x" * 199, "J") for queue in ("a", "b")}
    assert len(names) == 6
    assert max(map(len, names)) == 200
    with pytest.raises(ConfigError, match="a job is named"):
        job_name("no/name", "a")


def test_a_directory_is_told_from_another_of_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    known = identity(directory)
    assert identity(directory) == known
    check_identity(directory, known)
    assert (directory / "ID").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in directory.iterdir()] == ["ID"]
    directory.rename(tmp_path / "other")
    with pytest.raises(StorageError, match="not the directory that the driver sees"):
        check_identity(directory, known)
    assert not directory.exists()
    assert identity(directory) != known
    with pytest.raises(StorageError, match="not the directory that the driver sees"):
        check_identity(directory, known)
    assert published_jobs(directory) == []
