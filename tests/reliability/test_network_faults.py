"""Network faults: consumers reconnect within 10 s, and every send is told its true outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from qkit import QueueError, QueueService, consume
from tests.support.carriers import Site, behind_a_network, on
from tests.support.proxy import Proxy
from tests.support.waiting import eventually, scaled

AGAIN = 10.0  # seconds after the network healed in which a consumer must be back
SEND_TIMEOUT = 1.0
LATE = 10.0  # seconds by which a busy machine may report a timeout late


def reset(proxy: Proxy) -> None:
    proxy.reset()


def half_close(proxy: Proxy) -> None:
    proxy.half_close()


def refuse(proxy: Proxy) -> None:
    proxy.refuse()
    time.sleep(0.5)
    proxy.heal()


def black_hole(proxy: Proxy) -> None:
    """Packets get lost for a while; then TCP goes on where it was."""
    proxy.black_hole()
    time.sleep(2)
    proxy.heal()


def long_black_hole(proxy: Proxy) -> None:
    proxy.black_hole()
    time.sleep(15)
    proxy.heal()


def forgotten_connections(proxy: Proxy) -> None:
    """As behind a firewall that lost its table: old connections stay silent for ever."""
    proxy.black_hole()
    time.sleep(1)
    proxy.heal(forget=True)


FAULTS = [reset, half_close, refuse, black_hole, forgotten_connections]
Fault = Callable[[Proxy], None]


@dataclass
class Consuming:
    """A service that consumes and sends through the proxy, and one that sends past it."""

    site: Site
    proxy: Proxy
    consumer: QueueService
    sender: QueueService
    handled: list[int]
    busy: bool
    _tried: int = 0
    sent: list[int] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)  # of those sent through the proxy

    async def send_through(self) -> bool:
        """Send through the proxy; whether it was confirmed. Its numbers are below zero."""
        self._tried -= 1
        number = self._tried
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

    async def proves_itself(self, within: float) -> None:
        """It handles what is sent from now on, is ready, and the broker counts it."""
        first = len(self.sent)

        async def consumes() -> bool:
            await self.send()  # again and again: where nothing is kept, one that is early is lost
            handles = max(self.handled, default=-1) >= first
            return handles and self.consumer.ready and await self.site.consumers() == 1

        await eventually(consumes, within)


@asynccontextmanager
async def consuming(site: Site, busy: bool) -> AsyncIterator[Consuming]:
    """Everything is well when it begins."""
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
        trial = Consuming(site, site.proxy, consumer, sender, handled, busy)
        await trial.proves_itself(60)
        await eventually(trial.send_through)
        yield trial


async def fault_and_recovery(trial: Consuming, fault: Fault) -> None:
    """The fault falls into a steady stream of messages, or finds the consumer waiting."""
    healed = asyncio.Event()

    async def stream(send: Callable[[], Awaitable[object]]) -> None:
        while not healed.is_set():
            await send()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        if trial.busy:
            tasks.create_task(stream(trial.send))
            tasks.create_task(stream(trial.send_through))
            await asyncio.sleep(0.1)
        await asyncio.to_thread(fault, trial.proxy)
        healed.set()
    await trial.proves_itself(scaled(AGAIN))
    await eventually(trial.send_through, scaled(AGAIN))
    if trial.site.carrier.capabilities.redelivery:
        await eventually(lambda: {*trial.sent, *trial.confirmed} <= set(trial.handled))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [reset, half_close, refuse, black_hole], ids=lambda fault: fault.__name__
)
@on(behind_a_network)
async def test_a_busy_consumer_is_back_after(site: Site, fault: Fault) -> None:
    async with consuming(site, busy=True) as trial:
        await fault_and_recovery(trial, fault)


@pytest.mark.slow
@on(behind_a_network)
async def test_a_waiting_consumer_is_back_although_nothing_tells_it(site: Site) -> None:
    async with consuming(site, busy=False) as trial:
        await fault_and_recovery(trial, forgotten_connections)


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@on(behind_a_network)
async def test_a_consumer_is_back_every_time(site: Site) -> None:
    async with consuming(site, busy=False) as trial:
        for turn in range(10):
            trial.busy = not trial.busy
            for fault in (*FAULTS, long_black_hole):
                print(turn, fault.__name__, "busy" if trial.busy else "waiting")
                await fault_and_recovery(trial, fault)


@on(behind_a_network)
async def test_a_send_into_a_black_hole_fails_in_time_and_what_was_confirmed_is_there(
    site: Site,
) -> None:
    """Many send at once while the hole opens, and each of them is told, in time."""
    proxy = site.proxy
    assert proxy is not None
    confirmed: list[int] = []
    refused: list[type[QueueError]] = []
    slowest = 0.0
    handled: set[int] = set()

    @consume(site.queue)
    async def handle(body: int) -> None:
        handled.add(body)

    async def send(number: int) -> None:
        nonlocal slowest
        began = time.monotonic()
        try:
            await service.send(site.queue, number)
        except QueueError as error:
            refused.append(type(error))
        else:
            confirmed.append(number)
        slowest = max(slowest, time.monotonic() - began)

    async with (
        site.service(handle),
        site.service(
            proxied=True, send_timeout=SEND_TIMEOUT, breaker={"recovery_timeout": 1.0}
        ) as service,
    ):

        async def connected() -> bool:
            await send(0)  # the first send opens the connection, which may outlast the timeout
            return bool(confirmed)

        await eventually(connected, 30)
        confirmed.clear()
        refused.clear()
        slowest = 0.0
        async with asyncio.TaskGroup() as tasks:
            for number in range(300):
                if number == 150:
                    await asyncio.to_thread(proxy.black_hole)
                tasks.create_task(send(number))
                await asyncio.sleep(0.001)
        assert slowest <= SEND_TIMEOUT + LATE
        assert len(refused) + len(confirmed) == 300
        assert len(refused) >= 100, "nobody can know of what was sent into the hole"
        await send(300)  # also one that begins in it
        assert slowest <= SEND_TIMEOUT + LATE
        assert 300 not in confirmed
        await asyncio.to_thread(proxy.heal)
        if site.carrier.capabilities.redelivery:
            await eventually(lambda: set(confirmed) <= handled)

        async def works_again() -> bool:
            before = len(confirmed)
            await send(1_000)
            return len(confirmed) > before

        await eventually(works_again, scaled(AGAIN))
    print("refused:", {kind.__name__: refused.count(kind) for kind in set(refused)})
