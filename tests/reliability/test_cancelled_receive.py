"""Cancelled ``receive`` calls: no message is lost, even while a reply is in flight."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from qkit._internal.ids import new_id
from qkit.backend import Backend, Delivery, QueueSpec, Subscription, SubscriptionSpec
from qkit.message import Envelope
from tests.support.deployments import Site, behind_a_network, on, redelivers

QUIET_SECONDS = 1.5  # how long to wait for messages when none are expected


@asynccontextmanager
async def started(backend: Backend) -> AsyncIterator[Backend]:
    await backend.start()
    try:
        yield backend
    finally:
        await backend.aclose()


def subscribe(
    site: Site, backend: Backend, consumer: str
) -> contextlib.AbstractAsyncContextManager[Subscription]:
    return backend.subscribe(
        SubscriptionSpec(queue=site.queue, group="g", consumer=consumer, prefetch=20)
    )


async def publish(site: Site, backend: Backend, count: int = 1) -> list[str]:
    envelopes = [Envelope(new_id(), b"x") for _ in range(count)]
    await backend.publish(site.queue, envelopes)
    return [envelope.id for envelope in envelopes]


async def cancel(receiving: asyncio.Task[list[Delivery]]) -> list[Delivery]:
    """Cancel a receive and return its deliveries, if it had already finished."""
    receiving.cancel()
    try:
        return await receiving
    except asyncio.CancelledError:
        return []


async def acknowledge(subscription: Subscription, deliveries: list[Delivery]) -> list[str]:
    for delivery in deliveries:
        await subscription.ack(delivery)
    return [delivery.envelope.id for delivery in deliveries]


async def take_all(subscription: Subscription, wanted: int) -> list[str]:
    """Receive and ack ``wanted`` messages; with 0, all that arrive within ``QUIET_SECONDS``."""
    found: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(15 if wanted else QUIET_SECONDS):
            while len(found) < wanted or not wanted:
                found += await acknowledge(subscription, await subscription.receive(10))
    return found


async def cancel_at_the_moment_of_arrival(site: Site, rounds: int, seed: int) -> None:
    """Cancel receives while messages arrive, one by one or in bursts; check that none is lost."""
    print(f"{site.deployment} seed {seed}")
    rng = random.Random(seed)
    async with started(site.backend()) as backend:
        await backend.declare(QueueSpec(name=site.queue))
        sent: list[str] = []
        got: list[str] = []
        async with subscribe(site, backend, "first") as subscription:
            for _ in range(rounds):
                receiving = asyncio.create_task(subscription.receive(5))
                await asyncio.sleep(rng.choice([0, 0.01, 0.05]))
                publishing = asyncio.create_task(publish(site, backend, rng.choice([1, 1, 4])))
                await asyncio.sleep(rng.random() * rng.choice([0, 0.001, 0.004]))
                got += await acknowledge(subscription, await cancel(receiving))
                sent += await publishing
            got += await take_all(subscription, len(sent) - len(got))
        # A second consumer receives any message that the first still holds: there must be none.
        async with subscribe(site, backend, "second") as subscription:
            got += await take_all(subscription, 0)
    assert Counter(got) == Counter(sent)


async def cancel_with_the_reply_in_flight(site: Site, rounds: int, seed: int) -> None:
    """Cancel receives while a proxy holds back the reply; check that no message is lost."""
    print(f"{site.deployment} seed {seed}")
    rng = random.Random(seed)
    proxy = site.proxy
    assert proxy is not None
    async with (
        started(site.backend()) as publisher,
        started(site.backend(proxied=True)) as backend,
    ):
        await publisher.declare(QueueSpec(name=site.queue))
        sent: list[str] = []
        got: list[str] = []
        async with subscribe(site, backend, "first") as subscription:
            for _ in range(rounds):
                receiving = asyncio.create_task(subscription.receive(5))
                await asyncio.sleep(rng.choice([0.02, 0.1]))  # until the request is sent
                proxy.hold_replies()
                sent += await publish(site, publisher, rng.choice([1, 1, 4]))
                await asyncio.sleep(0.03)  # until the reply has reached the proxy
                delivered = await cancel(receiving)
                proxy.heal()
                got += await acknowledge(subscription, delivered)
            got += await take_all(subscription, len(sent) - len(got))
        async with subscribe(site, publisher, "second") as subscription:
            got += await take_all(subscription, 0)
    assert Counter(got) == Counter(sent)


async def leave_with_the_reply_in_flight(site: Site, rounds: int, seed: int) -> None:
    """Close subscriptions while a proxy holds back the reply; check that no message is lost."""
    print(f"{site.deployment} seed {seed}")
    proxy = site.proxy
    assert proxy is not None
    async with (
        started(site.backend()) as publisher,
        started(site.backend(proxied=True)) as backend,
    ):
        await publisher.declare(QueueSpec(name=site.queue))
        sent: list[str] = []
        got: list[str] = []
        for turn in range(rounds):
            leaving = asyncio.Event()

            async def subscribe_and_cancel(
                turn: int = turn, leaving: asyncio.Event = leaving
            ) -> None:
                async with subscribe(site, backend, f"consumer-{turn}") as subscription:
                    receiving = asyncio.create_task(subscription.receive(5))
                    await leaving.wait()
                    await cancel(receiving)

            subscriber = asyncio.create_task(subscribe_and_cancel())
            await asyncio.sleep(0.1)
            proxy.hold_replies()
            sent += await publish(site, publisher)
            await asyncio.sleep(0.03)
            leaving.set()
            await asyncio.sleep(0.03)
            proxy.heal()
            await subscriber
        async with subscribe(site, publisher, "second") as subscription:
            got += await take_all(subscription, len(sent) - len(got))
    # No message was acknowledged, so all are redelivered.
    assert Counter(got) == Counter(sent)


SEED = 2**32


@on(redelivers)
async def test_no_message_is_lost_when_receives_are_cancelled_as_messages_arrive(
    site: Site,
) -> None:
    await cancel_at_the_moment_of_arrival(site, 15, random.randrange(SEED))


@on(redelivers, behind_a_network)
async def test_no_message_is_lost_when_receives_are_cancelled_with_the_reply_in_flight(
    site: Site,
) -> None:
    await cancel_with_the_reply_in_flight(site, 5, random.randrange(SEED))


@on(redelivers, behind_a_network)
async def test_no_message_is_lost_when_subscriptions_are_closed_with_the_reply_in_flight(
    site: Site,
) -> None:
    await leave_with_the_reply_in_flight(site, 5, random.randrange(SEED))


@pytest.mark.torture
@pytest.mark.timeout(600)
@on(redelivers)
async def test_no_message_is_lost_when_many_receives_are_cancelled_as_messages_arrive(
    site: Site,
) -> None:
    await cancel_at_the_moment_of_arrival(site, 500, random.randrange(SEED))


@pytest.mark.torture
@pytest.mark.timeout(600)
@on(redelivers, behind_a_network)
async def test_no_message_is_lost_when_fifty_receives_are_cancelled_with_the_reply_in_flight(
    site: Site,
) -> None:
    await cancel_with_the_reply_in_flight(site, 50, random.randrange(SEED))


@pytest.mark.torture
@pytest.mark.timeout(600)
@on(redelivers, behind_a_network)
async def test_no_message_is_lost_when_fifty_subscriptions_are_closed_with_the_reply_in_flight(
    site: Site,
) -> None:
    await leave_with_the_reply_in_flight(site, 50, random.randrange(SEED))
