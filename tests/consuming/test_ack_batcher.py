"""Batched acks: handlers do not wait, prefetch limits pending acks, and no ack is lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from qkit import consume
from qkit.errors import BackendUnavailable
from qkit.message import Envelope
from tests.support.backends import ScriptedBackend
from tests.support.services import make_service, until


class Orders:
    """A service with one handler, on a backend that batches acks."""

    def __init__(self, clock, count: int, **options) -> None:
        self.backend = ScriptedBackend(gathers_acks=True)
        self.ids = [f"m{number}" for number in range(count)]
        keys = options.pop("keys", [None])
        for number, id in enumerate(self.ids):
            key = keys[number % len(keys)]
            self.backend.put("orders", Envelope(id, id.join('""').encode(), key=key))
        self.handled: list[str] = []

        @consume("orders", **options)
        async def handle(id: str) -> None:
            self.handled.append(id)

        self.service = make_service(handle, backend=self.backend, clock=clock)

    @property
    def acked(self) -> list[tuple[object, ...]]:
        return [call[1:] for call in self.backend.of("ack_many")]


async def test_a_handler_continues_while_acks_are_in_flight(clock):
    orders, answer = Orders(clock, 10, prefetch=10), asyncio.Event()
    orders.backend.script("ack_many", answer)
    async with orders.service:
        await until(lambda: len(orders.handled) == 10)
        assert orders.acked == []
        answer.set()
        await until(lambda: sum(map(len, orders.acked)) == 10)
    assert [id for some in orders.acked for id in some] == orders.ids
    assert len(orders.acked) <= 3  # in batches


async def test_a_message_that_waits_for_its_ack_counts_towards_the_prefetch(clock):
    orders, answer = Orders(clock, 10, prefetch=4), asyncio.Event()
    orders.backend.script("ack_many", answer)
    async with orders.service:
        await until(lambda: len(orders.handled) == 4)
        await asyncio.sleep(5)
        assert len(orders.handled) == 4
        answer.set()
        await until(lambda: len(orders.handled) == 10)
    assert orders.backend.most_held == 4


async def test_shutdown_waits_for_acks(clock):
    orders = Orders(clock, 5, prefetch=5)
    orders.backend.script("ack_many", 3.0)
    async with orders.service:
        await until(lambda: len(orders.handled) == 5)
    assert sorted(id for some in orders.acked for id in some) == orders.ids  # type: ignore[type-var]
    assert orders.backend.count("release uncounted") == 0


async def test_a_cancelled_program_still_acks_handled_messages(clock):
    orders = Orders(clock, 5, prefetch=5)
    orders.backend.script("ack_many", 0.5)
    running = asyncio.create_task(orders.service.run())
    await until(lambda: len(orders.handled) == 5)
    running.cancel()
    await asyncio.wait([running])
    assert sorted(id for some in orders.acked for id in some) == orders.ids  # type: ignore[type-var]
    assert orders.backend.count("release uncounted") == 0


async def test_a_failed_ack_is_logged_and_the_others_succeed(clock, caplog):
    orders = Orders(clock, 3, prefetch=1)
    orders.backend.script("ack_many", BackendUnavailable("gone"))
    async with orders.service:
        await until(lambda: len(orders.handled) == 3)
    assert "could not be settled and will be delivered again" in caplog.text
    assert orders.acked == [("m1",), ("m2",)]


async def test_a_message_waits_for_the_ack_of_the_previous_message_of_its_key(clock):
    orders, answer = Orders(clock, 4, prefetch=4, ordered=True, keys=["a", "b"]), asyncio.Event()
    orders.backend.script("ack_many", answer)
    async with orders.service:
        await until(lambda: len(orders.handled) == 2)
        await asyncio.sleep(1)
        assert orders.handled == ["m0", "m1"]
        answer.set()
        await until(lambda: len(orders.handled) == 4)
    assert orders.handled == orders.ids


async def test_handlers_that_never_wait_do_not_block_the_loop(clock):
    orders, seen = Orders(clock, 400, prefetch=400), [0]

    def tick() -> None:
        seen.append(len(orders.handled))
        if seen[-1] < 400:
            asyncio.get_running_loop().call_soon(tick)

    async with orders.service:
        tick()
        await until(lambda: seen[-1] == 400)
    assert max(after - before for before, after in pairwise(seen)) <= 40
