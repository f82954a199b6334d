"""qkit on systems without fork and file locks, and without asyncio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from qkit import LifecycleError, QueueService, Settings
from qkit.native import Engine

WITHOUT_POSIX = """
import os, sys
del os.fork, os.register_at_fork  # the standard library asks for os.fork
sys.modules["fcntl"] = None  # importing it raises ModuleNotFoundError
import asyncio
import qkit
from qkit import *
from qkit.errors import Unsupported

@consume("numbers")
async def handle(number: int) -> None:
    print("handled", number)
    service.stop()

service = QueueService(Settings(type="native"))
service.register(handle)

async def main() -> None:
    async with service:
        await service.send("numbers", 7)
        await service.run()

asyncio.run(main())
with SyncQueueService(Settings(type="native")) as blocking:
    blocking.send("orders", 1)
    print("depth", blocking.stats("orders").depth)

async def on_disk() -> None:
    try:
        async with QueueService(Settings(type="native", path=sys.argv[1])):
            pass
    except Unsupported as error:
        print("unsupported:", error.message)

asyncio.run(on_disk())
"""


def test_in_memory_qkit_runs_without_fork_and_file_locks(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path / "data")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    handled, depth, unsupported = ran.stdout.splitlines()
    assert (handled, depth) == ("handled 7", "depth 1")
    assert "unsupported: a native directory needs POSIX file locks (fcntl)" in unsupported
    assert not (tmp_path / "data").exists()


def run_without_asyncio(work: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine until it first waits, as trio does: no asyncio event loop is running."""
    try:
        work.send(None)
    finally:
        work.close()


def test_under_another_event_loop_library_an_error_names_asyncio(tmp_path: Path) -> None:
    service = QueueService(Settings(type="native"))
    for call in (
        service.start,
        service.run,
        service.shutdown,
        Engine().__aenter__,
        lambda: Engine.open(tmp_path / "data"),
    ):
        with pytest.raises(LifecycleError, match=r"running asyncio event loop.*trio"):
            run_without_asyncio(call())
