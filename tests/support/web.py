"""Service for web tests, and clients of its app."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx

from qkit import Message, QueueService, Reject, Settings, channel, consume
from qkit.web import create_app

TOKEN = "correct-horse-battery-staple"
READ_TOKEN = "read-only-battery-staple"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
READING = {"Authorization": f"Bearer {READ_TOKEN}"}


@channel("orders", dead_letter=True)
class Orders:
    """Handler of numbers; rejects negative ones until ``accept_all`` is set."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.accept_all = False

    @consume(concurrency=2)
    async def place(self, number: int, message: Message) -> None:
        """Book one order."""
        if number < 0 and not self.accept_all:
            raise Reject(f"negative total {number}")
        self.handled.append(number)


def make_shop(*handlers: object) -> QueueService:
    """Return a service with an in-memory native engine and these handlers."""
    service = QueueService(Settings(type="native", retry={"jitter": 0, "initial_delay": 0.01}))
    for handler in handlers:
        service.register(handler)
    return service


@asynccontextmanager
async def client_of(
    service: QueueService,
    *,
    token: str | None = TOKEN,
    read_token: str | None = READ_TOKEN,
    hosts: tuple[str, ...] = (),
    base_url: str = "http://localhost:8710",
    peer: str = "127.0.0.1",
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that calls the app in process, by default with host name ``localhost``.

    The client sends the read token, if there is one; a change has to send ``AUTHORIZED``.
    """
    app = create_app(service, token=token, read_token=read_token, hosts=hosts)
    transport = httpx.ASGITransport(app=app, client=(peer, 12345))
    headers = {} if read_token is None else {"Authorization": f"Bearer {read_token}"}
    async with httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers) as client:
        yield client


async def eventually(
    condition: Callable[[], Awaitable[object]], seconds: float = 60.0, every: float = 0.02
) -> None:
    """Wait until the condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"condition not true within {seconds:g} s"
        await asyncio.sleep(every)


async def wait_for_dead_letters(service: QueueService, channel: str, count: int) -> None:
    """Wait until a channel has exactly ``count`` dead letters."""

    async def found() -> bool:
        return len(await service.dead_letters(channel).list(1_000)) == count

    await eventually(found)
