"""Kafka that is cut off, frozen or killed: nothing is lost, nothing hangs, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from local_brokers.probes import free_port
from qkit import Message, QueueService, Settings, consume
from qkit._internal.ids import new_id
from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.kafka.backend import KafkaBackend
from qkit.errors import BackendUnavailable, QueueError, SendTimeout
from qkit.message import Envelope
from tests.support.private_brokers import PrivateBroker, private_broker
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

OUTAGE = 3.0
PATIENCE = 5.0  # of a backend; a topic is made within it also on a busy machine
HEALS = 10.0  # seconds after which all must go on


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[PrivateBroker, Proxy]]:
    port = free_port()
    with (
        private_broker("kafka", advertised=port) as broker,
        Proxy(broker.proxied, port=port) as proxy,
    ):
        yield broker, proxy


@pytest.fixture
def broker(site: tuple[PrivateBroker, Proxy]) -> Iterator[PrivateBroker]:
    yield site[0]
    site[0].thaw()
    site[0].restart()


@pytest.fixture
def proxy(site: tuple[PrivateBroker, Proxy]) -> Iterator[Proxy]:
    yield site[1]
    site[1].heal()


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


Deed = Callable[[PrivateBroker, Proxy], None]
FAULTS: dict[str, tuple[Deed, Deed]] = {
    "killed": (lambda broker, proxy: broker.kill(), lambda broker, proxy: broker.restart()),
    "reset": (lambda broker, proxy: proxy.reset(), lambda broker, proxy: None),
    "half-closed": (lambda broker, proxy: proxy.half_close(), lambda broker, proxy: proxy.heal()),
    "black-hole": (
        lambda broker, proxy: proxy.black_hole(),
        lambda broker, proxy: proxy.heal(forget=True),
    ),
    "refused": (lambda broker, proxy: proxy.refuse(), lambda broker, proxy: proxy.heal()),
    "frozen": (lambda broker, proxy: broker.freeze(), lambda broker, proxy: broker.thaw()),
}


@pytest.mark.parametrize(("harm", "heal"), FAULTS.values(), ids=FAULTS.keys())
async def test_a_service_goes_on_after_an_outage_and_loses_nothing(
    broker: PrivateBroker,
    proxy: Proxy,
    name: str,
    harm: Deed,
    heal: Deed,
) -> None:
    url = f"127.0.0.1:{proxy.port}"
    confirmed: set[str] = set()
    handled: set[str] = set()
    refused = 0
    over = asyncio.Event()

    @consume(name, concurrency=4)
    async def handle(number: int, message: Message) -> None:
        await asyncio.sleep(0.01)
        handled.add(message.id)

    service = QueueService(
        Settings(type="kafka", url=url, send_timeout=4.0, breaker={"failure_threshold": 1_000}),
        backend=KafkaBackend(url, partitions=2, heartbeat=0.3),
    )
    service.register(handle)

    async def send() -> None:
        nonlocal refused
        number = 0
        while not over.is_set():
            number += 1
            try:
                confirmed.add((await service.send(name, number)).message_id)
            except QueueError:
                refused += 1
            await asyncio.sleep(0.01)

    async with service:
        sending = asyncio.create_task(send())
        await eventually(lambda: len(handled) > 20)
        await asyncio.to_thread(harm, broker, proxy)
        await asyncio.sleep(OUTAGE)
        await asyncio.to_thread(heal, broker, proxy)
        healed = len(confirmed)
        took = await eventually(lambda: len(confirmed) > healed + 20, within=HEALS + 10)
        took = max(took, await eventually(lambda: confirmed <= handled, within=HEALS + 10))
        over.set()
        await sending
        await eventually(lambda: confirmed <= handled)
        await eventually(lambda: service.ready)
    unsure = len(handled - confirmed)
    print(f"went on after {took:.1f} s, {refused} sends were refused, {unsure} unsure")
    assert took <= HEALS


async def test_a_send_into_a_black_hole_ends_in_time_and_a_later_one_arrives(
    broker: PrivateBroker, proxy: Proxy, name: str
) -> None:
    backend = KafkaBackend(f"127.0.0.1:{proxy.port}", timeout=PATIENCE)
    await backend.start()
    try:
        await backend.declare(QueueSpec(name=name))
        await backend.publish(name, [Envelope("before", b"")])
        proxy.black_hole()
        began = time.monotonic()
        with pytest.raises((SendTimeout, BackendUnavailable)):
            await backend.publish(name, [Envelope("swallowed", b"")])
        assert time.monotonic() - began <= PATIENCE + 20  # it ends; a busy machine is no failure
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        assert time.monotonic() - began <= PATIENCE + 40
        proxy.heal(forget=True)
        async with asyncio.timeout(HEALS):
            while True:
                try:
                    await backend.publish(name, [Envelope("after", b"")])
                    break
                except QueueError:
                    await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # what was given up does not arrive any more
        assert [envelope.id for envelope in await backend.peek(name, 10)] == ["before", "after"]
    finally:
        await backend.aclose()


async def test_a_sender_that_goes_away_leaves_no_batch_behind_that_is_tried_for_ever(
    broker: PrivateBroker, proxy: Proxy, name: str
) -> None:
    backend = KafkaBackend(f"127.0.0.1:{proxy.port}", timeout=PATIENCE)
    await backend.start()
    try:
        await backend.declare(QueueSpec(name=name))
        await backend.publish(name, [Envelope("before", b"")])
        proxy.black_hole()
        sending = asyncio.create_task(backend.publish(name, [Envelope("abandoned", b"")]))
        await asyncio.sleep(0.2)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        await eventually(lambda: backend._sending._producer is None, within=20)
        proxy.heal(forget=True)
        await asyncio.sleep(1.0)
        found: list[str] = []

        async def readable() -> bool:
            with contextlib.suppress(QueueError):
                found.extend(envelope.id for envelope in await backend.peek(name, 10))
            return bool(found)

        await eventually(readable, within=HEALS)
        assert found == ["before"]
    finally:
        await backend.aclose()


async def test_nothing_hangs_while_the_broker_is_silent(
    broker: PrivateBroker, proxy: Proxy, name: str
) -> None:
    """Start, subscribe, stop, leave and close: each gives up in time."""
    url = f"127.0.0.1:{proxy.port}"
    backend = KafkaBackend(url, timeout=PATIENCE, session=6.0)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(new_id(), b"") for _ in range(5)])
    spec = SubscriptionSpec(queue=name, group="g", consumer="c", prefetch=5)
    async with backend.subscribe(spec) as subscription:
        deliveries = await subscription.receive(5)
        for delivery in deliveries[:2]:
            await subscription.ack(delivery)
        proxy.black_hole()
        began = time.monotonic()
        for delivery in deliveries[2:]:
            await subscription.ack(delivery)
        await subscription.stop()
        assert time.monotonic() - began < 20, "stop"
        other = KafkaBackend(url, timeout=PATIENCE)
        with pytest.raises(BackendUnavailable):
            await other.start()
        with pytest.raises(BackendUnavailable):
            async with backend.subscribe(spec):
                pass
    await backend.aclose()
    await other.aclose()
    took = time.monotonic() - began
    print(f"all of it took {took:.1f} s")
    assert took < 60
