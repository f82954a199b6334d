"""Worker process for the signal tests: ``python -m tests.support.worker <kind>:<handler>``.

It reports on stdout, one line for each event. ``load`` reports each confirmed send, the start and
end of each handler call and, before it exits, the number of remaining messages. ``one`` and
``sync`` send one message; they report its handler call, and at shutdown the number of abandoned
messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import threading
import time

from qkit import Message, QueueError, QueueService, Settings, SyncQueueService, consume
from qkit.backends.native.backend import NativeBackend
from qkit.native import Engine

SETTINGS = Settings(type="native", shutdown={"timeout": 20})
FOREVER_SECONDS = 3_600.0


def report(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


@consume("orders", concurrency=8)
async def work(body: int, message: Message) -> None:
    report("begin", message.id)
    await asyncio.sleep(random.random() / 50)
    report("end", message.id)


@consume("orders", concurrency=8)
def work_in_thread(body: int, message: Message) -> None:
    report("begin", message.id)
    time.sleep(random.random() / 50)
    report("end", message.id)


@consume("orders")
async def stuck(body: int) -> None:
    report("begin", body)
    await asyncio.sleep(FOREVER_SECONDS)


@consume("orders")
def stuck_in_thread(body: int) -> None:
    report("begin", body)
    time.sleep(FOREVER_SECONDS)


@consume("orders")
async def stuck_in_loop(body: int) -> None:
    report("begin", body)
    time.sleep(FOREVER_SECONDS)  # noqa: ASYNC251  # the loop is blocked on purpose


@consume("orders")
async def stubborn(body: int) -> None:
    report("begin", body)
    while True:
        try:
            await asyncio.sleep(FOREVER_SECONDS)
        except asyncio.CancelledError:
            report("cancelled", body)


async def load(service: QueueService) -> None:
    """Send messages until the service is closed."""
    for number in range(10**9):
        try:
            sent = await service.send("orders", number)
        except QueueError:
            return
        report("sent", sent.message_id)
        if number % 5 == 0:
            await asyncio.sleep(0.001)


async def under_load(handler: object) -> None:
    async with Engine() as engine:  # outlives the service, to count the remaining messages
        service = QueueService(SETTINGS, backend=NativeBackend(engine=engine))
        service.register(handler)
        await service.start()
        loading = asyncio.create_task(load(service))
        await service.run()
        await loading
        stats = await engine.stats("orders")
        report("left", stats.depth + (stats.scheduled or 0) + (stats.in_flight or 0))


async def one_message(handler: object, settings: Settings = SETTINGS) -> None:
    service = QueueService(settings)
    service.register(handler)
    service.on("shutdown", lambda event: report("abandoned", event.abandoned))
    await service.start()
    sending = asyncio.create_task(send_one(service))
    await service.run()
    await sending
    report("ended")


async def send_one(service: QueueService) -> None:
    """Send a message once signal handlers are installed.

    The test sends a signal as soon as the message is handled, so they must be in place by then.
    """
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # noqa: ASYNC110  # no event to wait for
        await asyncio.sleep(0)
    await service.send("orders", 1)


def sync_service(handler: object) -> None:
    service = SyncQueueService(SETTINGS)
    service.register(handler)
    service.on("shutdown", lambda event: report("abandoned", event.abandoned))
    threading.Thread(target=send_one_in_sync, args=(service,)).start()
    service.run()
    report("ended", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)


def send_one_in_sync(service: SyncQueueService) -> None:
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        time.sleep(0.001)
    service.send("orders", 1)


def main(mode: str) -> None:
    logging.getLogger("qkit").setLevel(logging.CRITICAL)  # the tests check that stderr is empty
    kind, _, name = mode.partition(":")
    handler = globals()[name]
    match kind:
        case "load":
            asyncio.run(under_load(handler))
        case "one":
            asyncio.run(one_message(handler))
        case "short":
            asyncio.run(one_message(handler, Settings(type="native", shutdown={"timeout": 0.2})))
        case "sync":
            sync_service(handler)


if __name__ == "__main__":
    main(sys.argv[1])
