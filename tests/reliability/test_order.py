"""Order per key across worker processes: none of two workers breaks it, not even a killed one."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from tests.support.deployments import Deployment, Site, in_other_processes, on, redelivers
from tests.support.waiting import eventually
from tests.support.workers import Line, Worker

KEYS = 3
KEY_SPACING = 1_000  # the first number of each key is a multiple of this


def locks_keys(deployment: Deployment) -> bool:
    """Whether the order per key holds across processes."""
    return bool(deployment.capabilities.key_lock)


def key_of(line: Line) -> int:
    return line.number // KEY_SPACING


def check_order(workers: Sequence[Worker], killed: Worker, killed_at: float) -> None:
    """Check that each key was handled in order, and never twice at the same time.

    What the killed worker had begun counts as ended when it was killed.
    """
    words = ("begin", "end", "cancelled")
    lines = sorted(
        ((line, worker) for worker in workers for word in words for line in worker.of(word)),
        key=lambda pair: pair[0].at,
    )
    for key in range(KEYS):
        of_key = [(line, worker) for line, worker in lines if key_of(line) == key]
        begun = [line.number for line, _ in of_key if line.word == "begin"]
        assert list(dict.fromkeys(begun)) == sorted(set(begun)), "not in the order of sending"
        running: tuple[int, Worker] | None = None
        for line, worker in of_key:
            if running is not None and running[1] is killed and line.at > killed_at:
                running = None
            if line.word == "begin":
                assert running is None, f"{line.number} began while {running} was handled"
                running = line.number, worker
            elif running == (line.number, worker):
                running = None


async def kill_one_of_two(site: Site, count: int, seed: int) -> None:
    """Kill one of two ordered workers while it is busy, and check the order of each key."""
    print(f"{site.deployment} seed {seed}")
    rng = random.Random(seed)
    options = {"ordered": True, "prefetch": 20}
    workers = [site.worker("serve", options=options) for _ in range(2)]
    for worker in workers:
        await worker.reported("ready")
    numbers = [key * KEY_SPACING + number for number in range(count) for key in range(KEYS)]
    async with site.service() as sender:
        for number in numbers:
            body = {"n": number, "seconds": 0.03}
            await sender.send(site.queue, body, key=f"key-{number // KEY_SPACING}")
    enough = rng.randrange(1, len(numbers) // 3)
    await eventually(lambda: sum(len(worker.of("end")) for worker in workers) >= enough)
    killed = max(workers, key=lambda worker: len(worker.of("begin")))
    killed_at = time.monotonic()  # the report of its exit arrives after other workers have begun
    killed.kill()
    expected = set(numbers)
    await eventually(
        lambda: {number for worker in workers for number in worker.numbers("end")} == expected,
        within=60,
    )
    check_order(workers, killed, killed_at)
    for worker in workers:
        worker.kill()


@on(redelivers, in_other_processes, locks_keys)
async def test_a_killed_worker_does_not_break_the_order_of_a_key(site: Site) -> None:
    await kill_one_of_two(site, count=12, seed=random.randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(redelivers, in_other_processes, locks_keys)
async def test_ten_killed_workers_do_not_break_the_order_of_a_key(site: Site) -> None:
    for turn in range(10):
        site.queue = f"{site.queue.partition('.')[0]}.{turn}"
        await kill_one_of_two(site, count=60, seed=random.randrange(2**32))
