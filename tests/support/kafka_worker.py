"""Kafka worker that a test kills: ``python -m tests.support.kafka_worker URL QUEUE SESSION``.

It has more slots than partitions. About 5 % of the handler calls never finish; the others print the
message id.
"""

from __future__ import annotations

import asyncio
import os
import sys

from qkit import Message, QueueService, Settings, consume
from qkit.backends.kafka.backend import KafkaBackend


async def main(url: str, queue: str, session: float) -> None:
    @consume(queue, concurrency=20, prefetch=40)
    async def work(body: dict[str, int], message: Message) -> None:
        await asyncio.sleep(3_600 if hash(message.id) % 20 == 0 else 0.02)
        os.write(1, f"{message.id}\n".encode())

    backend = KafkaBackend(url, partitions=4, session=session, heartbeat=0.5)
    service = QueueService(Settings(type="kafka", url=url), backend=backend)
    service.register(work)
    await service.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
