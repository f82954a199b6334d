"""Send options, and their validation before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from qkit import (
    Channel,
    InvalidBody,
    InvalidHeader,
    InvalidPriority,
    PayloadTooLarge,
    QueueService,
    Settings,
    Unsupported,
)
from qkit.backend import Capabilities, Support
from qkit.testing.clock import EPOCH, VirtualClock
from tests.support.faulty import FaultyBackend


async def send(backend: FaultyBackend, clock: VirtualClock, body: Any = 1, **options: Any) -> Any:
    """Send a message; return it as peeked, the result of the send, and the stored envelope."""
    settings = Settings(type="native", max_priority=9, max_message_bytes=1_000)
    async with QueueService(settings, backend=backend, clock=clock) as service:
        sent = await service.send("orders", body, **options)
        (message,) = await service.peek("orders")
        assert message.id == sent.message_id
        return message, sent, (await backend.native.peek("orders", 1))[0]


@pytest.mark.parametrize("priority", [0, 5, 9])
async def test_priorities_within_the_range_are_accepted(
    virtual_clock: VirtualClock, priority: int
) -> None:
    message, _, _ = await send(FaultyBackend(virtual_clock), virtual_clock, priority=priority)
    assert message.priority == priority


BAD = [
    ({"priority": -1}, InvalidPriority, "priority=-1: 'orders' accepts 0 .lowest. to 9"),
    ({"priority": 10}, InvalidPriority, "raise max_priority"),
    ({"priority": True}, InvalidPriority, "expected an integer from 0 to 9"),
    ({"priority": 5.0}, InvalidPriority, "expected an integer"),
    ({"priority": "high"}, InvalidPriority, "expected an integer"),
    ({"delay": -1}, ValueError, "delay=-1: expected a number of seconds, 0 or more"),
    ({"delay": float("nan")}, ValueError, "delay=nan"),
    ({"delay": float("inf")}, ValueError, "delay=inf"),
    ({"delay": True}, ValueError, "delay=True"),
    ({"delay": "2"}, ValueError, "delay='2'"),
    ({"ttl": 0}, ValueError, "ttl=0: expected a number of seconds, more than 0"),
    ({"ttl": -3}, ValueError, "ttl=-3"),
    ({"delay": 5, "ttl": 5}, ValueError, "delay=5 must be less than ttl=5"),
    ({"delay": 6, "ttl": 5}, ValueError, "would expire before its delivery"),
    ({"key": ""}, ValueError, "expected a str of 1 to 1024"),
    ({"key": "k" * 1_025}, ValueError, "expected a str of 1 to 1024"),
    ({"key": 7}, ValueError, "key=7"),
    ({"key": "a\r\nb"}, ValueError, "control character"),
    ({"key": "\udc80"}, ValueError, "control character"),
    ({"headers": {"a": 1}}, InvalidHeader, "expected a str, got int"),
    ({"headers": {"qkit-x": "1"}}, InvalidHeader, "is reserved"),
]


@pytest.mark.parametrize(("options", "kind", "why"), BAD, ids=lambda value: str(value)[:40])
async def test_an_invalid_option_is_rejected_before_anything_is_sent(
    virtual_clock: VirtualClock, options: dict[str, Any], kind: type[Exception], why: str
) -> None:
    backend = FaultyBackend(virtual_clock)
    with pytest.raises(kind, match=why) as caught:
        await send(backend, virtual_clock, **options)
    assert backend.count("publish") == 0
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.proves("003-errors-4")
async def test_the_error_names_backend_operation_and_queue(virtual_clock: VirtualClock) -> None:
    with pytest.raises(InvalidPriority) as caught:
        await send(FaultyBackend(virtual_clock), virtual_clock, priority=10)
    assert caught.value.context == {"backend": "faulty", "operation": "send", "queue": "orders"}


async def test_bodies_that_cannot_be_sent_are_rejected(virtual_clock: VirtualClock) -> None:
    backend = FaultyBackend(virtual_clock)
    with pytest.raises(InvalidBody):
        await send(backend, virtual_clock, object())
    with pytest.raises(PayloadTooLarge):
        await send(FaultyBackend(virtual_clock), virtual_clock, "x" * 1_001)
    assert backend.count("publish") == 0


@pytest.mark.proves("000-publish-5", "002-improvements-5", "002-improvements-6")
async def test_delay_and_ttl_count_from_the_send(virtual_clock: VirtualClock) -> None:
    _, sent, envelope = await send(FaultyBackend(virtual_clock), virtual_clock, delay=2.5, ttl=60)
    assert (envelope.not_before, envelope.expires_at) == (EPOCH + 2.5, EPOCH + 60)
    assert sent.position is None


async def test_a_delay_of_zero_is_no_delay(virtual_clock: VirtualClock) -> None:
    _, sent, envelope = await send(FaultyBackend(virtual_clock), virtual_clock, delay=0)
    assert envelope.not_before is None
    assert sent.position == 0


async def test_key_and_headers_are_stored_in_the_envelope(virtual_clock: VirtualClock) -> None:
    message, _, _ = await send(
        FaultyBackend(virtual_clock), virtual_clock, key="customer-7", headers={"tenant": "acme"}
    )
    assert (message.key, message.headers["tenant"], message.body) == ("customer-7", "acme", b"1")


async def test_the_ttl_of_a_send_overrides_that_of_the_channel(
    virtual_clock: VirtualClock,
) -> None:
    orders = Channel("orders", ttl=30)
    backend = FaultyBackend(virtual_clock)
    async with QueueService(Settings(), backend=backend, clock=virtual_clock) as service:
        await service.send(orders, 1)
        await service.send(orders, 2, ttl=5)
        with pytest.raises(ValueError, match="delay=30 must be less than ttl=30"):
            await service.send(orders, 3, delay=30)
        expiries = [envelope.expires_at for envelope in await backend.native.peek("orders", 9)]
    assert expiries == [EPOCH + 30, EPOCH + 5]


async def test_options_that_the_backend_does_not_support_are_rejected(
    virtual_clock: VirtualClock,
) -> None:
    backend = FaultyBackend(virtual_clock, capabilities=Capabilities(dead_letters=Support.NATIVE))
    async with QueueService(Settings(), backend=backend, clock=virtual_clock) as service:
        with pytest.raises(Unsupported, match="does not support priorities"):
            await service.send("orders", 1, priority=3)
        with pytest.raises(Unsupported, match="does not support delays"):
            await service.send("orders", 1, delay=3)
        with pytest.raises(Unsupported, match="does not support TTLs"):
            await service.send("orders", 1, ttl=3)
        await service.send("orders", 1, delay=0)
    assert backend.count("publish") == 1
