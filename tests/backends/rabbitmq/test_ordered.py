"""Ordered subscriptions: one active consumer per queue, takeover, and the order of what returns."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiormq
import pytest
import pytest_asyncio

from qkit.backend import QueueSpec, StandbyReporting
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.ordered_subscription import OrderedSubscription
from qkit.backends.rabbitmq.subscription import RabbitSubscription
from qkit.backends.rabbitmq.topology import active_queue, group_queue
from qkit.errors import ConfigError, QueueNotFound, SubscriptionLost
from qkit.message import Envelope
from tests.support.rabbitmq import bare_channel, consumers, declare, is_, ready, spec, take
from tests.support.waiting import eventually, scaled

ORDER = [f"m{number}" for number in range(10)]


@pytest_asyncio.fixture
async def other(backend: RabbitMQBackend, rabbitmq_url: str) -> AsyncIterator[RabbitMQBackend]:
    """Yield a second backend of the same kind, with its own connections."""
    other = RabbitMQBackend(rabbitmq_url, quorum=backend._quorum)
    await other.start()
    yield other
    await other.aclose()


async def send_in_order(backend: RabbitMQBackend, name: str) -> None:
    await declare(backend, name)
    await backend.publish(name, [Envelope(id, b"x", key="k") for id in ORDER])


async def received(subscription: RabbitSubscription) -> list[str]:
    """Receive and acknowledge all messages; return their ids."""
    found = await take(subscription, len(ORDER))
    for delivery in found:
        await subscription.ack(delivery)
    return [delivery.envelope.id for delivery in found]


def is_active(subscription: RabbitSubscription) -> bool:
    assert isinstance(subscription, StandbyReporting)
    return not subscription.standby


async def is_locked(raw: aiormq.Channel, queue: str) -> bool:
    try:
        async with bare_channel(str(raw.connection.url)) as channel:
            await channel.queue_declare(active_queue(queue), passive=True)
    except aiormq.exceptions.ChannelLockedResource:
        return True
    except aiormq.exceptions.ChannelNotFoundEntity:
        return False
    return True


async def test_released_messages_return_in_order_when_the_subscription_ends(
    backend: RabbitMQBackend, name: str
) -> None:
    await send_in_order(backend, name)
    async with backend.subscribe(spec(name, ordered=True, prefetch=6)) as subscription:
        assert is_active(subscription)
        held = await take(subscription, 4)  # two more are prefetched and not received
        for delivery in reversed(held):
            await subscription.release(delivery, 0, count_attempt=False)
    async with backend.subscribe(spec(name, ordered=True)) as subscription:
        found = await take(subscription, len(ORDER))
        assert [delivery.envelope.id for delivery in found] == ORDER
        assert {delivery.envelope.attempt for delivery in found} == {1}


async def test_messages_in_flight_return_in_order_after_a_lost_connection(
    backend: RabbitMQBackend, other: RabbitMQBackend, name: str
) -> None:
    await send_in_order(backend, name)
    async with backend.subscribe(spec(name, ordered=True, prefetch=5)) as active:
        await take(active, 3)
        async with other.subscribe(spec(name, ordered=True)) as standby:
            assert not is_active(standby)
            backend._consuming._abort()
            assert await eventually(lambda: is_active(standby)) < scaled(5)
            assert await received(standby) == ORDER
        with pytest.raises(SubscriptionLost):
            await active.receive(1)


async def test_a_stopped_subscription_keeps_the_queue_until_it_has_ended(
    backend: RabbitMQBackend, other: RabbitMQBackend, name: str, raw: aiormq.Channel
) -> None:
    await send_in_order(backend, name)
    async with other.subscribe(spec(name, ordered=True)) as first:
        async with backend.subscribe(spec(name, ordered=True)) as second:
            held = await take(first, 2)
            await first.stop()
            assert await first.receive(1) == []
            await first.ack(held[0])
            await asyncio.sleep(1.2)  # longer than the interval of the attempts
            assert not is_active(second)
            await other.aclose()
            await eventually(lambda: is_active(second))
            found = await take(second, 9)
            assert [delivery.envelope.id for delivery in found] == ORDER[1:]
    assert not await is_locked(raw, name), "the lock must be deleted with the subscription"


async def test_two_subscriptions_of_one_connection_are_never_active_together(
    backend: RabbitMQBackend, name: str, raw: aiormq.Channel
) -> None:
    await send_in_order(backend, name)
    async with backend.subscribe(spec(name, ordered=True)) as second:
        async with backend.subscribe(spec(name, ordered=True)) as standby:
            assert is_active(second)
            assert not is_active(standby)
            receiving = asyncio.ensure_future(take(standby, len(ORDER)))
            await take(second, 3)
            await asyncio.sleep(1.2)  # longer than the interval of the attempts
            assert await consumers(raw, name) == 1
            await second.leave()
            found = await receiving
            assert [delivery.envelope.id for delivery in found] == ORDER


async def test_standby_does_not_delay_subscribe_and_ends_with_the_active_subscription(
    backend: RabbitMQBackend, other: RabbitMQBackend, name: str, raw: aiormq.Channel
) -> None:
    await send_in_order(backend, name)
    async with other.subscribe(spec(name, ordered=True)) as standby:
        async with backend.subscribe(spec(name, ordered=True)) as third:
            assert is_active(standby)
            assert await is_locked(raw, name)
            await take(standby, 5)
            await standby.leave()
            assert await eventually(lambda: is_active(third)) < scaled(5)
            assert await received(third) == ORDER


async def test_each_group_of_a_topic_has_its_own_active_subscription(
    backend: RabbitMQBackend, other: RabbitMQBackend, name: str, raw: aiormq.Channel
) -> None:
    for each in (backend, other):
        await each.declare(QueueSpec(name=name, broadcast=True))
    options = {"ordered": True, "broadcast": True}
    async with (
        backend.subscribe(spec(name, group="mail", **options)) as mail,
        other.subscribe(spec(name, group="audit", **options)) as audit,
        other.subscribe(spec(name, group="mail", **options)) as standby,
    ):
        assert is_active(mail)
        assert is_active(audit)
        assert not is_active(standby)
        assert await is_locked(raw, group_queue(name, "mail"))
        await backend.publish(name, [Envelope(id, b"x", key="k") for id in ORDER])
        assert await received(mail) == await received(audit) == ORDER


async def test_a_standby_of_a_missing_queue_raises(backend: RabbitMQBackend, name: str) -> None:
    with pytest.raises(QueueNotFound):
        async with backend.subscribe(spec(name, ordered=True)):
            pass


async def test_an_unordered_consumer_of_the_same_queue_is_logged(
    classic: RabbitMQBackend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(classic, name)
    caplog.set_level(logging.WARNING, "qkit")
    async with (
        classic.subscribe(spec(name)),
        classic.subscribe(spec(name, ordered=True)) as ordered,
    ):
        await eventually(lambda: is_active(ordered))
        await eventually(lambda: "not ordered" in caplog.text)


async def test_without_the_permission_for_the_lock_an_ordered_subscription_is_rejected(
    classic: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declare(classic, name)
    # RabbitMQ allows no client to declare a queue with this prefix.
    monkeypatch.setattr(
        "qkit.backends.rabbitmq.active_lock.active_queue", lambda queue: f"amq.active:{queue}"
    )
    with pytest.raises(ConfigError, match="ordered=True needs the exclusive queue"):
        async with classic.subscribe(spec(name, ordered=True)):
            pass


async def test_a_quorum_queue_logs_that_crashes_are_not_counted(
    quorum: RabbitMQBackend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(quorum, name)
    caplog.set_level(logging.INFO, "qkit")
    async with quorum.subscribe(spec(name, ordered=True)) as subscription:
        assert isinstance(subscription, OrderedSubscription)
    assert "without counting an attempt" in caplog.text


CONSUMER = """
import asyncio, sys
from qkit.backend import SubscriptionSpec
from qkit.backends.rabbitmq.backend import RabbitMQBackend

async def main(url, name, quorum):
    backend = RabbitMQBackend(url, quorum=quorum == "quorum")
    await backend.start()
    options = SubscriptionSpec(queue=name, group="g", consumer="c", prefetch=5, ordered=True)
    async with backend.subscribe(options) as subscription:
        found = await subscription.receive(5)
        await subscription.ack(found[0])
        await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_after_a_kill_of_the_active_process_a_standby_takes_over_in_order(
    backend: RabbitMQBackend, name: str, rabbitmq_url: str, raw: aiormq.Channel, tmp_path: Path
) -> None:
    await send_in_order(backend, name)
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    kind = "quorum" if backend._quorum else "classic"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), rabbitmq_url, name, kind, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        async with backend.subscribe(spec(name, ordered=True)) as standby:
            assert not is_active(standby)
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            assert await eventually(lambda: is_active(standby)) < scaled(5)
            found = await take(standby, 9)
            assert [delivery.envelope.id for delivery in found] == ORDER[1:]
            assert {delivery.envelope.attempt for delivery in found} == {1}
            for delivery in found:
                await standby.ack(delivery)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await eventually(lambda: is_(ready(raw, name), 0))
