"""Fixtures of the pytest plugin, which require pytest-asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest_asyncio

from qkit.service import QueueService
from qkit.settings.model import Settings
from qkit.testing.clock import VirtualClock
from qkit.testing.service import TestService

__all__ = ["qkit_service", "virtual_clock"]


@pytest_asyncio.fixture
async def virtual_clock() -> AsyncGenerator[VirtualClock, None]:
    """Provide virtual time in the event loop of the test."""
    with VirtualClock() as clock:
        yield clock


@pytest_asyncio.fixture
async def qkit_service(
    virtual_clock: VirtualClock,
) -> AsyncGenerator[Callable[..., Awaitable[TestService]], None]:
    """Provide a function that starts handlers or a service in a ``TestService``.

    Call ``t = await qkit_service(Orders(ledger))`` or ``t = await qkit_service(my_service)``. The
    service is shut down after the test.
    """
    async with AsyncExitStack() as stack:

        async def start(*targets: object) -> TestService:
            if len(targets) == 1 and isinstance(targets[0], QueueService):
                service = targets[0]
            else:
                service = QueueService(Settings(type="native"))
                for target in targets:
                    service.register(target)
            return await stack.enter_async_context(TestService(service, clock=virtual_clock))

        yield start
