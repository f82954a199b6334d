"""Group membership: new groups, unexpected errors in a rebalance, and lost deliveries."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from qkit._internal.ids import new_id
from qkit.backend import Delivery, LossReporting, QueueSpec
from qkit.backends.kafka import driver, group
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


def keyed_messages(prefix: str) -> list[Envelope]:
    """Return messages with random keys, enough to reach each of four partitions."""
    return [Envelope(f"{prefix} {number}", b"", key=new_id()) for number in range(40)]


# New groups of a topic


async def test_members_of_a_new_group_that_join_together_all_start_at_the_end(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one member commits, the other partitions must not look like partitions added later."""
    await backend.declare(QueueSpec(name=name, broadcast=True))
    await backend.publish(name, keyed_messages("old"))
    take_over = GroupMembership._take_over

    async def take_half(membership: GroupMembership, partitions: set[Any]) -> None:
        await take_over(
            membership, {partition for partition in partitions if partition.partition % 2}
        )

    with monkeypatch.context() as patch:
        patch.setattr(GroupMembership, "_take_over", take_half)
        async with backend.subscribe(spec(name, broadcast=True)):
            pass
    sent = keyed_messages("new")
    async with backend.subscribe(spec(name, broadcast=True)) as second:
        await backend.publish(name, sent)
        got: set[str] = set()
        async with asyncio.timeout(60):
            while len(got) < len(sent):
                got |= {delivery.envelope.id for delivery in await second.receive(100)}
    assert got == {envelope.id for envelope in sent}


async def test_an_existing_group_continues_at_its_committed_offsets(
    backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    async with backend.subscribe(spec(name, broadcast=True)):
        pass
    sent = keyed_messages("without members")
    await backend.publish(name, sent)
    async with backend.subscribe(spec(name, broadcast=True)) as member:
        # Another joining member must not change the commits.
        await member.membership._initialize_group()
        got: set[str] = set()
        async with asyncio.timeout(60):
            while len(got) < len(sent):
                got |= {delivery.envelope.id for delivery in await member.receive(100)}


async def test_the_commits_of_a_group_with_members_are_not_overwritten(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    async with backend.subscribe(spec(name, broadcast=True)) as member:
        before = await backend._cluster.committed(member.group, [name])
        await backend.publish(name, keyed_messages("new"))

        async def no_commits(*arguments: object) -> dict[Any, Any]:
            return {}  # as in a request just before the member joined

        monkeypatch.setattr(backend._cluster, "committed_of", no_commits)
        await member.membership._initialize_group()
        monkeypatch.undo()
        assert await backend._cluster.committed(member.group, [name]) == before
        assert len(before) == 4


# Unexpected errors


async def fail(*arguments: object) -> None:
    raise KeyError("unexpected")


async def test_an_error_in_the_first_rebalance_fails_the_subscription_immediately(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would only log the error, and the consumer would wait forever."""

    monkeypatch.setattr(GroupMembership, "_take_over", fail)
    await backend.declare(QueueSpec(name=name))
    async with asyncio.timeout(60):
        with pytest.raises(SubscriptionLost, match="unexpected"):
            async with backend.subscribe(spec(name)):
                pass


async def test_an_error_in_a_later_rebalance_breaks_the_subscription(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        monkeypatch.setattr(subscription.membership, "_take_over", fail)
        driver.rejoin(subscription.membership._consumer)
        await eventually(lambda: subscription.membership.broken)
        with pytest.raises(SubscriptionLost, match="unexpected"):
            await subscription.receive(1)


async def test_an_error_at_the_start_of_a_rebalance_breaks_the_subscription(
    backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        with monkeypatch.context() as patch:
            patch.setattr(subscription.membership._committer, "commit", fail)
            await subscription.membership.revoked()
        with pytest.raises(SubscriptionLost, match="unexpected"):
            await subscription.receive(1)


# Lost deliveries


async def test_each_lost_delivery_is_reported_once(backend: KafkaBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, keyed_messages("message"))
    async with backend.subscribe(spec(name)) as subscription:
        assert isinstance(subscription, LossReporting)
        reported: list[Delivery] = []
        subscription.on_lost(reported.extend)
        held: list[Delivery] = []
        async with asyncio.timeout(60):
            while len(held) < 40:
                held += await subscription.receive(100)
        first = driver.Partition(name, 0)
        of_first = [delivery for delivery in held if delivery.receipt.partition == first]  # type: ignore[attr-defined]  # the type of a receipt is private to the backend
        await subscription.ack(of_first[0])
        kept = set(subscription.membership.trackers) - {first}
        await subscription.membership._take_over(kept)
        assert reported == of_first[1:]
        subscription.membership.fail(SubscriptionLost("broken"))
        assert len(reported) == 39
        assert {*reported, of_first[0]} == set(held)


# Idle consumers


async def test_a_consumer_without_a_partition_is_told_once_to_add_partitions(
    kafka_url: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [item.getMessage() for item in caplog.records if item.name == "qkit"]

    caplog.set_level(logging.WARNING, "qkit")
    monkeypatch.setattr(group, "TOPIC_CHECK_INTERVAL_SECONDS", 0.1)
    backend = KafkaBackend(kafka_url, partitions=1, heartbeat=0.2)
    await backend.start()
    try:
        await backend.declare(QueueSpec(name=name))
        async with backend.subscribe(spec(name)):
            await asyncio.sleep(0.5)
            assert warnings() == []
            async with backend.subscribe(spec(name)):
                await eventually(warnings)
                await asyncio.sleep(0.5)
    finally:
        await backend.aclose()
    (text,) = warnings()
    assert f"the topic has 1 partitions for 2 consumers of the group {name}" in text
    assert f"--topic {name} --partitions 2" in text
