"""Supervisor: worker exit codes that are final, and those that count as a crash."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from qkit._internal.retry import Backoff
from qkit.cli.supervisor import Supervisor

NO_DELAY = Backoff(initial=0.01, multiplier=1.0, maximum=0.01, jitter=0.0)

# Each run appends a character to the file and exits with the next exit code of the list.
PROGRAM = """
import pathlib, sys
record = pathlib.Path(sys.argv[1])
runs = len(record.read_text()) if record.exists() else 0
record.write_text("x" * (runs + 1))
sys.exit(int(sys.argv[2].split(",")[runs]))
"""


def worker(record: Path, codes: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(record), codes]


async def supervise(*commands: list[str]) -> int:
    return await Supervisor(commands, os.environ, drain_timeout=20, restart=NO_DELAY).run()


async def test_exit_code_2_at_the_first_start_stops_all_workers(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert await supervise(worker(tmp_path / "a", "2"), sleeping) == 2
    assert (tmp_path / "a").read_text() == "x"


async def test_exit_code_2_after_a_restart_is_a_crash(tmp_path: Path) -> None:
    commands = worker(tmp_path / "a", "3,2,2,0"), worker(tmp_path / "b", "1,0")
    assert await supervise(*commands) == 0
    assert (tmp_path / "a").read_text() == "xxxx"
    assert (tmp_path / "b").read_text() == "xx"


async def test_exit_code_2_after_a_long_first_run_is_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.cli.supervisor.STABLE_AFTER_SECONDS", 0.0)
    assert await supervise(worker(tmp_path / "a", "2,0")) == 0
    assert (tmp_path / "a").read_text() == "xx"
