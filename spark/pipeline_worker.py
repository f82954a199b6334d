"""Worker process of ``pipeline.py``: handles the channel ``events`` until SIGTERM.

It prints its totals every half second, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from pydantic import BaseModel

from qkit import Message, QueueService, Reject, Settings, channel, consume

REJECT_EVERY = 500  # one event in 500 is rejected
FAIL_EVERY = 1_000  # one event in 1,000 fails on its first attempt


class Event(BaseModel):
    """Event of the pipeline."""

    id: int
    customer: str
    kind: str
    cents: int


@dataclass
class Totals:
    """Totals that the handler has counted."""

    handled: int = 0
    cents: int = 0
    retried: int = 0


@channel("events", prefetch=500)
class Events:
    """Handler that adds up the events, and rejects or fails some of them."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals

    @consume(concurrency=64)
    async def book(self, event: Event, message: Message) -> None:
        """Add one event to the totals."""
        if event.id % REJECT_EVERY == 0:
            raise Reject(f"customer {event.customer} is closed")
        if event.id % FAIL_EVERY == 7 and message.attempt == 1:
            self.totals.retried += 1
            raise ConnectionError("the ledger did not respond")
        self.totals.handled += 1
        self.totals.cents += event.cents


async def main(path: str) -> None:
    """Handle events until SIGTERM, and print the totals."""
    totals = Totals()
    service = QueueService(
        Settings(type="native", path=path, retry={"initial_delay": 0.2, "max_delay": 1.0})
    )
    service.register(Events(totals))
    await service.start()  # creates the channel before the first line is printed
    async with asyncio.TaskGroup() as group:
        printer = group.create_task(print_totals(totals, service), name="printer")
        await service.run()
        printer.cancel()
    print(totals_line(totals, service), flush=True)


async def print_totals(totals: Totals, service: QueueService) -> None:
    """Print the totals every half second."""
    while True:
        await asyncio.sleep(0.5)
        print(totals_line(totals, service), flush=True)


def totals_line(totals: Totals, service: QueueService) -> str:
    """Return the totals as JSON."""
    dead = service.metrics().messages_dead_lettered
    return json.dumps({**totals.__dict__, "dead_lettered": dead})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
