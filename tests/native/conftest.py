"""Fixtures for tests of the native engine: engines in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from qkit.native import Engine
from qkit.testing.clock import VirtualClock


@pytest_asyncio.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    with VirtualClock() as clock:
        yield clock


@pytest_asyncio.fixture
async def engine(clock: VirtualClock) -> AsyncIterator[Engine]:
    async with Engine(clock=clock) as engine:
        yield engine


@pytest_asyncio.fixture(params=["memory", "durable"])
async def either(
    request: pytest.FixtureRequest, clock: VirtualClock, tmp_path: Path
) -> AsyncIterator[Engine]:
    """Provide an engine in memory, then one in a directory; both must behave the same."""
    if request.param == "memory":
        engine = Engine(clock=clock)
    else:
        engine = await Engine.open(tmp_path / "engine", clock=clock)
    async with engine:
        yield engine
