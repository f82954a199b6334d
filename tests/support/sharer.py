"""Processes that share a directory: ``python -m tests.support.sharer <directory> <part> …``.

Each process says which role it has, and goes on until it is killed or its input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from qkit import QueueError, QueueService, Settings, consume
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.shared_directory import SharedDirectoryBackend
from qkit.errors import LogLocked
from qkit.native import Engine

__all__ = ["share"]


def share(directory: Path, **options: float) -> SharedDirectoryBackend:
    """A backend on a directory that is shared."""

    async def own() -> tuple[NativeBackend, Engine]:
        engine = await Engine.open(directory)
        return NativeBackend(engine=engine), engine

    return SharedDirectoryBackend(
        directory,
        own,
        locked=LogLocked,
        capabilities=MATRIX["native-durable"],
        **options,  # type: ignore[arg-type]  # seconds
    )


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


@consume("orders", concurrency=4)
async def take(body: int) -> None:
    say("got", body)


@consume("orders")
async def block(body: int) -> None:
    say("begin", body)
    time.sleep(1.5)  # noqa: ASYNC251  # blocking the loop is the point
    say("end", body)


@consume("orders")
async def keep(body: int) -> None:
    say("begin", body)
    await asyncio.sleep(3_600)


async def send(service: QueueService, pause: float) -> None:
    for number in range(1_000_000):
        try:
            await service.send("orders", number)
        except QueueError as error:
            say("refused", number, type(error).__name__)
        else:
            say("sent", number)
        await asyncio.sleep(pause)


async def tell_roles(backend: SharedDirectoryBackend) -> None:
    role = None
    while True:
        now = "owner" if backend.owner else "client" if backend._role is not None else "nobody"
        if now != role:
            role = now
            say(role)
        await asyncio.sleep(0.005)


async def main(directory: Path, part: str, deadline: float) -> None:
    backend = share(directory)
    settings = Settings(type="native", ack_deadline=deadline, retry={"max_attempts": 9})
    service = QueueService(settings, backend=backend)
    if handler := {"consume": take, "block": block, "keep": keep}.get(part):
        service.register(handler)
    loop = asyncio.get_running_loop()
    async with service, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(tell_roles(backend))]
        if part == "send":
            running.append(tasks.create_task(send(service, 0.005)))
        await loop.run_in_executor(None, sys.stdin.read)
        for task in running:
            task.cancel()
    say("ended")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
