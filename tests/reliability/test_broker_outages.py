"""The broker stops, or is killed and restarted, under load: no confirmed message is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from tests.support.carriers import Site, durable, on, outlives_its_server, redelivers
from tests.support.waiting import eventually, scaled
from tests.support.workers import Worker

AGAIN = 10.0  # seconds after the broker is back in which work must go on
ROOM = 50_000_000  # bytes that a process may grow by while nobody takes its messages

# A breaker may rest for as long as it is told to; that is no part of coming back.
SETTINGS = {"send_timeout": 5.0, "breaker": {"recovery_timeout": 1.0}}


class Load:
    """A process that sends and one that consumes; what they say is all that is believed."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.consumer: Worker = site.worker("serve", concurrency=8, settings=SETTINGS)
        self.sender: Worker = site.worker("send", senders=8, settings=SETTINGS)

    async def flows(self) -> None:
        """Let it flow for a while, so that the next fault has something to hit."""
        await self.consumer.said("end", len(self.consumer.of("end")) + 200)

    async def begin(self) -> None:
        await self.flows()
        self._memory = [worker.memory() for worker in (self.sender, self.consumer)]

    async def resumes(self) -> None:
        """Messages are confirmed and handled again, and nothing has piled up."""
        now = time.monotonic()

        def both() -> bool:
            sent, handled = self.sender.of("sent"), self.consumer.of("end")
            return min(sent[-1].at, handled[-1].at) > now

        await eventually(both, scaled(AGAIN))
        for worker, before in zip((self.sender, self.consumer), self._memory, strict=True):
            assert worker.memory() < before + ROOM

    async def end(self) -> None:
        """Nobody sends any more, and all that was confirmed gets handled."""
        self.sender.signal(signal.SIGTERM)
        await self.sender.ended()
        sent = set(self.sender.numbers("sent"))
        await eventually(lambda: sent <= set(self.consumer.numbers("end")), within=60)
        refused = [line.rest[1] for line in self.sender.of("failed")]
        kinds = {kind: refused.count(kind) for kind in set(refused)}
        print(f"{self.site.carrier}: {len(sent)} confirmed, none lost; refused: {kinds}")
        self.consumer.kill()


async def freeze(site: Site, seconds: float) -> None:
    site.freeze()
    await asyncio.sleep(seconds)
    site.thaw()


async def kill_and_restart(site: Site) -> None:
    await asyncio.to_thread(site.kill)
    await asyncio.sleep(random.random())
    await asyncio.to_thread(site.restart)


@pytest.mark.slow
@on(redelivers, durable, outlives_its_server)
async def test_a_broker_that_stops_for_a_while(site: Site) -> None:
    load = Load(site)
    await load.begin()
    await freeze(site, 2)
    await load.resumes()
    await load.end()


@pytest.mark.slow
@on(redelivers, durable, outlives_its_server)
async def test_a_broker_that_is_killed_and_comes_back(site: Site) -> None:
    load = Load(site)
    await load.begin()
    await kill_and_restart(site)
    await load.resumes()
    await load.end()


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, durable, outlives_its_server)
async def test_a_broker_that_stops_for_long_and_is_killed_again_and_again(site: Site) -> None:
    load = Load(site)
    await load.begin()
    await freeze(site, 30)
    await load.resumes()
    for _ in range(5):
        await load.flows()
        await kill_and_restart(site)
        await load.resumes()
    await load.end()
