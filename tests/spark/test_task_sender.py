"""``TaskSender``: declaring channels, sending, and waiting for a full queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qkit import QueueService, Settings, consume
from qkit._internal.ids import new_id
from qkit.errors import QueueFull
from qkit.message import Envelope
from qkit.spark.task_sender import TaskSender
from tests.support.waiting import eventually


def envelopes(count: int) -> list[Envelope]:
    return [Envelope(new_id(), str(number).encode()) for number in range(count)]


def test_a_queue_that_stays_full_is_an_error(tmp_path: Path) -> None:
    settings = Settings(type="native", path=tmp_path, max_depth=3, send_timeout=0.5)
    sender = TaskSender(settings).open()
    try:
        with pytest.raises(QueueFull):
            sender.send(sender.route("orders"), envelopes(5))
    finally:
        sender.close()


async def test_opening_declares_the_channel_and_consumes_nothing(tmp_path: Path) -> None:
    settings = Settings(type="native", path=tmp_path)
    async with QueueService(settings) as service:
        await service.send("audit", 1)
        sender = TaskSender(settings)
        sender.route("orders")
        sender.route("audit")
        await asyncio.to_thread(sender.open)
        await asyncio.to_thread(sender.close)
        assert "orders" in await service.queues()
        assert (await service.stats("audit")).depth == 1


async def test_rejected_messages_are_sent_again_when_the_queue_has_capacity(tmp_path: Path) -> None:
    settings = Settings(type="native", path=tmp_path, max_depth=3)
    received: list[int] = []

    @consume("orders")
    async def take(body: int) -> None:
        received.append(body)

    service = QueueService(settings)
    service.register(take)

    async def full() -> bool:
        return (await service.stats("orders")).depth == 3

    async with service:
        service.pause("orders")
        sender = await asyncio.to_thread(TaskSender(settings).open)
        route = sender.route("orders")
        sending = asyncio.create_task(asyncio.to_thread(sender.send, route, envelopes(10)))
        await eventually(full)
        service.resume("orders")
        await sending
        await eventually(lambda: len(received) == 10)
        await asyncio.to_thread(sender.close)
    assert sorted(received) == list(range(10))
