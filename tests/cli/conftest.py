"""A shell, and letters to find with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkit import QueueService, Reject, Settings, consume
from qkit.cli.common import LOGGERS
from tests.support.cli import Shell
from tests.support.web import buried


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Commands silence loggers, as they may: they are alone in their process."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKIT_CONFIG", "")  # a command may set it: it is alone in its process
    return Shell(tmp_path / "data")


@pytest.fixture
def letters(shell: Shell) -> list[str]:
    """Three dead letters of ``orders`` in the shell's directory; their ids."""

    @consume("orders", retry_on=[KeyError])
    async def refuse(number: int) -> None:
        if number == 3:
            raise ConnectionError("the gateway did not answer")
        raise Reject(f"negative total -{number}")

    async def bury() -> list[str]:
        service = QueueService(Settings(type="native", path=shell.path))
        service.register(refuse)
        async with service:
            sent = [await service.send("orders", number) for number in (1, 2, 3)]
            await buried(service, "orders", 3)
            return [item.message_id for item in sent]

    return asyncio.run(bury())
