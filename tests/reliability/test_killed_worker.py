"""Killed workers: no message is lost, and no acknowledged message is handled again."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.deployments import Site, in_other_processes, on, redelivers
from tests.support.waiting import eventually, scaled
from tests.support.worker_roles import EXIT_CODE

ACK_ARRIVAL_SECONDS = 1.0  # time within which an ack reaches the broker


async def kill_in_mid_handler(site: Site, seed: int) -> None:
    """Kill a worker while two of its handlers hang, and check that another takes over."""
    print(f"{site.deployment} seed {seed}")
    rng = random.Random(seed)
    first = site.worker("serve", hangs=True)
    await first.reported("ready")
    async with site.service() as sender:
        sent: set[int] = set()

        async def send(number: int, **body: object) -> None:
            await sender.send(site.queue, {"n": number, "seconds": 0.05, **body})
            sent.add(number)

        for number in (0, 1):
            await send(number, do="hang")
        await eventually(lambda: {0, 1} <= set(first.numbers("begin")))
        second = site.worker("serve")
        await second.reported("ready")
        for number in range(2, 2 + rng.randrange(10, 40)):
            await send(number)
        first.kill()
        killed_at = time.monotonic()
        for number in range(50, 60):
            await send(number)
        await eventually(lambda: {0, 1} <= set(second.numbers("end")), within=60)
        redelivered_after = (
            max(line.at for line in second.of("begin") if line.number in (0, 1)) - killed_at
        )
        assert redelivered_after <= scaled(site.deployment.redelivered_within + 5)
        await eventually(lambda: sent <= {*first.numbers("end"), *second.numbers("end")})
        done = {
            line.number for line in first.of("end") if line.at < killed_at - ACK_ARRIVAL_SECONDS
        }
        repeated = done & {line.number for line in second.of("begin") if line.at > killed_at}
        assert not repeated, "acknowledged messages were handled again"
        if site.deployment.capabilities.counts_crashes:
            attempts = {line.number: line.rest[1] for line in second.of("begin")}
            assert (attempts[0], attempts[1]) == ("2", "2")
        second.kill()


@on(redelivers, in_other_processes)
async def test_messages_of_a_killed_worker_are_handled_by_another(site: Site) -> None:
    await kill_in_mid_handler(site, random.randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, in_other_processes)
async def test_messages_of_twenty_killed_workers_are_handled_by_others(site: Site) -> None:
    for turn in range(20):
        site.queue = f"{site.queue.partition('.')[0]}.{turn}"
        await kill_in_mid_handler(site, random.randrange(2**32))


@on(redelivers, in_other_processes)
async def test_a_handler_that_exits_the_process_has_used_an_attempt(site: Site) -> None:
    first = site.worker("serve", exits=True)
    await first.reported("ready")
    async with site.service() as sender:
        await sender.send(site.queue, {"n": 1, "do": "exit"})
        assert await first.exited() == EXIT_CODE
        second = site.worker("serve")
        await eventually(lambda: second.numbers("end") == [1], within=60)
        assert [line.rest for line in second.of("begin")] == [("1", "2")]
        second.kill()
