"""Lease renewal: after every third of a lease, in one call if the backend supports it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from qkit.backend import Delivery, ExtendMany
from qkit.consuming.job import Job
from qkit.consuming.lease_renewal import LeaseRenewal
from qkit.errors import AckDeadlineExceeded, BackendUnavailable, QueueError
from qkit.message import Envelope
from qkit.testing import VirtualClock

LEASE = 30.0


class SingleExtend:
    """A subscription that extends one lease per call and fails for some messages."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.errors: dict[str, QueueError] = {}

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        assert seconds == LEASE
        self.calls.append((delivery.envelope.id,))
        if error := self.errors.get(delivery.envelope.id):
            raise error


class BatchExtend(SingleExtend):
    """A subscription that also extends many leases in one call."""

    broken: QueueError | None = None

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        assert seconds == LEASE
        ids = sorted(delivery.envelope.id for delivery in deliveries)
        self.calls.append(tuple(ids))
        if self.broken is not None:
            raise self.broken
        return [self.errors.get(delivery.envelope.id) for delivery in deliveries]


@asynccontextmanager
async def renewing(
    subscription: SingleExtend, ids: Sequence[str]
) -> AsyncIterator[tuple[dict[str, Job], set[Job], list[Job]]]:
    jobs = {id: Job(Delivery(Envelope(id, b"{}"), "orders", id)) for id in ids}
    held, lost = set(jobs.values()), list[Job]()
    renewal = LeaseRenewal(subscription, LEASE, held, lost.append, "orders")  # type: ignore[arg-type]  # has only extend()
    task = asyncio.create_task(renewal.run())
    renewal.schedule()
    yield jobs, held, lost
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(
    ("subscription", "calls"), [(SingleExtend, [("a",), ("b",)]), (BatchExtend, [("a", "b")])]
)
async def test_every_lease_is_extended_after_each_third_of_its_length(
    clock: VirtualClock, subscription: type[SingleExtend], calls: list[tuple[str, ...]]
) -> None:
    live = subscription()
    assert isinstance(live, ExtendMany) is (subscription is BatchExtend)
    async with renewing(live, ["a", "b"]):
        for _ in range(3):
            live.calls.clear()
            await clock.advance(LEASE / 3)
            assert sorted(live.calls) == calls


@pytest.mark.parametrize("subscription", [SingleExtend, BatchExtend])
async def test_an_expired_lease_is_reported(
    clock: VirtualClock, subscription: type[SingleExtend]
) -> None:
    live = subscription()
    live.errors["b"] = AckDeadlineExceeded("too late")
    async with renewing(live, ["a", "b"]) as (jobs, _, lost):
        await clock.advance(LEASE / 3)
        assert lost == [jobs["b"]]


@pytest.mark.parametrize("subscription", [SingleExtend, BatchExtend])
async def test_a_job_that_was_settled_before_the_renewal_is_not_reported_as_lost(
    clock: VirtualClock, subscription: type[SingleExtend]
) -> None:
    live = subscription()
    live.errors["a"] = AckDeadlineExceeded("too late")
    async with renewing(live, ["a"]) as (jobs, held, lost):
        await clock.advance(LEASE / 3 - 0.001)
        held.discard(jobs["a"])
        await clock.advance(0.002)
        assert lost == []


async def test_a_connection_failure_is_logged_once_and_retried(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    live = BatchExtend()
    live.broken = BackendUnavailable("the connection is gone")
    async with renewing(live, ["a", "b", "c"]) as (_, _, lost):
        await clock.advance(LEASE / 3)
        assert len(caplog.records) == 1
        live.broken = None
        await clock.advance(LEASE / 3)
        assert len(live.calls) == 2
        assert lost == []


async def test_an_idle_consumer_renews_no_lease(clock: VirtualClock) -> None:
    live = BatchExtend()
    async with renewing(live, ["a"]) as (_, held, _):
        held.clear()
        await clock.advance(LEASE)
        assert len(live.calls) <= 1
        live.calls.clear()
        await clock.advance(10 * LEASE)
        assert live.calls == []
