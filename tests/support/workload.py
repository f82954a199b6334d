"""Random workload for an engine, recorded for ``tests.support.crash_model``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from qkit.native import Engine
from tests.support.crash_model import LIMIT, body_of

__all__ = ["QUEUES", "prepare", "run_workload"]

Record = Callable[[tuple[str | int | bool | None, ...]], None]

GROUPS = ("a", "b")
QUEUES = ("orders", "scrap", "temp")


async def prepare(engine: Engine) -> None:
    """Create the queues and the topic of ``run_workload``."""
    for queue in QUEUES:
        await engine.create(queue)
    await engine.create("news", broadcast=True)
    for group in GROUPS:
        engine.catalogue.queue("news", "declare", group)
    await engine.written()


class _Workload:
    def __init__(self, engine: Engine, random: Random, record: Record, name: str) -> None:
        self.engine = engine
        self.random = random
        self.record = record
        self.name = name
        self.count = 0

    async def send(self, queue: str) -> None:
        random = self.random
        self.count += 1
        id = f"{self.name}-{self.count}"
        delay = random.choice((None, None, None, 0.005, 3600.0))
        ttl = random.choice((None, None, None, None, 0.02, 7200.0))
        if delay is not None and ttl is not None and delay >= ttl:
            ttl = None
        groups = GROUPS if queue == "news" else ()
        self.record(("publish", queue, id, ttl is not None, *groups))
        await self.engine.publish(
            queue,
            body_of(id),
            random.choice((None, 0, 5, 9)),
            delay=delay,
            ttl=ttl,
            headers={"n": id} if random.random() < 0.3 else None,
            key="k" if random.random() < 0.2 else None,
            message_id=id,
        )
        self.record(("published", id))

    async def sender(self, steps: int) -> None:
        for _ in range(steps):
            await self.send(self.random.choice(("orders", "orders", "orders", "news", "scrap")))
            if self.random.random() < 0.1:
                await asyncio.sleep(0.001)

    async def consumer(self, steps: int, queue: str, group: str | None = None) -> None:
        random, record = self.random, self.record
        for _ in range(steps):
            delivery = await self.engine.consume(queue, 0.002, ack_deadline=60, group=group)
            if delivery is None:
                continue
            id, attempt = delivery.message_id, delivery.retry_count + 1
            record(("claimed", queue, group, id, attempt))
            assert delivery.body == body_of(id)
            if random.random() < 0.1:
                await delivery.extend(90)
            if random.random() < 0.2:
                await asyncio.sleep(random.choice((0, 0.001)))
            chance = random.random()
            if chance < 0.55:
                record(("settle", "ack", queue, group, id))
                await delivery.ack()
                record(("settled", "ack", queue, group, id))
            elif chance < 0.9:
                requeue = chance < 0.75
                is_final = not requeue or attempt >= LIMIT
                if is_final:
                    record(("settle", "dead", queue, group, id))
                answer = await delivery.nack(requeue)
                if is_final:
                    assert answer == "dead_lettered"
                    record(("settled", "dead", queue, group, id))
            # Otherwise the message stays in flight until the engine stops.

    async def administrator(self, steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0.003)
            await self.send("temp")
            match self.random.randrange(3):
                case 0:
                    self.record(("purge", "scrap"))
                    await self.engine.purge("scrap")
                    self.record(("purged", "scrap"))
                case 1:
                    self.record(("purge", "temp"))
                    await self.engine.delete("temp")
                    self.record(("purged", "temp"))
                    await self.engine.create("temp")
                case 2:
                    letters = await self.engine.dead_letters("orders", 2)
                    for letter in letters:
                        self.record(("replay", "orders", letter.message_id))
                    await self.engine.retry_dead_letters(
                        "orders", [letter.message_id for letter in letters]
                    )

    async def maintenance(self, steps: int) -> None:
        """Compact and write snapshots far more often than a normal engine."""
        for _ in range(steps):
            await asyncio.sleep(self.random.choice((0.001, 0.004)))
            await self.engine.storage.maintain(rotate=self.random.random() < 0.5)


async def run_workload(
    engine: Engine, random: Random, record: Record, name: str, steps: int
) -> None:
    """Run senders, consumers, administration and maintenance concurrently.

    Senders and consumers run ``steps`` operations each, the others fewer. Message ids start with
    ``name``.
    """
    workload = _Workload(engine, random, record, name)
    await asyncio.gather(
        *(workload.sender(steps) for _ in range(4)),
        *(workload.consumer(steps, "orders") for _ in range(3)),
        *(workload.consumer(steps, "news", group) for group in GROUPS),
        workload.administrator(max(1, steps // 4)),
        workload.maintenance(max(1, steps // 2)),
    )
