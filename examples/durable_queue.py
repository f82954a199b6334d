"""A durable work queue that is killed with -9, twice, and loses nothing.

    python examples/durable_queue.py [DIRECTORY]

A shop sends jobs and is killed in the middle of it; a worker works on them and is killed in the
middle of a job; a second worker finds everything that was accepted and not done. This program
keeps the books from outside: what was confirmed to the shop, and what the workers said was done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable

from pydantic import BaseModel

from qkit import QueueService, Settings, consume

JOBS = 200


class Job(BaseModel):
    """A picture to be made smaller."""

    number: int
    picture: str


def queue(directory: str) -> QueueService:
    """The queue lives in a directory; no server is needed."""
    return QueueService(Settings(type="native", path=directory, ack_deadline=5.0))


async def shop(directory: str) -> None:
    """Send jobs; each is on the disk when its send returns."""
    async with queue(directory) as service:
        for number in range(1, JOBS + 1):
            await service.send("pictures", Job(number=number, picture=f"{number}.png"))
            print(f"sent {number}", flush=True)
        await asyncio.sleep(3600)  # until it is killed


async def worker(directory: str) -> None:
    """Work on jobs, four at a time, until it is stopped."""

    @consume("pictures", concurrency=4)
    async def shrink(job: Job) -> None:
        await asyncio.sleep(0.01)
        print(f"done {job.number}", flush=True)

    service = queue(directory)
    service.register(shrink)
    await service.run()  # SIGTERM: finish what is in hand, then end


def run(
    role: str, directory: str, how: signal.Signals, enough: Callable[[list[int]], bool]
) -> list[int]:
    """Start a process, read what it says, and end it when that is enough (or after a minute)."""
    said: list[int] = []
    with subprocess.Popen(
        [sys.executable, __file__, role, directory], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        for line in process.stdout:
            said.append(int(line.split()[1]))
            if enough(said):
                process.send_signal(how)
        watchdog.cancel()
    print(f"  {role} {process.pid}: {len(said)} jobs, then ended by {how.name}")
    return said


def main(directory: str) -> int:
    """Run the story and check the books."""
    print(f"the queue is in {directory}")
    sent = run("shop", directory, signal.SIGKILL, lambda said: len(said) == JOBS // 2)
    done = run("worker", directory, signal.SIGKILL, lambda said: len(said) == JOBS // 4)
    done += run("worker", directory, signal.SIGTERM, lambda said: set(sent) <= {*done, *said})
    lost = set(sent) - set(done)
    twice = [number for number, count in Counter(done).items() if count > 1]
    print(f"confirmed to the shop: {len(sent)}, done: {len(set(done))}")
    print(f"lost: {len(lost)}, done twice: {len(twice)} (in hand when the worker was killed)")
    return 1 if lost else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shop", directory]:
            asyncio.run(shop(directory))
        case ["worker", directory]:
            asyncio.run(worker(directory))
        case [directory]:
            sys.exit(main(os.path.realpath(directory)))
        case _:
            with tempfile.TemporaryDirectory() as directory:
                sys.exit(main(directory))
