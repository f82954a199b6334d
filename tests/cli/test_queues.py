"""``qkit queues``, ``qkit stats`` and ``qkit purge``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from rich.text import Text

from qkit import QueueService, Settings
from qkit.backend import QueueStats
from qkit.cli import queues
from qkit.cli.terminal import out
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


def test_an_empty_list_of_queues_prints_a_note(shell: Shell) -> None:
    assert "no queues yet" in shell.run("queues").stderr
    assert shell.json("queues") == []


def test_stats_shows_one_queue_or_all(shell: Shell, letters: list[str]) -> None:
    shell.run("send", "audit", "1")
    assert [row["queue"] for row in shell.json("stats", "audit")] == ["audit"]
    assert len(shell.json("stats")) == 2
    assert "consumers" in shell.run("stats").stdout


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_the_terminal_and_show_every_column(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    name = "newsletter"
    monkeypatch.setattr(out, "_width", width)
    rates: dict[str, dict[str, str | Text]] = {name: {}}
    rates[name].update(dict.fromkeys(queues.RATES, "12,345.6"))
    stats = {name: (QueueStats(queue=name, depth=12_345, published_total=1_234_567), 3)}
    for table in (
        queues._queue_table(stats),
        queues._stats_table(stats),
        queues._stats_table(stats, rates),
    ):
        with out.capture() as captured:
            out.print(table)
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.startswith(name) for line in lines), (
            "the queue name is wrapped or truncated"
        )
    assert "published/s" in captured.get()


def test_stats_with_watch_prints_samples_until_ctrl_c(shell: Shell) -> None:
    shell.run("send", "audit", "1")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "qkit.cli", "stats", "--watch", "--every", "0.1", "--json"],
        env=os.environ | {"QKIT_PATH": str(shell.path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for _ in range(3):
            (row,) = json.loads(process.stdout.readline())  # one line per sample
            assert (row["queue"], row["depth"]) == ("audit", 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_a_purge_without_a_terminal_requires_yes(shell: Shell) -> None:
    shell.run("send", "audit", "1")
    result = shell.run("purge", "audit", code=2)
    assert "--yes" in result.stderr
    assert shell.json("purge", "audit", "--yes") == {"queue": "audit", "purged": 1}
    assert "0 messages deleted" in shell.run("purge", "audit", "--yes").stderr


def test_commands_connect_to_the_owner_of_a_directory(shell: Shell) -> None:
    async def main() -> None:
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
            assert (await owner.stats("orders")).depth == 1  # the owner is still open

    asyncio.run(main())


def write_bulk(shell: Shell, queue: str) -> None:
    with BulkWriter(shell.path, f"load-{queue}", 0) as part:
        for number in range(5):
            part.put(queue, b"%d" % number)
    commit(shell.path, f"load-{queue}")


def test_commands_import_bulk_files_that_were_committed_before(shell: Shell) -> None:
    write_bulk(shell, "orders")
    assert [row["queue"] for row in shell.json("queues")] == ["orders"]
    assert published_jobs(shell.path) == []
    write_bulk(shell, "audit")
    assert [row["depth"] for row in shell.json("stats", "audit")] == [5]
    write_bulk(shell, "invoices")
    assert len(shell.json("peek", "invoices")) == 5


def test_a_damaged_bulk_file_causes_a_warning(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_import, "CHECK_AFTER_SECONDS", 0.2)
    write_bulk(shell, "bad")
    file = shell.path / "inbox" / "load-bad" / "00000000.seg"
    file.write_bytes(file.read_bytes()[:-30])
    with BulkWriter(shell.path, "refused", 0) as part:
        part.declare("none", {"max_depth": 0})
    commit(shell.path, "refused")
    write_bulk(shell, "orders")
    result = shell.run("queues", "--json")
    assert [row["queue"] for row in json.loads(result.stdout)] == ["orders"]
    warnings = " ".join(result.stderr.split())
    assert "load-bad/00000000.seg is damaged" in warnings
    assert "max_depth and dead_letter_max_depth must be at least 1" in warnings


def test_a_long_name_is_not_cut_in_a_pipe(shell: Shell) -> None:
    name = "shop.europe-west.orders.placed-by-returning-customers"
    shell.run("send", name, "1")
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    listed = subprocess.run(
        [sys.executable, "-m", "qkit.cli", "queues"],
        env={**environment, "QKIT_PATH": str(shell.path)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("shop")]
    assert line.split()[0] == name
