"""The worker of ``pipeline.py``: typed handlers on the channel ``events``, until SIGTERM.

Writes its totals to standard output, a line of JSON every half second.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from pydantic import BaseModel

from qkit import Message, QueueService, Reject, Settings, channel, consume

REFUSED = 500  # every so many-th event is refused,
SHAKY = 1_000  # and every so many-th fails the first time


class Event(BaseModel):
    """What is generated, published and handled."""

    id: int
    customer: str
    kind: str
    cents: int


@dataclass
class Totals:
    """What the handlers have done."""

    handled: int = 0
    cents: int = 0
    retried: int = 0


@channel("events", prefetch=500)
class Events:
    """Adds up what it gets; some of it is bad."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals

    @consume(concurrency=64)
    async def book(self, event: Event, message: Message) -> None:
        """One event."""
        if event.id % REFUSED == 0:
            raise Reject(f"customer {event.customer} is closed")
        if event.id % SHAKY == 7 and message.attempt == 1:
            self.totals.retried += 1
            raise ConnectionError("the ledger did not answer")
        self.totals.handled += 1
        self.totals.cents += event.cents


async def main(path: str) -> None:
    """Serve until SIGTERM."""
    totals = Totals()
    service = QueueService(
        Settings(type="native", path=path, retry={"initial_delay": 0.2, "max_delay": 1.0})
    )
    service.register(Events(totals))
    await service.start()  # the first line says that the channel exists
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(tell(totals, service), name="telling")
        await service.run()
        telling.cancel()
    print(line(totals, service), flush=True)


async def tell(totals: Totals, service: QueueService) -> None:
    """Say how far it is."""
    while True:
        await asyncio.sleep(0.5)
        print(line(totals, service), flush=True)


def line(totals: Totals, service: QueueService) -> str:
    """The totals as JSON."""
    dead = service.metrics().messages_dead_lettered
    return json.dumps({**totals.__dict__, "dead_lettered": dead})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
