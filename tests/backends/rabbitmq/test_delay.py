"""Delay cascade: routing, accuracy for all delays and queue names, and declaration."""

from __future__ import annotations

import asyncio
import random
import time

import aiormq
import pytest

from qkit._internal.clock import SystemClock
from qkit.backend import QueueSpec
from qkit.backends.rabbitmq import subscription as subscription_module
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.delay import MAX_DELAY_SECONDS, UNIT_SECONDS, DelayCascade
from qkit.backends.rabbitmq.topology import LEVELS, Topology
from qkit.errors import ConfigError
from qkit.message import Envelope
from tests.support.rabbitmq import declare, spec, take
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("seconds", "units"), [(0.001, 1), (0.1, 1), (0.10001, 2), (1.0, 10), (60.0, 600), (1e9, None)]
)
def test_the_routing_key_contains_the_rounded_up_delay_in_binary(
    seconds: float, units: int | None
) -> None:
    exchange, key = DelayCascade(Topology(quorum=False, replicas=1)).route("a.b", seconds)
    bits = key.split(".")[:LEVELS]
    found = int("".join(bits), 2)
    assert found == (2**LEVELS - 1 if units is None else units)
    assert exchange == f"qkit.delay.{found.bit_length() - 1:02d}"
    assert ".".join(key.split(".")[LEVELS:]) == "a.b"
    assert found * UNIT_SECONDS >= min(seconds, MAX_DELAY_SECONDS)


def test_routing_keys_of_long_names_are_distinct_and_short_enough() -> None:
    cascade = DelayCascade(Topology(quorum=False, replicas=1))
    keys = {cascade.route(f"{'x' * 254}{letter}", 1.0)[1] for letter in "ab"}
    assert len(keys) == 2
    assert all(len(key) <= 255 for key in keys)


async def lateness(backend: RabbitMQBackend, name: str, count: int, longest: float) -> list[float]:
    """Send messages with random delays; return by how many seconds each was late, sorted."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    await declare(backend, name)
    clock = SystemClock()
    due: dict[str, float] = {}
    envelopes: list[Envelope] = []
    for number in range(count):
        at = clock.time() + rng.uniform(0.05, longest)
        due[str(number)] = at
        envelopes.append(Envelope(str(number), b"x", not_before=at))
    late: list[float] = []
    async with backend.subscribe(spec(name, prefetch=500)) as subscription:
        for start in range(0, count, 500):
            await backend.publish(name, envelopes[start : start + 500])
        async with asyncio.timeout(longest * 1.1 + 30):
            while due:
                for delivery in await subscription.receive(500):
                    late.append(clock.time() - due.pop(delivery.envelope.id))
                    await subscription.ack(delivery)
    return sorted(late)


async def test_messages_with_mixed_delays_are_never_early_and_only_slightly_late(
    backend: RabbitMQBackend, name: str
) -> None:
    late = await lateness(backend, name, 300, 4.0)
    assert late[0] >= -0.002
    print(f"late: p50 {late[150]:.3f} s, max {late[-1]:.3f} s")
    assert late[150] <= 5.0  # generous, for a busy machine


@pytest.mark.torture
async def test_many_messages_with_mixed_delays_are_never_early_and_only_slightly_late(
    backend: RabbitMQBackend, name: str
) -> None:
    late = await lateness(backend, name, 3_000, 20.0)
    print(f"late: p50 {late[1500]:.3f} s, p99 {late[2970]:.3f} s, max {late[-1]:.3f} s")
    assert late[0] >= -0.002
    assert late[2970] <= 1.0


async def test_delayed_messages_are_not_delivered_to_queues_with_similar_names(
    classic: RabbitMQBackend, name: str
) -> None:
    names = [name, f"eu.{name}", f"{name}.eu", f"0.{name}", f"{name}.."]
    for queue in names:
        await declare(classic, queue)
    soon = SystemClock().time() + 0.1
    for queue in names:
        await classic.publish(queue, [Envelope(queue, b"x", not_before=soon)])
    for queue in names:
        async with classic.subscribe(spec(queue)) as subscription:
            (delivery,) = await take(subscription)
            assert delivery.envelope.id == queue
            await subscription.ack(delivery)
        assert (await classic.stats(queue)).depth == 0


async def test_a_delayed_message_to_a_topic_reaches_every_group(
    backend: RabbitMQBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    async with (
        backend.subscribe(spec(name, group="a", broadcast=True)) as one,
        backend.subscribe(spec(name, group="b", broadcast=True)) as two,
    ):
        due = SystemClock().time() + 0.3
        await backend.publish(name, [Envelope("m", b"x", not_before=due)])
        for subscription in (one, two):
            (delivery,) = await take(subscription)
            assert SystemClock().time() >= due - 0.002
            assert delivery.envelope.headers == {}
            await subscription.release(delivery, 0.2)
        for subscription in (one, two):
            (delivery,) = await take(subscription)
            assert delivery.envelope.attempt == 2


async def test_a_message_that_leaves_the_cascade_early_is_delayed_again(
    backend: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay longer than the cascade's maximum of 77 days needs several passes."""
    monkeypatch.setattr("qkit.backends.rabbitmq.backend.MAX_DELAY_SECONDS", 0.2)
    route = DelayCascade.route
    monkeypatch.setattr(
        DelayCascade, "route", lambda self, name, seconds: route(self, name, min(seconds, 0.2))
    )
    await declare(backend, name)
    due = SystemClock().time() + 1.0
    await backend.publish(name, [Envelope("m", b"x", {"h": "1"}, not_before=due)])
    async with backend.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        assert SystemClock().time() >= due - 0.002
        assert (delivery.envelope.attempt, delivery.envelope.headers) == (1, {"h": "1"})


async def test_a_message_that_is_retried_many_times_is_not_dropped(
    backend: RabbitMQBackend, name: str
) -> None:
    """RabbitMQ drops a message with an ``x-death`` header that passes through a cycle of queues."""
    await declare(backend, name)
    await backend.publish(name, [Envelope("m", b"x")])
    async with backend.subscribe(spec(name)) as subscription:
        for attempt in range(1, 8):
            (delivery,) = await take(subscription)
            assert delivery.envelope.attempt == attempt
            await subscription.release(delivery, 0.1)


async def test_an_existing_cascade_can_be_declared_again(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(classic, name)
    began = time.monotonic()
    await classic.publish(name, [Envelope("a", b"x", not_before=SystemClock().time() + 0.01)])
    async with classic.subscribe(spec(name)) as subscription:
        await take(subscription)
        assert time.monotonic() - began < 30
        classic._cascade.ready = False  # as in a new service
        await classic.publish(name, [Envelope("b", b"x", not_before=SystemClock().time() + 0.01)])
        (delivery,) = await take(subscription)
        assert delivery.envelope.id == "b"


async def test_a_cascade_with_other_arguments_raises_an_error_that_names_its_queue(
    rabbitmq_url: str, raw: aiormq.Channel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.backends.rabbitmq.delay.DELAY", f"{name}.delay")
    await raw.queue_declare(f"{name}.delay.02", durable=True)
    backend = RabbitMQBackend(rabbitmq_url)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    for _ in range(3):
        later = SystemClock().time() + 5
        with pytest.raises(ConfigError, match=r"delay\.02' exists with another x-"):
            await backend.publish(name, [Envelope("a", b"x", not_before=later)])
    await backend.aclose()
    for queue in (name, *(f"{name}.delay.{level:02d}" for level in range(LEVELS))):
        await raw.queue_delete(queue)
        await raw.exchange_delete(queue)


async def test_a_passive_declaration_creates_no_cascade(
    rabbitmq_url: str, raw: aiormq.Channel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.backends.rabbitmq.delay.DELAY", f"{name}.none")
    backend = RabbitMQBackend(rabbitmq_url)
    await backend.start()
    await raw.queue_declare(name, durable=True)
    await backend.declare(QueueSpec(name=name, passive=True))
    later = SystemClock().time() + 5
    with pytest.raises(ConfigError, match="passive"):
        await backend.publish(name, [Envelope("a", b"x", not_before=later)])
    await raw.queue_delete(name)
    await backend.aclose()


async def test_a_purge_keeps_delayed_messages_of_other_queues(
    backend: RabbitMQBackend, name: str
) -> None:
    other = f"{name}-other"
    await declare(backend, name)
    await declare(backend, other)
    clock = SystemClock()
    for queue, count in ((name, 3), (other, 4)):
        await backend.publish(
            queue,
            [Envelope(f"{n}", b"x", not_before=clock.time() + 1 + n / 10) for n in range(count)],
        )
    due = clock.time() + 1
    assert await backend.purge(name) == 3
    async with backend.subscribe(spec(other)) as subscription:
        found = await take(subscription, 4)
        assert clock.time() >= due - 0.002
        assert {delivery.envelope.id for delivery in found} == {"0", "1", "2", "3"}
    await eventually(lambda: _empty(backend, name))


async def _empty(backend: RabbitMQBackend, name: str) -> bool:
    return (await backend.stats(name)).depth == 0


async def test_a_queue_declared_by_another_program_receives_delayed_messages(
    classic: RabbitMQBackend, rabbitmq_url: str, raw: aiormq.Channel, name: str
) -> None:
    """With ``declare="passive"``, the queue is not yet bound to the exit of the cascade."""
    await declare(classic, f"{name}-other")
    await classic.publish(f"{name}-other", [Envelope("x", b"", not_before=time.time() + 0.1)])
    await raw.queue_declare(name, durable=True)
    passive = RabbitMQBackend(rabbitmq_url)
    await passive.start()
    try:
        await passive.declare(QueueSpec(name=name, passive=True))
        await passive.publish(name, [Envelope("late", b"", not_before=time.time() + 0.2)])
        async with passive.subscribe(spec(name)) as subscription:
            for attempt in (1, 2):
                (delivery,) = await take(subscription, 1)
                assert (delivery.envelope.id, delivery.envelope.attempt) == ("late", attempt)
                await subscription.release(delivery, 0.2)
    finally:
        await passive.aclose()
        await raw.queue_delete(name)


async def test_a_failed_release_does_not_cause_a_busy_loop(
    classic: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "REQUEUE_DELAY_SECONDS", 0.5)
    await declare(classic, name)
    await classic.publish(name, [Envelope("a", b"")])
    failures = 0

    async def fail(*_: object) -> None:
        nonlocal failures
        failures += 1
        raise ConfigError("no cascade")

    async with classic.subscribe(spec(name)) as subscription:
        monkeypatch.setattr(subscription, "_republish", fail)
        began = time.monotonic()
        for _ in range(3):
            (delivery,) = await take(subscription, 1)
            with pytest.raises(ConfigError):
                await subscription.release(delivery, 1.0)
        assert failures == 3
        assert time.monotonic() - began >= 2 * 0.5
