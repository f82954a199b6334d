"""SIGTERM under load: no message is lost or handled twice; a second signal forces the exit."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter

import pytest

from tests.support.deployments import Site, in_other_processes, on, redelivers
from tests.support.waiting import eventually, scaled
from tests.support.workers import Worker

SHUTDOWN_SECONDS = 20.0


async def signal_under_load(site: Site, rounds: int, seed: int) -> None:
    """Start workers one after another and send SIGTERM to each under load."""
    print(f"{site.deployment} seed {seed}")
    rng = random.Random(seed)
    workers: list[Worker] = []
    sent: list[int] = []
    stopped = asyncio.Event()

    def start() -> Worker:
        settings = {"shutdown": {"timeout": SHUTDOWN_SECONDS}}
        worker = site.worker("serve", concurrency=8, settings=settings)
        workers.append(worker)
        return worker

    async def load() -> None:
        while not stopped.is_set():
            number = len(sent)
            await sender.send(site.queue, {"n": number, "seconds": 0.04})
            sent.append(number)
            await asyncio.sleep(rng.random() * 0.006)

    worker = start()
    await worker.reported("ready")
    async with site.service() as sender:
        load_task = asyncio.create_task(load())
        for _ in range(rounds):
            await worker.reported("end", rng.randrange(1, 60))
            await asyncio.sleep(rng.random() / 20)
            worker.signal(signal.SIGTERM)
            signalled_at = time.monotonic()
            last, worker = worker, start()
            assert await last.exited() == 0
            assert last.lines[-1].at - signalled_at < SHUTDOWN_SECONDS
            assert last.numbers("abandoned") == [0]
            assert Counter(last.numbers("begin")) == Counter(last.numbers("end"))
        stopped.set()
        await load_task
        await eventually(lambda: sum(len(item.of("end")) for item in workers) >= len(sent))
        await asyncio.sleep(0.3)  # time for unexpected messages to arrive
        await worker.reported("ready")  # the last worker may still be starting
        worker.signal(signal.SIGTERM)
        assert await worker.exited() == 0
    done = Counter(number for item in workers for number in item.numbers("end"))
    assert done == Counter(sent), "a message was lost or handled twice"
    attempts = {line.rest[1] for item in workers for line in item.of("begin")}
    assert attempts == {"1"}, "the release of a message counted an attempt"


@on(redelivers, in_other_processes)
async def test_no_message_is_lost_or_repeated_by_signals_under_load(site: Site) -> None:
    await signal_under_load(site, 5, random.randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, in_other_processes)
async def test_no_message_is_lost_or_repeated_by_fifty_signals_under_load(site: Site) -> None:
    await signal_under_load(site, 50, random.randrange(2**32))


@on(redelivers, in_other_processes)
async def test_a_second_signal_forces_the_exit_and_the_message_goes_to_another_worker(
    site: Site,
) -> None:
    stuck = site.worker("serve", hangs=True)
    await stuck.reported("ready")
    async with site.service() as sender:
        await sender.send(site.queue, {"n": 1, "do": "hang"})
        await stuck.reported("begin")
        stuck.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert stuck.exit_code is None, "the first signal did not wait for the handler"
        stuck.signal(signal.SIGTERM)
        assert await stuck.exited(within=scaled(2)) == 0
        assert stuck.numbers("abandoned") == [1]
        other = site.worker("serve")
        await eventually(lambda: other.numbers("end") == [1])
        assert other.of("begin")[0].rest[1] == "1", "the forced exit counted an attempt"
