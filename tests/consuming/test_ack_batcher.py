"""Acks that are under way while handlers go on: gathered, bounded by prefetch, never forgotten."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from qkit import consume
from qkit.errors import BackendUnavailable
from qkit.message import Envelope
from tests.support.backends import ScriptedBackend
from tests.support.services import make_service, until


class Orders:
    """A service with one handler, on a backend that gathers acks."""

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


async def test_a_handler_goes_on_while_its_acks_are_under_way(clock):
    orders, answer = Orders(clock, 10, prefetch=10), asyncio.Event()
    orders.backend.script("ack_many", answer)
    async with orders.service:
        await until(lambda: len(orders.handled) == 10)
        assert orders.acked == []
        answer.set()
        await until(lambda: sum(map(len, orders.acked)) == 10)
    assert [id for some in orders.acked for id in some] == orders.ids
    assert len(orders.acked) <= 3  # and not one by one


async def test_what_waits_for_its_ack_takes_a_slot_of_the_prefetch(clock):
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
    assert orders.backend.count("give back") == 0


async def test_a_cancelled_program_still_acknowledges_what_was_handled(clock):
    orders = Orders(clock, 5, prefetch=5)
    orders.backend.script("ack_many", 0.5)
    running = asyncio.create_task(orders.service.run())
    await until(lambda: len(orders.handled) == 5)
    running.cancel()
    await asyncio.wait([running])
    assert sorted(id for some in orders.acked for id in some) == orders.ids  # type: ignore[type-var]
    assert orders.backend.count("give back") == 0


async def test_an_ack_that_fails_is_told_and_the_others_go_on(clock, caplog):
    orders = Orders(clock, 3, prefetch=1)
    orders.backend.script("ack_many", BackendUnavailable("gone"))
    async with orders.service:
        await until(lambda: len(orders.handled) == 3)
    assert "could not be settled: it will be delivered again" in caplog.text
    assert orders.acked == [("m1",), ("m2",)]


async def test_the_next_of_a_key_waits_for_the_ack_of_the_one_before(clock):
    orders, answer = Orders(clock, 4, prefetch=4, ordered=True, keys=["a", "b"]), asyncio.Event()
    orders.backend.script("ack_many", answer)
    async with orders.service:
        await until(lambda: len(orders.handled) == 2)
        await asyncio.sleep(1)
        assert orders.handled == ["m0", "m1"]
        answer.set()
        await until(lambda: len(orders.handled) == 4)
    assert orders.handled == orders.ids


async def test_handlers_that_never_wait_leave_the_loop_a_turn(clock):
    orders, seen = Orders(clock, 400, prefetch=400), [0]

    def turn() -> None:
        seen.append(len(orders.handled))
        if seen[-1] < 400:
            asyncio.get_running_loop().call_soon(turn)

    async with orders.service:
        turn()
        await until(lambda: seen[-1] == 400)
    assert max(after - before for before, after in pairwise(seen)) <= 40
