"""Publishing and consuming through the socket, beside the same in the owner's own process.

The owner is another process, as it is for a client in earnest. Ratios of one run, because figures
of two machines, or of two hours, cannot be compared.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from qkit.backend import Backend, QueueSpec, SubscriptionSpec
from qkit.backends.native import NativeBackend
from qkit.backends.socket.client import SocketBackend
from qkit.backends.socket.server import SocketServer
from qkit.message import Envelope, new_id
from qkit.native import Engine

COUNT = 20_000
SENDERS = 100
ROUNDS = 5
BODY = b'{"id": 7, "total": 9.5}'
SPEC = SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=100)


async def serve(path: Path) -> None:
    async with Engine() as engine:
        server = SocketServer(NativeBackend(engine=engine), engine, path)
        await server.start()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await server.aclose()


async def publish(backend: Backend) -> None:
    """``COUNT`` messages by ``SENDERS`` tasks, each waiting for its confirmation."""

    async def send() -> None:
        for _ in range(COUNT // SENDERS):
            await backend.publish("q", [Envelope(new_id(), BODY)])

    await asyncio.gather(*[send() for _ in range(SENDERS)])


async def consume(backend: Backend) -> None:
    """Receive and acknowledge them all, in batches of what there is."""
    left = COUNT
    async with backend.subscribe(SPEC) as subscription:
        while left:
            deliveries = await subscription.receive(100)
            await asyncio.gather(*[subscription.ack(item) for item in deliveries])
            left -= len(deliveries)


async def rate(work: Callable[[Backend], Awaitable[None]], backend: Backend) -> float:
    gc.collect()
    began = time.perf_counter()
    await work(backend)
    return COUNT / (time.perf_counter() - began)


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "socket"
        owner = subprocess.Popen(  # noqa: ASYNC220  # nothing else runs yet
            [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdout.readline()
        here, there = NativeBackend(), SocketBackend(path)
        figures: dict[str, list[float]] = {}
        for backend in (here, there):
            await backend.start()
            await backend.declare(QueueSpec(name="q", max_depth=10 * COUNT))
        for _ in range(ROUNDS):
            for name, backend in (("in process", here), ("socket", there)):
                for work in (publish, consume):
                    found = await rate(work, backend)
                    figures.setdefault(f"{work.__name__} {name}", []).append(found)
        await there.aclose()
        await here.aclose()
        owner.stdin.close()
        owner.wait()
    best = {name: max(found) for name, found in figures.items()}
    for name, found in best.items():
        print(f"{name:22} {found:9,.0f}/s")
    for work in ("publish", "consume"):
        ratio = best[f"{work} socket"] / best[f"{work} in process"]
        print(f"{work}: socket / in process = {ratio:.2f}")


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])) if len(sys.argv) > 1 else main())
