"""Ordered consumers: what they hold back and give back, standby, and the limit of a backend."""

from __future__ import annotations

import asyncio
import logging

import pytest

from qkit import Message, Unavailable, consume
from qkit.backend import Delivery, Subscription, SubscriptionSpec, Support
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import FaultInjectingBackend
from qkit.errors import AckDeadlineExceeded
from qkit.testing.clock import VirtualClock
from tests.support.backends import ScriptedBackend, can
from tests.support.services import make_service


class Recording(FaultInjectingBackend):
    """Native backend that counts subscriptions and releases."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(NativeBackend(clock=clock))
        self.specs: list[SubscriptionSpec] = []
        self.released: list[str] = []
        self.lose: str | None = None

    async def subscribing(self, spec: SubscriptionSpec) -> None:
        self.specs.append(spec)

    async def release(
        self, subscription: Subscription, delivery: Delivery, delay: float, count_attempt: bool
    ) -> None:
        self.released.append(delivery.envelope.body.decode())
        await super().release(subscription, delivery, delay, count_attempt)

    async def extend(self, subscription: Subscription, delivery: Delivery, seconds: float) -> None:
        if self.lose is None:
            await super().extend(subscription, delivery, seconds)
        elif delivery.envelope.body.decode() == self.lose:
            raise AckDeadlineExceeded("expired (injected fault)")


async def test_an_unavailable_dependency_releases_nothing_and_leases_are_renewed(
    clock: VirtualClock,
) -> None:
    backend, calls = Recording(clock), list[tuple[int, float]]()

    @consume("orders", ordered=True, prefetch=10)
    async def handle(body: int, message: Message) -> None:
        calls.append((body, clock.time() - began))
        if len(calls) < 3:
            raise Unavailable(retry_after=100)
        assert message.attempt == 1

    began = clock.time()
    async with make_service(handle, clock=clock, backend=backend, ack_deadline=30) as service:
        await service.send_many("orders", range(4), key="a")
        await clock.advance(150)
        consumer = service.health_check().consumers[0]
        assert (consumer.state, consumer.in_flight) == ("paused", 4)
        await clock.advance(100)
        assert [body for body, _ in calls] == [0, 0, 0, 1, 2, 3]
        assert [round(at) for _, at in calls] == [0, 100, 200, 200, 200, 200]
    assert backend.released == []


async def test_a_probe_that_fails_for_good_is_followed_by_the_next_one(clock: VirtualClock) -> None:
    calls: list[int] = []

    @consume("orders", ordered=True, prefetch=10, retry_on=[OSError])
    async def handle(body: int) -> None:
        calls.append(body)
        if len(calls) == 1:
            raise Unavailable(retry_after=1)
        if len(calls) == 2:
            raise ValueError("final")

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(3), key="a")
        await service.send("orders", 7)
        await clock.advance(5)
        assert sorted(calls) == [0, 0, 1, 2, 7]
        assert calls[:2] == [0, 0]
        await service.send("orders", 8)
        await clock.advance(1)
        assert calls[-1] == 8


async def test_a_pause_ends_the_subscription_and_resume_opens_another(clock: VirtualClock) -> None:
    backend, calls, finish = Recording(clock), list[int](), asyncio.Event()

    @consume("orders", ordered=True, prefetch=10)
    async def handle(body: int) -> None:
        calls.append(body)
        await finish.wait()

    async with make_service(handle, clock=clock, backend=backend) as service:
        await service.send_many("orders", range(3), key="a")
        await clock.advance(1)
        service.pause("orders")
        await clock.advance(1)
        assert (await service.stats("orders")).in_flight == 3  # until the handler has ended
        finish.set()
        await clock.advance(1)
        stats = await service.stats("orders")
        assert (stats.depth, stats.in_flight, stats.consumers) == (2, 0, 0)
        health = service.health_check()
        assert (health.status, health.consumers[0].state) == ("healthy", "paused")
        service.resume("orders")
        await clock.advance(1)
        assert calls == [0, 1, 2]
        assert [spec.ordered for spec in backend.specs] == [True, True]
        assert service.health_check().consumers[0].state == "consuming"


async def test_a_pause_that_is_resumed_at_once_loses_nothing(clock: VirtualClock) -> None:
    calls: list[int] = []

    @consume("orders", ordered=True, prefetch=10)
    async def handle(body: int) -> None:
        calls.append(body)
        await asyncio.sleep(1)

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(4), key="a")
        await clock.advance(0.5)
        service.pause("orders")
        service.resume("orders")
        await clock.advance(10)
        assert calls == [0, 1, 2, 3]


async def test_a_paused_ordered_consumer_begins_no_inline_retry(clock: VirtualClock) -> None:
    attempts: list[int] = []

    @consume("orders", ordered=True)
    async def handle(body: int, message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("not yet")

    async with make_service(handle, clock=clock, retry={"initial_delay": 10}) as service:
        await service.send("orders", 1, key="a")
        await clock.advance(1)
        service.pause("orders")
        await clock.advance(100)
        assert attempts == [1]
        assert (await service.stats("orders")).depth == 1
        service.resume("orders")
        await clock.advance(1)
        assert attempts == [1, 1]


@pytest.mark.parametrize("pause", ["pause", "unavailable"])
async def test_an_inline_retry_waits_while_its_channel_is_paused(
    clock: VirtualClock, pause: str
) -> None:
    attempts: list[tuple[int, float]] = []

    @consume("orders", concurrency=2)
    async def handle(body: int, message: Message) -> None:
        attempts.append((body, clock.time() - began))
        if body == 2:
            raise Unavailable(retry_after=50)
        if message.attempt == 1:
            raise ValueError("not yet")

    retry = {"initial_delay": 10, "mode": "inline"}
    began = clock.time()
    async with make_service(handle, clock=clock, retry=retry) as service:
        await service.send("orders", 1)
        await clock.advance(5)
        if pause == "pause":
            service.pause("orders")
        else:
            await service.send("orders", 2)
        await clock.advance(40)
        assert [at for body, at in attempts if body == 1] == [0]
        service.resume("orders")
        await clock.advance(1)
        assert [round(at) for body, at in attempts if body == 1] == [0, 45]


async def test_all_messages_of_a_key_are_lost_together(clock: VirtualClock) -> None:
    backend, calls, cancelled = Recording(clock), list[int](), list[int]()

    @consume("orders", ordered=True, prefetch=10)
    async def handle(body: int) -> None:
        calls.append(body)
        try:
            await asyncio.sleep(40)
        except asyncio.CancelledError:
            cancelled.append(body)
            raise

    async with make_service(handle, clock=clock, backend=backend, ack_deadline=30) as service:
        await service.send_many("orders", range(3), key="a")
        backend.lose = "2"  # the last of the key
        await clock.advance(15)
        backend.lose = None
        assert cancelled == [0], "the messages before it return to the broker too"
        await clock.advance(300)
        assert calls == [0, 0, 1, 2]


class Standby(Recording):
    """Backend whose subscription is on standby as long as ``standby`` is true."""

    standby = True

    async def receive(self, subscription: Subscription, limit: int) -> list[Delivery]:
        await asyncio.sleep(60)
        return await super().receive(subscription, limit)


async def test_a_consumer_on_standby_is_healthy_and_ready(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkit.backends.native.subscription import NativeSubscription

    backend = Standby(clock)
    monkeypatch.setattr(
        NativeSubscription, "standby", property(lambda _: backend.standby), raising=False
    )

    @consume("orders", ordered=True)
    async def handle(body: int) -> None: ...

    async with make_service(handle, clock=clock, backend=backend) as service:
        await clock.advance(1)
        health = service.health_check()
        assert (health.status, health.consumers[0].state) == ("healthy", "standby")
        assert service.ready
        backend.standby = False
        assert service.health_check().consumers[0].state == "consuming"
        service.pause("orders")
        assert service.health_check().consumers[0].state == "paused"


@pytest.mark.parametrize("lock", [Support.UNSUPPORTED, Support.EMULATED])
async def test_without_a_key_lock_the_limit_of_the_order_is_logged_at_start(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, lock: Support
) -> None:
    @consume("orders", ordered=True)
    async def handle(body: int) -> None: ...

    @consume("others")
    async def unordered(body: int) -> None: ...

    backend = ScriptedBackend(can(key_lock=lock))
    with caplog.at_level(logging.WARNING, logger="qkit"):
        async with make_service(handle, unordered, clock=clock, backend=backend):
            pass
    found = [line for line in caplog.messages if "only within one process" in line]
    assert len(found) == (0 if lock else 1)
    assert all(line.startswith("orders: ") for line in found)
