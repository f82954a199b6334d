"""Fixtures of the native engine's tests: an engine in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
