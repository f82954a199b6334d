"""A consumer's place in its group when something unforeseen happens in a rebalance."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from qkit._internal.ids import new_id
from qkit.backend import Delivery, LossReporting, QueueSpec
from qkit.backends.kafka import driver
from qkit.backends.kafka.backend import KafkaBackend
from qkit.backends.kafka.group import GroupMembership
from qkit.errors import SubscriptionLost
from qkit.message import Envelope
from tests.support.kafka import spec
from tests.support.waiting import eventually


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def backend(kafka_url: str) -> AsyncIterator[KafkaBackend]:
    backend = KafkaBackend(kafka_url, partitions=4, heartbeat=0.2)
    await backend.start()
    yield backend
    await backend.aclose()


def everywhere(prefix: str) -> list[Envelope]:
    """So many, with keys, that each of four partitions has some."""
    return [Envelope(f"{prefix} {number}", b"", key=new_id()) for number in range(40)]


# A new group of a topic


async def test_members_of_a_new_group_that_join_together_all_begin_at_the_end(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first has marked of its own share must not make the others' look older."""
    await backend.declare(QueueSpec(name=name, broadcast=True))
    await backend.publish(name, everywhere("old"))
    take_over = GroupMembership._take_over

    async def share(membership: GroupMembership, partitions: set[Any]) -> None:
        await take_over(
            membership, {partition for partition in partitions if partition.partition % 2}
        )

    with monkeypatch.context() as patch:
        patch.setattr(GroupMembership, "_take_over", share)
        async with backend.subscribe(spec(name, broadcast=True)):
            pass
    sent = everywhere("new")
    async with backend.subscribe(spec(name, broadcast=True)) as second:
        await backend.publish(name, sent)
        got: set[str] = set()
        async with asyncio.timeout(60):
            while len(got) < len(sent):
                got |= {delivery.envelope.id for delivery in await second.receive(100)}
    assert got == {envelope.id for envelope in sent}


async def test_a_group_that_exists_goes_on_where_it_was(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    async with backend.subscribe(spec(name, broadcast=True)):
        pass
    sent = everywhere("while it was away")
    await backend.publish(name, sent)
    async with backend.subscribe(spec(name, broadcast=True)) as again:
        # Another that comes now must not move the marks of those who are there.
        await again.membership._found()
        got: set[str] = set()
        async with asyncio.timeout(60):
            while len(got) < len(sent):
                got |= {delivery.envelope.id for delivery in await again.receive(100)}


async def test_a_group_with_members_is_not_marked_from_outside(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    async with backend.subscribe(spec(name, broadcast=True)) as member:
        before = await backend._cluster.committed(member.group, [name])
        await backend.publish(name, everywhere("new"))

        async def nothing(*arguments: object) -> dict[Any, Any]:
            return {}  # it looked just before the member began

        monkeypatch.setattr(backend._cluster, "committed_of", nothing)
        await member.membership._found()
        monkeypatch.undo()
        assert await backend._cluster.committed(member.group, [name]) == before
        assert len(before) == 4


# What nobody foresaw


async def stumble(*arguments: object) -> None:
    raise KeyError("nobody foresaw this")


async def test_an_accident_in_the_first_rebalance_is_told_at_once(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would log it and go on, and the consumer would wait for ever."""

    monkeypatch.setattr(GroupMembership, "_take_over", stumble)
    await backend.declare(QueueSpec(name=name))
    async with asyncio.timeout(60):
        with pytest.raises(SubscriptionLost, match="nobody foresaw this"):
            async with backend.subscribe(spec(name)):
                pass


async def test_an_accident_in_a_later_rebalance_breaks_the_subscription(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        monkeypatch.setattr(subscription.membership, "_take_over", stumble)
        driver.rejoin(subscription.membership._consumer)
        await eventually(lambda: subscription.membership.broken)
        with pytest.raises(SubscriptionLost, match="nobody foresaw this"):
            await subscription.receive(1)


async def test_an_accident_at_the_beginning_of_a_rebalance_breaks_the_subscription(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        with monkeypatch.context() as patch:
            patch.setattr(subscription.membership, "_commit", stumble)
            await subscription.membership.revoked()
        with pytest.raises(SubscriptionLost, match="nobody foresaw this"):
            await subscription.receive(1)


# What is lost


async def test_every_loss_of_what_is_held_is_reported_once(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, everywhere("here"))
    async with backend.subscribe(spec(name)) as subscription:
        assert isinstance(subscription, LossReporting)
        told: list[Delivery] = []
        subscription.on_lost(told.extend)
        held: list[Delivery] = []
        async with asyncio.timeout(60):
            while len(held) < 40:
                held += await subscription.receive(100)
        one = driver.Partition(name, 0)
        of_one = [delivery for delivery in held if delivery.receipt.partition == one]  # type: ignore[attr-defined]  # a receipt is the backend's
        await subscription.ack(of_one[0])
        stays = set(subscription.membership.trackers) - {one}
        await subscription.membership._take_over(stays)
        assert told == of_one[1:]
        subscription.membership.fail(SubscriptionLost("broken"))
        assert len(told) == 39
        assert {*told, of_one[0]} == set(held)
