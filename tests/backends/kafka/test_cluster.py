"""Admin requests: temporary errors are retried, and invalidated topics are looked up again."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from qkit.backends.kafka.cluster import Cluster
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import LATEST, errors
from qkit.errors import BackendUnavailable, QueueNotFound


@pytest_asyncio.fixture
async def cluster(kafka_url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(ConnectionParameters(kafka_url, timeout=10.0))
    await cluster.connect()
    yield cluster
    await cluster.aclose()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("list_consumer_groups", lambda cluster: cluster.groups()),
        ("describe_consumer_groups", lambda cluster: cluster.members("no-such-group")),
        ("find_coordinator", lambda cluster: cluster.delete_groups(["no-such-group"])),
    ],
)
async def test_a_request_is_retried_while_groups_are_loading(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str, call: Any
) -> None:
    real = getattr(cluster._admin, method)
    failures = [errors.GroupLoadInProgressError(), errors.GroupCoordinatorNotAvailableError()]

    async def loading(*arguments: object) -> object:
        if failures:
            raise failures.pop()
        return await real(*arguments)

    monkeypatch.setattr(cluster._admin, method, loading)
    await call(cluster)
    assert not failures


async def test_a_request_that_keeps_failing_raises_backend_unavailable(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loading() -> object:
        raise errors.GroupLoadInProgressError

    monkeypatch.setattr(cluster._admin, "list_consumer_groups", loading)
    monkeypatch.setattr(cluster._parameters, "timeout", 0.1)
    with pytest.raises(BackendUnavailable):
        await cluster.groups()


async def test_offsets_of_a_missing_topic_raise_queue_not_found(cluster: Cluster) -> None:
    with pytest.raises(QueueNotFound):
        await cluster.offsets(f"k-{uuid.uuid4().hex[:10]}", LATEST)


async def test_an_invalidated_topic_keeps_its_last_known_partitions_until_its_next_use(
    cluster: Cluster,
) -> None:
    topic = f"k-{uuid.uuid4().hex[:10]}"
    assert topic not in cluster.last_known_partitions
    await cluster.create(topic, 3, 1, {})
    assert await cluster.partitions(topic, "publish") == 3
    cluster.last_known_partitions[topic] = 2
    assert await cluster.partitions(topic, "publish") == 2  # cached
    cluster.invalidate(topic)
    assert cluster.last_known_partitions[topic] == 2
    assert await cluster.partitions(topic, "publish") == 3
    await cluster.delete([topic])
    assert topic not in cluster.last_known_partitions


async def test_a_topic_exists_while_one_of_its_partitions_has_no_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"k-{uuid.uuid4().hex[:10]}"
    await cluster.create(topic, 3, 1, {})
    real = cluster._exchange

    async def without_leader(request: Any, node: int | None = None) -> Any:
        answer = await real(request, node)
        for _, name, _, partitions in getattr(answer, "topics", ()) if node is None else ():
            if name == topic:
                error, number, _, *others = partitions[0]
                partitions[0] = (error, number, -1, *others)
        return answer

    monkeypatch.setattr(cluster, "_exchange", without_leader)
    assert await cluster.count_partitions(topic) == 3
    monkeypatch.setattr(cluster._parameters, "timeout", 0.2)
    with pytest.raises(BackendUnavailable):
        await cluster.offsets(topic, LATEST)
    monkeypatch.undo()
    await cluster.delete([topic])
