"""Network outages: a failed send does not arrive later, and no call hangs.

``tests/reliability`` covers the outages that every backend must survive.
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

TIMEOUT_SECONDS = 5.0  # timeout of a backend; enough to create a topic on a busy machine
RECOVERY_SECONDS = 30.0  # time limit for recovery after an outage, on a busy machine


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


async def test_a_send_during_a_black_hole_fails_in_time_and_a_later_send_succeeds(
    broker: PrivateBroker, proxy: Proxy, name: str
) -> None:
    backend = KafkaBackend(f"127.0.0.1:{proxy.port}", timeout=TIMEOUT_SECONDS)
    await backend.start()
    try:
        await backend.declare(QueueSpec(name=name))
        await backend.publish(name, [Envelope("before", b"")])
        proxy.black_hole()
        began = time.monotonic()
        with pytest.raises((SendTimeout, BackendUnavailable)):
            await backend.publish(name, [Envelope("swallowed", b"")])
        assert time.monotonic() - began <= TIMEOUT_SECONDS + 20  # generous, for a busy machine
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        assert time.monotonic() - began <= TIMEOUT_SECONDS + 40
        proxy.heal(forget=True)
        async with asyncio.timeout(RECOVERY_SECONDS):
            while True:
                try:
                    await backend.publish(name, [Envelope("after", b"")])
                    break
                except QueueError:
                    await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # the failed message must not arrive late
        assert [envelope.id for envelope in await backend.peek(name, 10)] == ["before", "after"]
    finally:
        await backend.aclose()


async def test_the_batch_of_a_cancelled_send_is_not_retried_forever(
    broker: PrivateBroker, proxy: Proxy, name: str
) -> None:
    backend = KafkaBackend(f"127.0.0.1:{proxy.port}", timeout=TIMEOUT_SECONDS)
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

        await eventually(readable, within=RECOVERY_SECONDS)
        assert found == ["before"]
    finally:
        await backend.aclose()


async def test_no_call_hangs_while_the_broker_does_not_respond(
    broker: PrivateBroker, proxy: Proxy, name: str
) -> None:
    """Ack, stop, start, subscribe and close end within their timeouts."""
    url = f"127.0.0.1:{proxy.port}"
    backend = KafkaBackend(url, timeout=TIMEOUT_SECONDS, session=6.0)
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
        assert time.monotonic() - began < 20, "ack and stop took too long"
        other = KafkaBackend(url, timeout=TIMEOUT_SECONDS)
        with pytest.raises(BackendUnavailable):
            await other.start()
        with pytest.raises(BackendUnavailable):
            async with backend.subscribe(spec):
                pass
    await backend.aclose()
    await other.aclose()
    took = time.monotonic() - began
    print(f"all calls took {took:.1f} s")
    assert took < 60
