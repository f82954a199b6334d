"""A worker that is killed in its handlers loses nothing; no acknowledged message runs again."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.carriers import Site, in_other_processes, on, redelivers
from tests.support.waiting import eventually, scaled

LONG_AGO = 1.0  # seconds after which an acknowledgement has surely arrived


async def kill_in_mid_handler(site: Site, seed: int) -> None:
    """One round: two handlers hang, others come and go, and kill -9 falls in between."""
    print(f"{site.carrier} seed {seed}")
    dice = random.Random(seed)
    first = site.worker("serve", hangs=True)
    await first.said("ready")
    async with site.service() as sender:
        sent: set[int] = set()

        async def send(number: int, **body: object) -> None:
            await sender.send(site.queue, {"n": number, "seconds": 0.05, **body})
            sent.add(number)

        for number in (0, 1):
            await send(number, do="hang")
        await eventually(lambda: {0, 1} <= set(first.numbers("begin")))
        second = site.worker("serve")
        await second.said("ready")
        for number in range(2, 2 + dice.randrange(10, 40)):
            await send(number)
        first.kill()
        killed_at = time.monotonic()
        for number in range(50, 60):
            await send(number)
        await eventually(lambda: {0, 1} <= set(second.numbers("end")), within=60)
        back = max(line.at for line in second.of("begin") if line.number in (0, 1)) - killed_at
        assert back <= scaled(site.carrier.back_within + 5)
        await eventually(lambda: sent <= {*first.numbers("end"), *second.numbers("end")})
        done = {line.number for line in first.of("end") if line.at < killed_at - LONG_AGO}
        again = done & {line.number for line in second.of("begin") if line.at > killed_at}
        assert not again, "what was acknowledged is not done again"
        if site.carrier.capabilities.counts_crashes:
            attempts = {line.number: line.rest[1] for line in second.of("begin")}
            assert (attempts[0], attempts[1]) == ("2", "2")
        second.kill()


@on(redelivers, in_other_processes)
async def test_what_a_killed_worker_held_is_done_by_another(site: Site) -> None:
    await kill_in_mid_handler(site, random.randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, in_other_processes)
async def test_twenty_workers_are_killed(site: Site) -> None:
    for turn in range(20):
        site.queue = f"{site.queue.partition('.')[0]}.{turn}"
        await kill_in_mid_handler(site, random.randrange(2**32))
