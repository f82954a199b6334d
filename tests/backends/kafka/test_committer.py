"""Commits of settled offsets: when they are made, and how failures are handled."""

from __future__ import annotations

import asyncio

import pytest

from qkit.backends.kafka import committer as committer_module
from qkit.backends.kafka.committer import OffsetCommitter
from qkit.backends.kafka.driver import Partition, errors
from qkit.backends.kafka.offsets import CommittedOffset, OffsetTracker
from tests.support.waiting import eventually

ORDERS = Partition("orders", 0)


class Coordinator:
    """Group coordinator that records commits or, if ``error`` is set, raises it."""

    def __init__(self) -> None:
        self.commits: list[dict[Partition, CommittedOffset]] = []
        self.error: Exception | None = None

    async def commit(self, offsets: dict[Partition, CommittedOffset]) -> None:
        if self.error is not None:
            raise self.error
        self.commits.append(offsets)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def trackers() -> dict[Partition, OffsetTracker]:
    """Return the tracker of a partition with delivered messages at offsets 0 to 4."""
    tracker = OffsetTracker(0)
    for offset in range(5):
        tracker.read(offset)
    tracker.held = 5
    return {ORDERS: tracker}


@pytest.fixture
def reports() -> list[Exception | None]:
    return []


@pytest.fixture
def committer(
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
) -> OffsetCommitter:
    return make_committer(coordinator, trackers, reports, batch_size=None)


def make_committer(
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
    *,
    batch_size: int | None,
) -> OffsetCommitter:
    stable = asyncio.Event()
    stable.set()
    return OffsetCommitter(
        "orders",
        trackers,
        stable,
        batch_size=batch_size,
        commit=coordinator.commit,
        on_commit=reports.append,
    )


async def test_a_commit_writes_only_offsets_that_have_changed(
    committer: OffsetCommitter,
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
) -> None:
    assert await committer.commit()
    assert coordinator.commits == []
    trackers[ORDERS].settle(0)
    assert await committer.commit()
    assert await committer.commit()
    assert coordinator.commits == [{ORDERS: CommittedOffset(1)}]
    assert trackers[ORDERS].saved == CommittedOffset(1)
    assert reports == [None]


async def test_a_failed_commit_is_reported_and_retried(
    committer: OffsetCommitter,
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
) -> None:
    coordinator.error = errors.RebalanceInProgressError()
    trackers[ORDERS].settle(0)
    assert not await committer.commit()
    assert reports == [coordinator.error]
    assert trackers[ORDERS].saved is None
    coordinator.error = None
    assert await committer.commit()
    assert coordinator.commits == [{ORDERS: CommittedOffset(1)}]
    assert reports[-1] is None


async def test_a_partition_lost_during_a_commit_is_not_recorded_as_saved(
    committer: OffsetCommitter,
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
) -> None:
    tracker = trackers[ORDERS]
    tracker.settle(0)
    commit = coordinator.commit

    async def lose_partition(offsets: dict[Partition, CommittedOffset]) -> None:
        await commit(offsets)
        del trackers[ORDERS]

    committer._write = lose_partition
    assert await committer.commit()
    assert tracker.saved is None


async def test_a_closed_committer_makes_no_commit(
    committer: OffsetCommitter, coordinator: Coordinator, trackers: dict[Partition, OffsetTracker]
) -> None:
    committer.close()
    trackers[ORDERS].settle(0)
    assert await committer.commit()
    assert coordinator.commits == []


async def test_a_settled_message_is_committed_in_the_background(
    committer: OffsetCommitter, coordinator: Coordinator, trackers: dict[Partition, OffsetTracker]
) -> None:
    running = asyncio.create_task(committer.run())
    trackers[ORDERS].settle(0)
    committer.settled()
    await eventually(lambda: coordinator.commits == [{ORDERS: CommittedOffset(1)}])
    running.cancel()


async def test_a_batch_is_committed_when_it_is_complete(
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
) -> None:
    committer = make_committer(coordinator, trackers, reports, batch_size=3)
    running = asyncio.create_task(committer.run())
    for offset in range(3):
        trackers[ORDERS].settle(offset)
        trackers[ORDERS].held -= 1
        committer.settled()
    await eventually(lambda: coordinator.commits)
    assert coordinator.commits == [{ORDERS: CommittedOffset(3)}]
    running.cancel()
    committer.close()


async def test_an_incomplete_batch_is_committed_after_a_timeout(
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committer_module, "BATCH_COMMIT_SECONDS", 0.01)
    committer = make_committer(coordinator, trackers, reports, batch_size=3)
    running = asyncio.create_task(committer.run())
    trackers[ORDERS].settle(0)
    trackers[ORDERS].held -= 1
    committer.settled()
    assert not committer._requested.is_set()
    await eventually(lambda: coordinator.commits == [{ORDERS: CommittedOffset(1)}])
    running.cancel()
    committer.close()


async def test_an_incomplete_batch_is_committed_when_no_delivery_remains(
    coordinator: Coordinator,
    trackers: dict[Partition, OffsetTracker],
    reports: list[Exception | None],
) -> None:
    committer = make_committer(coordinator, trackers, reports, batch_size=3)
    trackers[ORDERS].settle(0)
    trackers[ORDERS].held = 0
    committer.settled()
    assert committer._requested.is_set()
