"""Conformance suite on the backend of ``examples/custom_backend.py``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import pytest_asyncio

from examples.custom_backend import Queue, Toy
from qkit import QueueService, Settings, consume
from qkit._internal.clock import Clock
from qkit.conformance import Conformance, NewBackend


class TestToy(Conformance):
    column = Toy.capabilities
    virtual_time = True

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        queues: dict[str, Queue] = {}
        yield lambda: Toy(queues)


def test_the_example_is_at_most_150_lines_long() -> None:
    example = Path(__file__).parents[2] / "examples" / "custom_backend.py"
    assert len(example.read_text().splitlines()) <= 150


async def test_the_backend_is_opened_through_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("toy", "examples.custom_backend:open_toy", "qkit.backends")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda **wanted: EntryPoints([entry]).select(**wanted)
    )
    monkeypatch.setattr(
        "qkit.backends.factory.entry_points", lambda **wanted: EntryPoints([entry]).select(**wanted)
    )
    greeted: list[str] = []
    service = QueueService(Settings(type="toy"))

    @consume("greetings")
    async def greet(name: str) -> None:
        greeted.append(name)
        service.stop()

    service.register(greet)
    async with service:
        await service.send("greetings", "world")
        await service.run()
    assert greeted == ["world"]
