"""A worker with pages, as a process of its own.

It prints the address of its pages and then what happens. A message to ``naps`` sleeps that many
seconds in the handler, one to ``blocks`` blocks the event loop for as long; the argument is how
"""

from __future__ import annotations

import asyncio
import os
import time

from qkit import QueueService, Settings, consume
from qkit.web import serve
from tests.support.web import TOKEN


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


@consume("naps")
async def nap(seconds: float) -> None:
    say("napping")
    await asyncio.sleep(seconds)
    say("napped")


@consume("blocks")
async def block(seconds: float) -> None:
    say("blocking")
    time.sleep(seconds)  # noqa: ASYNC251  # blocking the loop is the point
    say("blocked")


async def main() -> None:
    service = QueueService(Settings(type="native", shutdown={"timeout": 120}))
    service.register(nap)
    service.register(block)
    async with serve(service, port=0, token=TOKEN) as address:
        say(address)
        await service.run()
        say("ran")
    say("ended")


if __name__ == "__main__":
    asyncio.run(main())
