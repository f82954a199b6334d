"""Fork server and worker roles for ``tests.support.workers``.

Run as ``python -m tests.support.worker_roles``, it forks a process for each job (a line of JSON on
stdin) and reports the pid and the exit code. A consumer reports ``begin n attempt`` and ``end n``
(or ``cancelled n``) for each message, each in a single write, so that no report is lost if the
process is killed.
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

FOREVER_SECONDS: Final = 3_600.0
EXIT_CODE: Final = 3  # of a handler that exits
Job = dict[str, Any]


def report(number: str, *words: object) -> None:
    os.write(1, (" ".join([number, *map(str, words)]) + "\n").encode())


def make_service(job: Job) -> QueueService:
    return QueueService(Settings(**job["settings"]))


def consumer(job: Job) -> object:
    """Return a handler that sleeps, rejects or (if the job allows it) hangs or exits."""
    worker_number = job["number"]
    hangs = job.get("hangs", False)
    group = job.get("group", "workers")

    options = job.get("options", {})

    @consume(job["queue"], group=group, concurrency=job.get("concurrency", 4), **options)
    async def work(body: dict[str, Any], message: Message) -> None:
        report(worker_number, "begin", body["n"], message.attempt)
        try:
            match body.get("do"):
                case "hang" if hangs:
                    await asyncio.sleep(FOREVER_SECONDS)
                case "exit" if job.get("exits", False):
                    sys.exit(EXIT_CODE)
                case "reject":
                    raise Reject("requested by the message")
                case _:
                    await asyncio.sleep(random.random() * body.get("seconds", 0.0))
        except asyncio.CancelledError:
            report(worker_number, "cancelled", body["n"])
            raise
        report(worker_number, "end", body["n"])

    return work


# -- roles -------------------------------------------------------------------------------------


async def serve(job: Job) -> None:
    """Consume until a signal arrives; report ``ready``, ``abandoned`` and ``exited``."""
    worker_number = job["number"]
    service = make_service(job)
    service.register(consumer(job))
    service.on("shutdown", lambda event: report(worker_number, "abandoned", event.abandoned))
    await service.start()
    running = asyncio.create_task(service.run())
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # noqa: ASYNC110  # no event to wait for
        await asyncio.sleep(0)
    report(worker_number, "ready")
    await running
    report(worker_number, "exited")


async def own(job: Job) -> None:
    """Own a directory and serve it to other processes."""
    async with make_service(job) as service:
        report(job["number"], "ready")
        await service.run()


async def send(job: Job) -> None:
    """Send until SIGTERM; report ``sent n`` or ``failed n error`` for each message."""
    worker_number = job["number"]
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
                report(worker_number, "failed", number, type(error).__name__)
                await asyncio.sleep(0.05)
            else:
                report(worker_number, "sent", number)
            await asyncio.sleep(job.get("pause", 0.005))

    async with service, asyncio.TaskGroup() as tasks:
        service.declare(Channel(job["queue"], dict))
        report(worker_number, "ready")
        for _ in range(job.get("senders", 4)):
            tasks.create_task(sender())
    report(worker_number, "exited")


class KilledAroundDeadLetter(FaultInjectingBackend):
    """Backend that kills its process right before or right after it writes a dead letter."""

    def __init__(self, job: Job) -> None:
        super().__init__(open_backend(Settings(**job["settings"]), SystemClock()))
        self._when = job["killed"]
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


async def be_killed_around_a_dead_letter(job: Job) -> None:
    """Consume until the process is killed right before or after the first dead letter."""
    service = QueueService(Settings(**job["settings"]), backend=KilledAroundDeadLetter(job))
    service.register(consumer(job))
    async with service:
        report(job["number"], "ready")
        await service.run()


ROLES = {role.__name__: role for role in (serve, own, send, be_killed_around_a_dead_letter)}


# -- fork server -------------------------------------------------------------------------------


def work(job: Job) -> None:
    """Run one job in a forked process, then exit."""
    code = 1
    try:
        asyncio.run(ROLES[job["role"]](job))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def supervise(job: Job) -> None:
    """Fork a process for the job, wait for it, and report its exit code."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        work(job)
    report(job["number"], "pid", pid)
    _, status = os.waitpid(pid, 0)
    report(job["number"], "exit", os.waitstatus_to_exitcode(status))
    os._exit(0)


def main() -> None:
    # The kernel reaps the supervising processes, because the fork server does not wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for client in ("redis.asyncio", "aio_pika", "aiokafka"):  # import once, before any fork
        if importlib.util.find_spec(client.partition(".")[0]):
            importlib.import_module(client)
    with short_sessions():
        for line in sys.stdin:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(json.loads(line))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
