"""Process that shares a directory: ``python -m tests.support.sharer <directory> <part> …``.

It prints each change of its role (owner or client) and runs until it is killed or stdin closes.
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
    """Return a backend on a shared directory."""

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


def report(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


@consume("orders", concurrency=4)
async def take(body: int) -> None:
    report("got", body)


@consume("orders")
async def block(body: int) -> None:
    report("begin", body)
    time.sleep(1.5)  # noqa: ASYNC251  # the loop is blocked on purpose
    report("end", body)


@consume("orders")
async def keep(body: int) -> None:
    report("begin", body)
    await asyncio.sleep(3_600)


async def send(service: QueueService, pause: float) -> None:
    for number in range(1_000_000):
        try:
            await service.send("orders", number)
        except QueueError as error:
            report("refused", number, type(error).__name__)
        else:
            report("sent", number)
        await asyncio.sleep(pause)


async def report_roles(backend: SharedDirectoryBackend) -> None:
    role = None
    while True:
        now = "owner" if backend.owner else "client" if backend._role is not None else "none"
        if now != role:
            role = now
            report(role)
        await asyncio.sleep(0.005)


async def main(directory: Path, part: str, deadline: float) -> None:
    backend = share(directory)
    settings = Settings(type="native", ack_deadline=deadline, retry={"max_attempts": 9})
    service = QueueService(settings, backend=backend)
    if handler := {"consume": take, "block": block, "keep": keep}.get(part):
        service.register(handler)
    loop = asyncio.get_running_loop()
    async with service, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(report_roles(backend))]
        if part == "send":
            running.append(tasks.create_task(send(service, 0.005)))
        await loop.run_in_executor(None, sys.stdin.read)
        for task in running:
            task.cancel()
    report("ended")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
