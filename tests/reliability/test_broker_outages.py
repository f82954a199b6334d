"""Broker outages under load: no confirmed message is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from tests.support.deployments import Site, durable, has_a_server_process, on, redelivers
from tests.support.waiting import eventually, scaled
from tests.support.workers import Worker

RECOVERY_SECONDS = 10.0  # limit from the end of the outage until messages flow again
MEMORY_GROWTH_BYTES = 50_000_000  # limit for a process while its broker is down

# A short recovery timeout, so that an open circuit breaker does not delay the recovery.
SETTINGS = {"send_timeout": 5.0, "breaker": {"recovery_timeout": 1.0}}


class Load:
    """A sending and a consuming process, observed only through their reports."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.consumer: Worker = site.worker("serve", concurrency=8, settings=SETTINGS)
        self.sender: Worker = site.worker("send", senders=8, settings=SETTINGS)

    async def run_for_a_while(self) -> None:
        """Wait until 200 more messages are handled, so that a fault occurs under load."""
        await self.consumer.reported("end", len(self.consumer.of("end")) + 200)

    async def start(self) -> None:
        await self.run_for_a_while()
        self._memory = [worker.memory() for worker in (self.sender, self.consumer)]

    async def wait_until_recovered(self) -> None:
        """Wait until messages are sent and handled again, and check the memory of both processes.

        The wait is limited by ``RECOVERY_SECONDS``.
        """
        now = time.monotonic()

        def both_work() -> bool:
            sent, handled = self.sender.of("sent"), self.consumer.of("end")
            return min(sent[-1].at, handled[-1].at) > now

        await eventually(both_work, scaled(RECOVERY_SECONDS))
        for worker, before in zip((self.sender, self.consumer), self._memory, strict=True):
            assert worker.memory() < before + MEMORY_GROWTH_BYTES

    async def end(self) -> None:
        """Stop the sender, wait until every confirmed message is handled, and kill the consumer."""
        self.sender.signal(signal.SIGTERM)
        await self.sender.exited()
        sent = set(self.sender.numbers("sent"))
        await eventually(lambda: sent <= set(self.consumer.numbers("end")), within=60)
        failed = [line.rest[1] for line in self.sender.of("failed")]
        kinds = {kind: failed.count(kind) for kind in set(failed)}
        print(f"{self.site.deployment}: {len(sent)} confirmed, none lost; failed: {kinds}")
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
@on(redelivers, durable, has_a_server_process)
async def test_no_confirmed_message_is_lost_when_the_broker_is_frozen_for_a_while(
    site: Site,
) -> None:
    load = Load(site)
    await load.start()
    await freeze(site, 2)
    await load.wait_until_recovered()
    await load.end()


@pytest.mark.slow
@on(redelivers, durable, has_a_server_process)
async def test_no_confirmed_message_is_lost_when_the_broker_is_killed_and_restarted(
    site: Site,
) -> None:
    load = Load(site)
    await load.start()
    await kill_and_restart(site)
    await load.wait_until_recovered()
    await load.end()


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, durable, has_a_server_process)
async def test_no_confirmed_message_is_lost_in_a_series_of_long_outages(site: Site) -> None:
    load = Load(site)
    await load.start()
    await freeze(site, 30)
    await load.wait_until_recovered()
    for _ in range(5):
        await load.run_for_a_while()
        await kill_and_restart(site)
        await load.wait_until_recovered()
    await load.end()
