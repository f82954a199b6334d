"""Worker process that serves the web app.

It prints its address and then a line for each event. The body of a message is a number of seconds:
the handler of ``naps`` sleeps for that time, and the handler of ``blocks`` blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import time

from qkit import QueueService, Settings, consume
from qkit.web import serve
from tests.support.web import READ_TOKEN, TOKEN


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
    time.sleep(seconds)  # noqa: ASYNC251  # the test needs a blocked loop
    say("blocked")


async def main() -> None:
    service = QueueService(Settings(type="native", shutdown={"timeout": 120}))
    service.register(nap)
    service.register(block)
    async with serve(service, port=0, token=TOKEN, read_token=READ_TOKEN) as address:
        say(address)
        await service.run()
        say("ran")
    say("ended")


if __name__ == "__main__":
    asyncio.run(main())
