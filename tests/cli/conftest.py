"""Fixtures of the command-line tests: a command runner, and a queue with dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkit import QueueService, Reject, Settings, consume
from tests.support.cli import Shell, restored_log_levels
from tests.support.web import wait_for_dead_letters


@pytest.fixture(autouse=True)
def restore_log_levels() -> Iterator[None]:
    with restored_log_levels():
        yield


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKIT_CONFIG", "")  # commands set this variable; monkeypatch restores it
    return Shell(tmp_path / "data")


@pytest.fixture
def letters(shell: Shell) -> list[str]:
    """Ids of three dead letters of ``orders``."""

    @consume("orders", retry_on=[KeyError])
    async def reject(number: int) -> None:
        if number == 3:
            raise ConnectionError("the gateway did not respond")
        raise Reject(f"negative total -{number}")

    async def create() -> list[str]:
        service = QueueService(Settings(type="native", path=shell.path))
        service.register(reject)
        async with service:
            sent = [await service.send("orders", number) for number in (1, 2, 3)]
            await wait_for_dead_letters(service, "orders", 3)
            return [item.message_id for item in sent]

    return asyncio.run(create())
