"""Processes that share a directory: ``python -m tests.support.sharer <directory> <part> …``.

The directory is locked as a durable engine would lock it, and its messages are in memory. Each
process says which role it has, and goes on until it is killed or its input ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from pathlib import Path

from qkit import QueueError, QueueService, Settings, consume
from qkit.backends.native import NativeBackend
from qkit.backends.shared import SharedBackend
from qkit.clock import Clock
from qkit.native import Engine

__all__ = ["Locked", "LockedEngine", "share"]


class Locked(Exception):
    """Another process has the directory."""


class LockedEngine(Engine):
    """An engine in memory that holds the lock of a directory until it is closed."""

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        super().__init__(clock=clock)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Locked from None

    async def aclose(self) -> None:
        await super().aclose()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def share(directory: Path, **options: float) -> SharedBackend:
    """A backend on a directory that is shared."""

    async def own() -> tuple[NativeBackend, Engine]:
        engine = await LockedEngine(directory).__aenter__()
        return NativeBackend(engine=engine), engine

    return SharedBackend(directory, own, locked=Locked, **options)  # type: ignore[arg-type]  # seconds


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


async def tell_roles(backend: SharedBackend) -> None:
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
