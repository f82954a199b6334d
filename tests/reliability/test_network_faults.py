"""Network faults: consumers recover within 10 seconds, and every send ends in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from qkit import QueueError, QueueService, consume
from tests.support.deployments import Site, behind_a_network, on
from tests.support.proxy import Proxy
from tests.support.waiting import eventually, scaled

RECOVERY_SECONDS = 10.0  # limit from the end of the fault until the consumer works again
SEND_TIMEOUT = 1.0
TOLERANCE_SECONDS = 10.0  # extra time that a busy machine may take to report a timeout


def reset(proxy: Proxy) -> None:
    proxy.reset()


def half_close(proxy: Proxy) -> None:
    proxy.half_close()


def refuse(proxy: Proxy) -> None:
    proxy.refuse()
    time.sleep(0.5)
    proxy.heal()


def black_hole(proxy: Proxy) -> None:
    """Drop packets for two seconds; TCP then resumes the connections."""
    proxy.black_hole()
    time.sleep(2)
    proxy.heal()


def long_black_hole(proxy: Proxy) -> None:
    proxy.black_hole()
    time.sleep(15)
    proxy.heal()


def forgotten_connections(proxy: Proxy) -> None:
    """Drop open connections silently, like a firewall that lost its state table."""
    proxy.black_hole()
    time.sleep(1)
    proxy.heal(forget=True)


FAULTS = [reset, half_close, refuse, black_hole, forgotten_connections]
Fault = Callable[[Proxy], None]


@dataclass
class ConsumerUnderTest:
    """Service that consumes and sends through a proxy, and a service that sends directly."""

    site: Site
    proxy: Proxy
    consumer: QueueService
    sender: QueueService
    handled: list[int]
    busy: bool
    _sent_through_proxy: int = 0
    sent: list[int] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)  # sent through the proxy

    async def send_through_proxy(self) -> bool:
        """Send a negative number through the proxy; return whether it was confirmed."""
        self._sent_through_proxy -= 1
        number = self._sent_through_proxy
        try:
            await self.consumer.send(self.site.queue, number)
        except QueueError:
            return False
        self.confirmed.add(number)
        return True

    async def send(self) -> int:
        number = len(self.sent)
        await self.sender.send(self.site.queue, number)
        self.sent.append(number)
        return number

    async def wait_until_healthy(self, within: float) -> None:
        """Wait until the consumer handles new messages and is ready, and the broker lists it."""
        first = len(self.sent)

        async def consumes() -> bool:
            await self.send()  # on each check, because pub/sub loses messages without a subscriber
            handles = max(self.handled, default=-1) >= first
            return handles and self.consumer.ready and await self.site.consumers() == 1

        await eventually(consumes, within)


@asynccontextmanager
async def consuming(site: Site, busy: bool) -> AsyncIterator[ConsumerUnderTest]:
    """Start a consumer and a sender, and wait until both work."""
    assert site.proxy is not None
    handled: list[int] = []

    @consume(site.queue)
    async def handle(body: int) -> None:
        handled.append(body)

    async with (
        site.service(
            handle, proxied=True, send_timeout=3.0, breaker={"recovery_timeout": 1.0}
        ) as consumer,
        site.service() as sender,
    ):
        subject = ConsumerUnderTest(site, site.proxy, consumer, sender, handled, busy)
        await subject.wait_until_healthy(60)
        await eventually(subject.send_through_proxy)
        yield subject


async def fault_and_recovery(subject: ConsumerUnderTest, fault: Fault) -> None:
    """Inject a fault under load or while idle; check that the consumer recovers without loss."""
    healed = asyncio.Event()

    async def stream(send: Callable[[], Awaitable[object]]) -> None:
        while not healed.is_set():
            await send()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        if subject.busy:
            tasks.create_task(stream(subject.send))
            tasks.create_task(stream(subject.send_through_proxy))
            await asyncio.sleep(0.1)
        await asyncio.to_thread(fault, subject.proxy)
        healed.set()
    await subject.wait_until_healthy(scaled(RECOVERY_SECONDS))
    await eventually(subject.send_through_proxy, scaled(RECOVERY_SECONDS))
    if subject.site.deployment.capabilities.redelivery:
        await eventually(lambda: {*subject.sent, *subject.confirmed} <= set(subject.handled))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [reset, half_close, refuse, black_hole], ids=lambda fault: fault.__name__
)
@on(behind_a_network)
async def test_a_busy_consumer_recovers_from_a_network_fault(site: Site, fault: Fault) -> None:
    async with consuming(site, busy=True) as subject:
        await fault_and_recovery(subject, fault)


@pytest.mark.slow
@on(behind_a_network)
async def test_an_idle_consumer_recovers_from_silently_dropped_connections(site: Site) -> None:
    async with consuming(site, busy=False) as subject:
        await fault_and_recovery(subject, forgotten_connections)


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(behind_a_network)
async def test_a_consumer_recovers_from_a_series_of_faults(site: Site) -> None:
    async with consuming(site, busy=False) as subject:
        for turn in range(10):
            subject.busy = not subject.busy
            for fault in (*FAULTS, long_black_hole):
                print(turn, fault.__name__, "busy" if subject.busy else "idle")
                await fault_and_recovery(subject, fault)


@on(behind_a_network)
async def test_sends_into_a_black_hole_fail_in_time_and_confirmed_ones_are_delivered(
    site: Site,
) -> None:
    """The network starts to drop packets after half of 300 concurrent sends."""
    proxy = site.proxy
    assert proxy is not None
    confirmed: list[int] = []
    failed: list[type[QueueError]] = []
    slowest = 0.0
    handled: set[int] = set()

    @consume(site.queue)
    async def handle(body: int) -> None:
        handled.add(body)

    async def send(number: int) -> None:
        nonlocal slowest
        started_at = time.monotonic()
        try:
            await service.send(site.queue, number)
        except QueueError as error:
            failed.append(type(error))
        else:
            confirmed.append(number)
        slowest = max(slowest, time.monotonic() - started_at)

    async with (
        site.service(handle),
        site.service(
            proxied=True, send_timeout=SEND_TIMEOUT, breaker={"recovery_timeout": 1.0}
        ) as service,
    ):

        async def connected() -> bool:
            await send(0)  # opens the connection, which may take longer than the timeout
            return bool(confirmed)

        await eventually(connected, 30)
        confirmed.clear()
        failed.clear()
        slowest = 0.0
        async with asyncio.TaskGroup() as tasks:
            for number in range(300):
                if number == 150:
                    await asyncio.to_thread(proxy.black_hole)
                tasks.create_task(send(number))
                await asyncio.sleep(0.001)
        assert slowest <= SEND_TIMEOUT + TOLERANCE_SECONDS
        assert len(failed) + len(confirmed) == 300
        assert len(failed) >= 100, "sends into the black hole were confirmed"
        await send(300)  # this send starts during the fault
        assert slowest <= SEND_TIMEOUT + TOLERANCE_SECONDS
        assert 300 not in confirmed
        await asyncio.to_thread(proxy.heal)
        if site.deployment.capabilities.redelivery:
            await eventually(lambda: set(confirmed) <= handled)

        async def can_send() -> bool:
            before = len(confirmed)
            await send(1_000)
            return len(confirmed) > before

        await eventually(can_send, scaled(RECOVERY_SECONDS))
    print("failed:", {kind.__name__: failed.count(kind) for kind in set(failed)})
