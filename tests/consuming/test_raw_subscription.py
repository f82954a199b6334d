"""Receiving without a handler: expired messages are dead-lettered, others go to the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from qkit import Channel, Settings
from qkit.backend import SubscriptionSpec
from qkit.consuming.raw_subscription import RawSubscription, subscribe_raw
from qkit.errors import BackendUnavailable, QueueNotFound
from qkit.message import Envelope
from qkit.wiring import Wiring
from tests.support.backends import ScriptedBackend


@asynccontextmanager
async def raw(
    clock, backend: ScriptedBackend, *, dead_letter: bool = True
) -> AsyncGenerator[RawSubscription, None]:
    wiring = Wiring.build(backend, Settings(type="native", send_timeout=10.0), clock)
    route = wiring.routes.resolve(Channel("orders", dead_letter=dead_letter))
    spec = SubscriptionSpec(queue="orders", group="qkit", consumer="here", prefetch=100)
    async with subscribe_raw(wiring, route, spec) as received:
        yield received


async def test_expired_messages_are_dead_lettered_and_the_others_received(clock):
    backend = ScriptedBackend()
    expired = [Envelope(f"expired{n}", b"{}", expires_at=clock.time()) for n in range(3)]
    live = [Envelope("live", b"{}", attempt=99), Envelope("b", b"{}", expires_at=clock.time() + 9)]
    backend.put("orders", expired[0], live[0], *expired[1:], live[1])
    async with raw(clock, backend) as received:
        found = await received.receive(10)
        assert [delivery.envelope.id for delivery in found] == ["live", "b"], "attempts are limited"
        await clock.advance(0)
        letters = backend.queues["orders_dlq"]
        assert sorted(letter.id for letter in letters) == ["expired0", "expired1", "expired2"]
        assert {letter.headers["qkit-dead-reason"] for letter in letters} == {"TTLExpired"}
        assert {letter.headers["qkit-dead-attempts"] for letter in letters} == {"0"}
        assert sorted(str(id) for _, id in backend.of("ack")) == [
            "expired0",
            "expired1",
            "expired2",
        ]


async def test_receive_keeps_waiting_if_all_messages_have_expired(clock):
    backend = ScriptedBackend()
    async with raw(clock, backend) as received:
        receiving = asyncio.create_task(received.receive(10))
        backend.put("orders", Envelope("expired", b"{}", expires_at=clock.time()))
        await clock.advance(1)
        assert not receiving.done()
        backend.put("orders", Envelope("live", b"{}"))
        (delivery,) = await receiving
        assert delivery.envelope.id == "live"


async def test_expired_messages_are_settled_after_a_cancelled_receive(clock):
    backend = ScriptedBackend()
    backend.put("orders", Envelope("expired", b"{}", expires_at=clock.time()))
    async with raw(clock, backend) as received:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await received.receive(10)
        assert [letter.id for letter in backend.queues["orders_dlq"]] == ["expired"]
        assert backend.held == {}


async def test_without_dead_letters_an_expired_message_is_acked(clock):
    backend = ScriptedBackend()
    backend.put("orders", Envelope("expired", b"{}", expires_at=clock.time()))
    async with raw(clock, backend, dead_letter=False) as received:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await received.receive(10)
    assert backend.of("publish") == []
    assert backend.of("ack") == [("ack", "expired")]


async def test_a_missing_dead_letter_queue_is_declared(clock):
    backend = ScriptedBackend()
    backend.script("publish", QueueNotFound("there is none"))
    backend.put("orders", Envelope("expired", b"{}", expires_at=clock.time()))
    async with raw(clock, backend) as received:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await received.receive(10)
    assert [spec.name for spec in backend.declared] == ["orders_dlq", "orders"]
    assert [letter.id for letter in backend.queues["orders_dlq"]] == ["expired"]


async def test_a_message_whose_dead_letter_cannot_be_written_is_released_on_close(clock):
    backend = ScriptedBackend()
    backend.script("publish", *[BackendUnavailable("down")] * 1_000)
    backend.put("orders", Envelope("expired", b"{}", expires_at=clock.time()))
    async with raw(clock, backend) as received:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await received.receive(10)
        leaving = asyncio.create_task(received.aclose())
        await clock.advance(60)
        await leaving
    assert ("release", "expired", 0.0, False) in backend.calls
    assert backend.of("ack") == []
