"""A service with something to see, and clients for its pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx

from qkit import Message, QueueService, Reject, Settings, channel, consume
from qkit.web import create_app

TOKEN = "correct-horse-battery-staple"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@channel("orders", dead_letter=True)
class Orders:
    """Handles numbers; a negative one is refused, unless the shop was mended."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.mended = False

    @consume(concurrency=2)
    async def place(self, number: int, message: Message) -> None:
        """Book one order."""
        if number < 0 and not self.mended:
            raise Reject(f"negative total {number}")
        self.handled.append(number)


def make_shop(*handlers: object) -> QueueService:
    """A native service in memory."""
    service = QueueService(Settings(type="native", retry={"jitter": 0, "initial_delay": 0.01}))
    for handler in handlers:
        service.register(handler)
    return service


@asynccontextmanager
async def client_of(
    service: QueueService,
    *,
    token: str | None = TOKEN,
    hosts: tuple[str, ...] = (),
    base_url: str = "http://localhost:8710",
) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the app without a network, by a name of loopback."""
    transport = httpx.ASGITransport(app=create_app(service, token=token, hosts=hosts))
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        yield client


async def eventually(
    condition: Callable[[], Awaitable[object]], seconds: float = 60.0, every: float = 0.02
) -> None:
    """Ask until the answer is yes; ``seconds`` only bound a test that fails."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(every)


async def buried(service: QueueService, channel: str, count: int) -> None:
    """Wait until a channel has so many dead letters."""

    async def are_there() -> bool:
        return len(await service.dead_letters(channel).list()) == count

    await eventually(are_there)
