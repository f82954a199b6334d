"""SIGTERM under load drains: nothing is lost or done twice. A second one forces."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter

import pytest

from tests.support.carriers import Site, in_other_processes, on, redelivers
from tests.support.waiting import eventually, scaled
from tests.support.workers import Worker

DEADLINE = 20.0


async def signal_under_load(site: Site, rounds: int, seed: int) -> None:
    """Workers come one after the other, each is asked to end in the middle of the load."""
    print(f"{site.carrier} seed {seed}")
    dice = random.Random(seed)
    workers: list[Worker] = []
    sent: list[int] = []
    stopped = asyncio.Event()

    def start() -> Worker:
        settings = {"shutdown": {"timeout": DEADLINE}}
        worker = site.worker("serve", concurrency=8, settings=settings)
        workers.append(worker)
        return worker

    async def load() -> None:
        while not stopped.is_set():
            number = len(sent)
            await sender.send(site.queue, {"n": number, "seconds": 0.04})
            sent.append(number)
            await asyncio.sleep(dice.random() * 0.006)

    worker = start()
    await worker.said("ready")
    async with site.service() as sender:
        loading = asyncio.create_task(load())
        for _ in range(rounds):
            await worker.said("end", dice.randrange(1, 60))
            await asyncio.sleep(dice.random() / 20)
            worker.signal(signal.SIGTERM)
            asked_at = time.monotonic()
            last, worker = worker, start()
            assert await last.ended() == 0
            assert last.lines[-1].at - asked_at < DEADLINE
            assert last.numbers("abandoned") == [0]
            assert Counter(last.numbers("begin")) == Counter(last.numbers("end"))
        stopped.set()
        await loading
        await eventually(lambda: sum(len(item.of("end")) for item in workers) >= len(sent))
        await asyncio.sleep(0.3)  # for one that should not come
        await worker.said("ready")  # the others may have handled everything before
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    done = Counter(number for item in workers for number in item.numbers("end"))
    assert done == Counter(sent), "each once, none lost"
    attempts = {line.rest[1] for item in workers for line in item.of("begin")}
    assert attempts == {"1"}, "what was given back was not charged"


@on(redelivers, in_other_processes)
async def test_five_signals_under_load(site: Site) -> None:
    await signal_under_load(site, 5, random.randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, in_other_processes)
async def test_fifty_signals_under_load(site: Site) -> None:
    await signal_under_load(site, 50, random.randrange(2**32))


@on(redelivers, in_other_processes)
async def test_a_second_signal_ends_it_and_the_message_goes_to_another(site: Site) -> None:
    stuck = site.worker("serve", hangs=True)
    await stuck.said("ready")
    async with site.service() as sender:
        await sender.send(site.queue, {"n": 1, "do": "hang"})
        await stuck.said("begin")
        stuck.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert stuck.exit_code is None, "the first one waits for the handler"
        stuck.signal(signal.SIGTERM)
        assert await stuck.ended(within=scaled(2)) == 0
        assert stuck.numbers("abandoned") == [1]
        other = site.worker("serve")
        await eventually(lambda: other.numbers("end") == [1])
        assert other.of("begin")[0].rest[1] == "1", "no attempt is charged"
