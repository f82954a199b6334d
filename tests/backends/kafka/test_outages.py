"""Kafka that is cut off: nothing given up arrives later, and nothing hangs.

``tests/reliability`` has the outages that every backend must survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator

import pytest

from local_brokers.probes import free_port
from qkit._internal.ids import new_id
from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.kafka.backend import KafkaBackend
from qkit.errors import BackendUnavailable, QueueError, SendTimeout
from qkit.message import Envelope
from tests.support.private_brokers import PrivateBroker, private_broker
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

PATIENCE = 5.0  # of a backend; a topic is made within it also on a busy machine
HEALS = 30.0  # seconds after which all must go on, also on a busy machine


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
        await eventually(lambda: backend._publisher._shared.value is None, within=20)
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
