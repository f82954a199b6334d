"""The cluster as an administrator sees it: what it cannot tell yet is asked for again."""

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
    ("method", "ask"),
    [
        ("list_consumer_groups", lambda cluster: cluster.groups()),
        ("describe_consumer_groups", lambda cluster: cluster.members("nobody")),
        ("find_coordinator", lambda cluster: cluster.delete_groups(["nobody"])),
    ],
)
async def test_while_groups_are_loaded_it_asks_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str, ask: Any
) -> None:
    real = getattr(cluster._admin, method)
    refusals = [errors.GroupLoadInProgressError(), errors.GroupCoordinatorNotAvailableError()]

    async def loading(*arguments: object) -> object:
        if refusals:
            raise refusals.pop()
        return await real(*arguments)

    monkeypatch.setattr(cluster._admin, method, loading)
    await ask(cluster)
    assert not refusals


async def test_what_is_never_ready_is_unavailable_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loading() -> object:
        raise errors.GroupLoadInProgressError

    monkeypatch.setattr(cluster._admin, "list_consumer_groups", loading)
    monkeypatch.setattr(cluster._parameters, "timeout", 0.1)
    with pytest.raises(BackendUnavailable):
        await cluster.groups()


async def test_a_topic_that_is_not_there_has_no_offsets(cluster: Cluster) -> None:
    with pytest.raises(QueueNotFound):
        await cluster.offsets(f"k-{uuid.uuid4().hex[:10]}", LATEST)
