"""The supervisor: which end of a worker is final, and which is a crash."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from qkit._internal.retry import Backoff
from qkit.cli.supervisor import Supervisor

SOON = Backoff(initial=0.01, multiplier=1.0, maximum=0.01, jitter=0.0)

# Each life takes the next of the exit codes in its arguments, and writes down that it lived.
LIVES = """
import pathlib, sys
diary = pathlib.Path(sys.argv[1])
lived = len(diary.read_text()) if diary.exists() else 0
diary.write_text("x" * (lived + 1))
sys.exit(int(sys.argv[2].split(",")[lived]))
"""


def worker(diary: Path, codes: str) -> list[str]:
    return [sys.executable, "-c", LIVES, str(diary), codes]


async def supervise(*commands: list[str]) -> int:
    return await Supervisor(commands, os.environ, drain_timeout=20, restart=SOON).run()


async def test_what_cannot_work_at_its_first_start_ends_all(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert await supervise(worker(tmp_path / "a", "2"), waiting) == 2
    assert (tmp_path / "a").read_text() == "x"


async def test_the_same_exit_code_later_is_a_crash_as_any_other(tmp_path: Path) -> None:
    commands = worker(tmp_path / "a", "3,2,2,0"), worker(tmp_path / "b", "1,0")
    assert await supervise(*commands) == 0
    assert (tmp_path / "a").read_text() == "xxxx"
    assert (tmp_path / "b").read_text() == "xx"


async def test_and_also_in_a_first_life_that_was_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.cli.supervisor.STABLE_AFTER_SECONDS", 0.0)
    assert await supervise(worker(tmp_path / "a", "2,0")) == 0
    assert (tmp_path / "a").read_text() == "xx"
