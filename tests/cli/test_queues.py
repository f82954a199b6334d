"""``qkit queues``, ``stats`` and ``purge``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from qkit import QueueService, Settings
from qkit.native import bulk_import
from qkit.native.bulk import BulkWriter, commit, published_jobs
from tests.support.cli import Shell


def test_queues_are_listed_without_their_dead_letter_queues(
    shell: Shell, letters: list[str]
) -> None:
    shell.run("send", "audit", "1")
    rows = {row["queue"]: row for row in shell.json("queues")}
    assert set(rows) == {"orders", "audit"}
    assert rows["orders"]["dead_letters"] == 3
    shown = shell.run("queues").stdout
    assert "audit" in shown
    assert "dead letters" in shown


def test_no_queues_are_said(shell: Shell) -> None:
    assert "no queues yet" in shell.run("queues").stderr
    assert shell.json("queues") == []


def test_stats_of_some_or_all(shell: Shell, letters: list[str]) -> None:
    shell.run("send", "audit", "1")
    assert [row["queue"] for row in shell.json("stats", "audit")] == ["audit"]
    assert len(shell.json("stats")) == 2
    assert "waiting" in shell.run("stats").stdout


def test_stats_can_be_watched_until_ctrl_c(shell: Shell) -> None:
    shell.run("send", "audit", "1")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "qkit.cli", "stats", "--watch", "--every", "0.1", "--json"],
        env=os.environ | {"QKIT_PATH": str(shell.path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for _ in range(3):
            (row,) = json.loads(process.stdout.readline())  # a line each
            assert (row["queue"], row["depth"]) == ("audit", 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_purging_asks_and_where_nobody_answers_it_does_not(shell: Shell) -> None:
    shell.run("send", "audit", "1")
    result = shell.run("purge", "audit", code=2)
    assert "--yes" in result.stderr
    assert shell.json("purge", "audit", "--yes") == {"queue": "audit", "purged": 1}
    assert "0 messages deleted" in shell.run("purge", "audit", "--yes").stderr


def test_it_talks_to_the_owner_of_a_directory_in_use(shell: Shell) -> None:
    async def both() -> None:
        async with QueueService(Settings(type="native", path=shell.path)) as owner:
            await owner.send("orders", 1)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "qkit.cli", "queues",
                env=os.environ | {"QKIT_PATH": str(shell.path)},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            output, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            assert b"orders" in output
            assert (await owner.stats("orders")).depth == 1  # it is still the owner

    asyncio.run(both())


def bulk(shell: Shell, queue: str) -> None:
    with BulkWriter(shell.path, f"load-{queue}", 0) as part:
        for number in range(5):
            part.put(queue, b"%d" % number)
    commit(shell.path, f"load-{queue}")


def test_bulk_files_committed_before_are_seen(shell: Shell) -> None:
    bulk(shell, "orders")
    assert [row["queue"] for row in shell.json("queues")] == ["orders"]
    assert published_jobs(shell.path) == []
    bulk(shell, "audit")
    assert [row["depth"] for row in shell.json("stats", "audit")] == [5]
    bulk(shell, "letters")
    assert len(shell.json("peek", "letters")) == 5


def test_a_damaged_bulk_file_is_a_warning(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_import, "CHECK_AFTER_SECONDS", 0.2)
    bulk(shell, "bad")
    file = shell.path / "inbox" / "load-bad" / "00000000.seg"
    file.write_bytes(file.read_bytes()[:-30])
    with BulkWriter(shell.path, "refused", 0) as part:
        part.declare("none", {"max_depth": 0})
    commit(shell.path, "refused")
    bulk(shell, "orders")
    result = shell.run("queues", "--json")
    assert [row["queue"] for row in json.loads(result.stdout)] == ["orders"]
    warnings = " ".join(result.stderr.split())
    assert "load-bad/00000000.seg is not whole" in warnings
    assert "max_depth is at least 1" in warnings
