"""A durable work queue whose processes are killed with SIGKILL twice, without losing a job.

    python examples/durable_queue.py [DIRECTORY]

A shop sends jobs and is killed while sending. A worker handles them and is killed in the middle of
a job. A second worker receives every job that was confirmed but not done. The main program records
which jobs were confirmed and which the workers reported as done, and compares the two.
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
    """Job to shrink one picture."""

    number: int
    picture: str


def queue(directory: str) -> QueueService:
    """Return a service that stores its queues in a directory; no server is needed."""
    return QueueService(Settings(type="native", path=directory, ack_deadline=5.0))


async def shop(directory: str) -> None:
    """Send jobs; each job is on disk when ``send`` returns."""
    async with queue(directory) as service:
        for number in range(1, JOBS + 1):
            await service.send("pictures", Job(number=number, picture=f"{number}.png"))
            print(f"sent {number}", flush=True)
        await asyncio.sleep(3600)  # wait to be killed


async def worker(directory: str) -> None:
    """Handle jobs, four at a time, until SIGTERM."""

    @consume("pictures", concurrency=4)
    async def shrink(job: Job) -> None:
        await asyncio.sleep(0.01)
        print(f"done {job.number}", flush=True)

    service = queue(directory)
    service.register(shrink)
    await service.run()  # on SIGTERM, finish the running jobs, then return


def run(
    role: str, directory: str, end_signal: signal.Signals, is_done: Callable[[list[int]], bool]
) -> list[int]:
    """Start a process and collect the job numbers it prints; end it when ``is_done`` is true.

    A process that takes longer than a minute is killed.
    """
    numbers: list[int] = []
    with subprocess.Popen(
        [sys.executable, __file__, role, directory], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        for line in process.stdout:
            numbers.append(int(line.split()[1]))
            if is_done(numbers):
                process.send_signal(end_signal)
        watchdog.cancel()
    print(f"  {role} {process.pid}: {len(numbers)} jobs, then ended by {end_signal.name}")
    return numbers


def main(directory: str) -> int:
    """Run the shop and the workers; return 1 if a job was lost, otherwise 0."""
    print(f"the queue is in {directory}")
    sent = run("shop", directory, signal.SIGKILL, lambda numbers: len(numbers) == JOBS // 2)
    done = run("worker", directory, signal.SIGKILL, lambda numbers: len(numbers) == JOBS // 4)
    done += run("worker", directory, signal.SIGTERM, lambda numbers: set(sent) <= {*done, *numbers})
    lost = set(sent) - set(done)
    twice = [number for number, count in Counter(done).items() if count > 1]
    print(f"confirmed to the shop: {len(sent)}, done: {len(set(done))}")
    print(f"lost: {len(lost)}, done twice: {len(twice)} (in flight when the worker was killed)")
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
