"""Benchmarks of a native engine used through its owner's Unix socket, against direct access.

As in production, the owner is a separate process; it runs this module as a program.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks._durable import IN_FLIGHT, run_concurrently
from benchmarks._in_memory import BODY
from benchmarks._measure import Figure, Scale, Suite
from qkit import Channel, QueueService, Settings
from qkit.backend import AckMany, Backend, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.server.server import SocketServer
from qkit.native import Engine

__all__ = ["SUITES"]


async def _drive(backend: Backend, count: int) -> tuple[float, float]:
    """Return the seconds per send and per delivery with ack, with 100 messages in flight.

    Deliveries are acked as in a service: in one call if the subscription supports it.
    """
    channel = Channel("bench", bytes, max_depth=count + IN_FLIGHT)
    async with QueueService(Settings(type="native"), backend=backend) as service:
        sent = await run_concurrently(count, lambda: service.send(channel, BODY))
        spec = SubscriptionSpec(queue="bench", group="bench", consumer="bench", prefetch=IN_FLIGHT)
        async with backend.subscribe(spec) as source:
            started, done = time.perf_counter(), 0
            while done < count // IN_FLIGHT * IN_FLIGHT:
                deliveries = await source.receive(IN_FLIGHT)
                if isinstance(source, AckMany):
                    assert not any(await source.ack_many(deliveries))
                else:
                    await asyncio.gather(*[source.ack(delivery) for delivery in deliveries])
                done += len(deliveries)
            return sent, (time.perf_counter() - started) / done


@asynccontextmanager
async def _engine(path: Path, kind: str) -> AsyncGenerator[Engine]:
    async with Engine() if kind == "memory" else await Engine.open(path) as engine:
        yield engine


async def _in_process(path: Path, count: int, kind: str) -> tuple[float, float]:
    async with _engine(path, kind) as engine:
        return await _drive(NativeBackend(engine=engine), count)


async def _through_socket(path: Path, count: int, kind: str) -> tuple[float, float]:
    await asyncio.to_thread(path.mkdir, exist_ok=True)
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks._socket",
        str(path),
        kind,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        if await owner.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that owns the engine did not start")
        return await _drive(SocketBackend(path / "socket"), count)
    finally:
        owner.stdin.close()  # ends the owner
        await owner.wait()


async def _socket(scale: Scale) -> Mapping[str, float]:
    path, count = scale.directory, scale.count
    direct = await _in_process(path / "own", count, "durable")
    socket = await _through_socket(path / "shared", count, "durable")
    memory_direct = await _in_process(path, count, "memory")
    memory_socket = await _through_socket(path / "memory", count, "memory")
    return {
        "socket.send": direct[0] / socket[0],
        "socket.settle": direct[1] / socket[1],
        "socket.cycle": sum(direct) / sum(socket),
        "socket.cycle_rate": 1 / sum(socket),
        "socket.memory_send": memory_direct[0] / memory_socket[0],
        "socket.memory_settle": memory_direct[1] / memory_socket[1],
    }


async def _serve(path: Path, kind: str) -> None:
    async with _engine(path, kind) as engine:
        backend = NativeBackend(engine=engine)
        server = SocketServer(backend, engine, path / "socket")
        await server.start()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await server.aclose()


SUITES = (
    Suite(
        "socket",
        (
            Figure("socket.send", "socket: send / in process, fsync always", 0.3),
            Figure("socket.settle", "socket: consume + ack / in process, fsync always", 0.3),
            Figure("socket.cycle", "socket: send + consume + ack / in process", 0.3),
            Figure("socket.cycle_rate", "socket: send + consume + ack", None, "/s"),
            Figure("socket.memory_send", "socket, in memory: send / in process"),
            Figure("socket.memory_settle", "socket, in memory: consume + ack / in process"),
        ),
        _socket,
    ),
)

if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2]))
