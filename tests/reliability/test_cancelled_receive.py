"""A ``receive`` that is cancelled while its answer is on the way loses nothing."""

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
from tests.support.carriers import Site, behind_a_network, on, redelivers

QUIET = 1.5  # seconds after which nothing more can be on its way


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
    """Cancel a receive; what it brought if it was done before."""
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
    """What is left: at least so many, or whatever comes while it is quiet."""
    found: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(15 if wanted else QUIET):
            while len(found) < wanted or not wanted:
                found += await acknowledge(subscription, await subscription.receive(10))
    return found


async def cancel_at_the_moment_of_arrival(site: Site, rounds: int, seed: int) -> None:
    """Messages arrive while the receive for them is cancelled, by themselves or in bursts."""
    print(f"{site.carrier} seed {seed}")
    dice = random.Random(seed)
    async with started(site.backend()) as backend:
        await backend.declare(QueueSpec(name=site.queue))
        sent: list[str] = []
        got: list[str] = []
        async with subscribe(site, backend, "impatient") as subscription:
            for _ in range(rounds):
                receiving = asyncio.create_task(subscription.receive(5))
                await asyncio.sleep(dice.choice([0, 0.01, 0.05]))
                publishing = asyncio.create_task(publish(site, backend, dice.choice([1, 1, 4])))
                await asyncio.sleep(dice.random() * dice.choice([0, 0.001, 0.004]))
                got += await acknowledge(subscription, await cancel(receiving))
                sent += await publishing
            got += await take_all(subscription, len(sent) - len(got))
        # Whoever comes later must find nothing: neither forgotten by the first, nor kept for it.
        async with subscribe(site, backend, "patient") as subscription:
            got += await take_all(subscription, 0)
    assert Counter(got) == Counter(sent)


async def cancel_with_the_reply_in_flight(site: Site, rounds: int, seed: int) -> None:
    """The server has answered, the answer is held back, and the receive is cancelled."""
    print(f"{site.carrier} seed {seed}")
    dice = random.Random(seed)
    proxy = site.proxy
    assert proxy is not None
    async with (
        started(site.backend()) as publisher,
        started(site.backend(proxied=True)) as backend,
    ):
        await publisher.declare(QueueSpec(name=site.queue))
        sent: list[str] = []
        got: list[str] = []
        async with subscribe(site, backend, "impatient") as subscription:
            for _ in range(rounds):
                receiving = asyncio.create_task(subscription.receive(5))
                await asyncio.sleep(dice.choice([0.02, 0.1]))  # it asks, or is parked
                proxy.hold_replies()
                sent += await publish(site, publisher, dice.choice([1, 1, 4]))
                await asyncio.sleep(0.03)  # the server answers into the proxy
                brought = await cancel(receiving)
                proxy.heal()
                got += await acknowledge(subscription, brought)
            got += await take_all(subscription, len(sent) - len(got))
        async with subscribe(site, publisher, "patient") as subscription:
            got += await take_all(subscription, 0)
    assert Counter(got) == Counter(sent)


async def leave_with_the_reply_in_flight(site: Site, rounds: int, seed: int) -> None:
    """The same, and the subscription itself is left while the answer is on its way."""
    print(f"{site.carrier} seed {seed}")
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

            async def come_and_go(turn: int = turn, leaving: asyncio.Event = leaving) -> None:
                async with subscribe(site, backend, f"passing-{turn}") as subscription:
                    receiving = asyncio.create_task(subscription.receive(5))
                    await leaving.wait()
                    await cancel(receiving)

            passing = asyncio.create_task(come_and_go())
            await asyncio.sleep(0.1)
            proxy.hold_replies()
            sent += await publish(site, publisher)
            await asyncio.sleep(0.03)
            leaving.set()
            await asyncio.sleep(0.03)
            proxy.heal()
            await passing
        async with subscribe(site, publisher, "patient") as subscription:
            got += await take_all(subscription, len(sent) - len(got))
    # Nobody acknowledged those that were on their way: they come again, and none is missing.
    assert Counter(got) == Counter(sent)


SEED = 2**32


@on(redelivers)
async def test_five_receives_cancelled_as_messages_arrive(site: Site) -> None:
    await cancel_at_the_moment_of_arrival(site, 15, random.randrange(SEED))


@on(redelivers, behind_a_network)
async def test_five_receives_cancelled_with_the_reply_in_flight(site: Site) -> None:
    await cancel_with_the_reply_in_flight(site, 5, random.randrange(SEED))


@on(redelivers, behind_a_network)
async def test_five_subscriptions_left_with_the_reply_in_flight(site: Site) -> None:
    await leave_with_the_reply_in_flight(site, 5, random.randrange(SEED))


@pytest.mark.torture
@pytest.mark.timeout(600)
@on(redelivers)
async def test_many_receives_cancelled_as_messages_arrive(site: Site) -> None:
    await cancel_at_the_moment_of_arrival(site, 500, random.randrange(SEED))


@pytest.mark.torture
@pytest.mark.timeout(600)
@on(redelivers, behind_a_network)
async def test_fifty_receives_cancelled_with_the_reply_in_flight(site: Site) -> None:
    await cancel_with_the_reply_in_flight(site, 50, random.randrange(SEED))


@pytest.mark.torture
@pytest.mark.timeout(600)
@on(redelivers, behind_a_network)
async def test_fifty_subscriptions_left_with_the_reply_in_flight(site: Site) -> None:
    await leave_with_the_reply_in_flight(site, 50, random.randrange(SEED))
