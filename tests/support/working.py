"""What the workers of ``tests.support.workers`` do: ``python -m tests.support.working``.

Reads a job on each line of its input, forks a process for it, and says its pid and its end. A
worker says ``begin n attempt`` and ``end n`` for each message, in one write each: what was said
before a kill has been heard.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

from qkit import Channel, Message, QueueError, QueueService, Reject, Settings, consume
from qkit._internal.clock import SystemClock
from qkit.backends.factory import open_backend
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.message import Envelope, Sent
from tests.support.sessions import short_sessions

FOR_EVER: Final = 3_600.0
Job = dict[str, Any]


def say(number: str, *words: object) -> None:
    os.write(1, (" ".join([number, *map(str, words)]) + "\n").encode())


def make_service(job: Job) -> QueueService:
    return QueueService(Settings(**job["settings"]))


def consumer(job: Job) -> object:
    """A handler that does what the message says: sleep, fail, or hang if the job allows it."""
    me = job["number"]
    hangs = job.get("hangs", False)
    group = job.get("group", "workers")

    @consume(job["queue"], group=group, concurrency=job.get("concurrency", 4))
    async def work(body: dict[str, Any], message: Message) -> None:
        say(me, "begin", body["n"], message.attempt)
        match body.get("do"):
            case "hang" if hangs:
                await asyncio.sleep(FOR_EVER)
            case "reject":
                raise Reject("as it was told to")
            case _:
                await asyncio.sleep(random.random() * body.get("seconds", 0.0))
        say(me, "end", body["n"])

    return work


# -- roles -------------------------------------------------------------------------------------


async def serve(job: Job) -> None:
    """Consume until a signal; say ``ready`` once it does, ``abandoned`` and ``ended``."""
    me = job["number"]
    service = make_service(job)
    service.register(consumer(job))
    service.on("shutdown", lambda event: say(me, "abandoned", event.abandoned))
    await service.start()
    running = asyncio.create_task(service.run())
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # noqa: ASYNC110  # no event tells
        await asyncio.sleep(0)
    say(me, "ready")
    await running
    say(me, "ended")


async def own(job: Job) -> None:
    """Hold a directory for others, and nothing else."""
    async with make_service(job) as service:
        say(job["number"], "ready")
        await service.run()


async def send(job: Job) -> None:
    """Send until it is told to stop by SIGTERM: ``sent n`` for each that was confirmed."""
    me = job["number"]
    service = make_service(job)
    numbers = iter(range(10**9))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)

    async def sender() -> None:
        while not stopped.is_set():
            number = next(numbers)
            try:
                await service.send(job["queue"], {"n": number, "seconds": 0.01})
            except QueueError as error:
                say(me, "failed", number, type(error).__name__)
                await asyncio.sleep(0.05)
            else:
                say(me, "sent", number)
            await asyncio.sleep(job.get("pause", 0.005))

    async with service, asyncio.TaskGroup() as tasks:
        service.declare(Channel(job["queue"], dict))
        say(me, "ready")
        for _ in range(job.get("senders", 4)):
            tasks.create_task(sender())
    say(me, "ended")


class DiesAround(FaultInjectingBackend):
    """A backend whose process is killed right before or right after a dead letter is written."""

    def __init__(self, job: Job) -> None:
        super().__init__(open_backend(Settings(**job["settings"]), SystemClock()))
        self._when = job["dies"]
        self._queue = job["queue"]

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        if queue == self._queue:
            return await super().publish(queue, envelopes)
        if self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        sent = await super().publish(queue, envelopes)
        if self._when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return sent


async def die_around_a_dead_letter(job: Job) -> None:
    """Consume, and be killed right before or after the first dead letter is confirmed."""
    service = QueueService(Settings(**job["settings"]), backend=DiesAround(job))
    service.register(consumer(job))
    async with service:
        say(job["number"], "ready")
        await service.run()


ROLES = {role.__name__: role for role in (serve, own, send, die_around_a_dead_letter)}


# -- the nursery -------------------------------------------------------------------------------


def work(job: Job) -> None:
    """In a fork: one job, and its process ends with it."""
    code = 1
    try:
        asyncio.run(ROLES[job["role"]](job))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def keep(job: Job) -> None:
    """In a fork: have another one do the job, and say how it ended."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        work(job)
    say(job["number"], "pid", pid)
    _, status = os.waitpid(pid, 0)
    say(job["number"], "exit", os.waitstatus_to_exitcode(status))
    os._exit(0)


def main() -> None:
    # Nobody waits for the keepers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for client in ("redis.asyncio", "aio_pika", "aiokafka"):  # once, before any fork
        if importlib.util.find_spec(client.partition(".")[0]):
            importlib.import_module(client)
    with short_sessions():
        for line in sys.stdin:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                keep(json.loads(line))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
