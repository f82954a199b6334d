"""Outages: a killed broker with confirmed and delayed messages, and a closed connection.

``tests/reliability`` covers the outages that every backend must survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator

import pytest

from qkit._internal.clock import SystemClock
from qkit.backend import QueueSpec
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.errors import QueueError, SubscriptionLost
from qkit.message import Envelope
from tests.support.private_brokers import PrivateBroker
from tests.support.proxy import Proxy
from tests.support.rabbitmq import declare, spec
from tests.support.waiting import eventually


@pytest.fixture
def proxy(private_rabbitmq: PrivateBroker) -> Iterator[Proxy]:
    with Proxy(private_rabbitmq.port) as proxy:
        yield proxy


def through(proxy: Proxy) -> str:
    return f"amqp://guest:guest@127.0.0.1:{proxy.port}/"


# After SIGKILL, a quorum queue on a single node may find no leader, see docs/rabbitmq.md.
KINDS = pytest.mark.parametrize(
    "quorum",
    [pytest.param(False, id="classic"), pytest.param(True, id="quorum", marks=pytest.mark.torture)],
)


async def collect(
    backend: RabbitMQBackend, name: str, wanted: set[str], within: float = 300.0
) -> list[str]:
    """Consume until all wanted messages have arrived and another second has passed."""
    got: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within) as limit:
            while True:
                with contextlib.suppress(QueueError):  # the broker may still be starting
                    async with backend.subscribe(spec(name, prefetch=500)) as subscription:
                        while True:
                            for delivery in await subscription.receive(500):
                                got.append(delivery.envelope.id)
                                await subscription.ack(delivery)
                            if wanted <= set(got):
                                limit.reschedule(asyncio.get_running_loop().time() + 1)
                await asyncio.sleep(0.2)
    return got


async def kill_while_messages_are_delayed(
    broker: PrivateBroker, *, quorum: bool, count: int
) -> None:
    """Kill the broker while delayed messages and a retry are in the cascade; check for losses."""
    name = f"k-{uuid.uuid4().hex[:8]}"
    backend = RabbitMQBackend(broker.url, quorum=quorum)
    await backend.start()
    await declare(backend, name)
    await backend.publish(name, [Envelope("retried", b"x")])
    async with backend.subscribe(spec(name, prefetch=1)) as subscription:
        (delivery,) = await subscription.receive(1)
        await subscription.release(delivery, 3.0)
    began, spread = SystemClock().time() + 0.5, 4.0 + count / 1000
    due = {str(number): began + spread * number / count for number in range(count)}
    for start in range(0, count, 500):
        some = list(due)[start : start + 500]
        await backend.publish(name, [Envelope(id, b"x", not_before=due[id]) for id in some])
    await asyncio.sleep(0.3)
    with broker.killed():
        pass

    wanted = {*due, "retried"}
    # The broker resumes interrupted moves after three minutes.
    got = await collect(backend, name, wanted, within=230)
    print(f"{len(got) - len(set(got))} duplicates of {len(wanted)}")
    assert set(got) == wanted, f"lost {len(wanted - set(got))}"
    await backend.delete(name)
    await backend.aclose()


# Slow: the broker waits three minutes before it resumes interrupted moves.
@pytest.mark.full
@pytest.mark.timeout(400)
@KINDS
async def test_no_delayed_message_is_lost_when_the_broker_is_killed(
    private_rabbitmq: PrivateBroker, quorum: bool
) -> None:
    await kill_while_messages_are_delayed(private_rabbitmq, quorum=quorum, count=500)


@pytest.mark.torture
@pytest.mark.timeout(1_800)
@KINDS
async def test_none_of_many_delayed_messages_is_lost_when_the_broker_is_killed_repeatedly(
    private_rabbitmq: PrivateBroker, quorum: bool
) -> None:
    for _ in range(3):
        await kill_while_messages_are_delayed(private_rabbitmq, quorum=quorum, count=5_000)


@KINDS
async def test_confirmed_messages_survive_a_killed_broker(
    private_rabbitmq: PrivateBroker, quorum: bool
) -> None:
    name = f"c-{uuid.uuid4().hex[:8]}"
    backend = RabbitMQBackend(private_rabbitmq.url, quorum=quorum)
    await backend.start()
    await declare(backend, name)
    confirmed: set[str] = set()
    stop = asyncio.Event()

    async def send() -> None:
        number = 0
        while not stop.is_set():
            batch = [Envelope(f"{number}-{n}", b"x" * 100) for n in range(20)]
            number += 1
            with contextlib.suppress(QueueError, TimeoutError):
                async with asyncio.timeout(5):
                    confirmed.update(sent.message_id for sent in await backend.publish(name, batch))
            await asyncio.sleep(0)

    sending = asyncio.create_task(send())
    await eventually(lambda: len(confirmed) > 200)
    with private_rabbitmq.killed():
        stop.set()
    await sending
    got = await collect(backend, name, confirmed)
    assert confirmed <= set(got), f"lost {len(confirmed - set(got))} of {len(confirmed)}"
    await backend.delete(name)
    await backend.aclose()


async def test_a_closed_connection_ends_the_subscription_and_the_next_subscription_reconnects(
    private_rabbitmq: PrivateBroker, proxy: Proxy
) -> None:
    name = f"o-{uuid.uuid4().hex[:8]}"
    backend = RabbitMQBackend(through(proxy))
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(1))
        await asyncio.sleep(0.1)
        proxy.reset()
        with pytest.raises(SubscriptionLost):
            async with asyncio.timeout(10):
                await receiving
    async with backend.subscribe(spec(name)):
        pass  # on a new connection
    await backend.delete(name)
    await backend.aclose()
