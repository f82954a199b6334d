"""Held leases are extended three times in their length, together where the backend can."""

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


class OneByOne:
    """A subscription that extends leases one by one, with an error for some messages."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.errors: dict[str, QueueError] = {}

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        assert seconds == LEASE
        self.calls.append((delivery.envelope.id,))
        if error := self.errors.get(delivery.envelope.id):
            raise error


class Together(OneByOne):
    """The same, which also extends many at once."""

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
    subscription: OneByOne, ids: Sequence[str]
) -> AsyncIterator[tuple[dict[str, Job], set[Job], list[Job]]]:
    jobs = {id: Job(Delivery(Envelope(id, b"{}"), "orders", id)) for id in ids}
    held, lost = set(jobs.values()), list[Job]()
    renewal = LeaseRenewal(subscription, LEASE, held, lost.append, "orders")  # type: ignore[arg-type]  # extends only
    task = asyncio.create_task(renewal.run())
    renewal.schedule()
    yield jobs, held, lost
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(
    ("subscription", "calls"), [(OneByOne, [("a",), ("b",)]), (Together, [("a", "b")])]
)
async def test_every_lease_is_extended_three_times_in_its_length(
    clock: VirtualClock, subscription: type[OneByOne], calls: list[tuple[str, ...]]
) -> None:
    live = subscription()
    assert isinstance(live, ExtendMany) is (subscription is Together)
    async with renewing(live, ["a", "b"]):
        for _ in range(3):
            live.calls.clear()
            await clock.advance(LEASE / 3)
            assert sorted(live.calls) == calls


@pytest.mark.parametrize("subscription", [OneByOne, Together])
async def test_a_lease_that_has_ended_is_reported(
    clock: VirtualClock, subscription: type[OneByOne]
) -> None:
    live = subscription()
    live.errors["b"] = AckDeadlineExceeded("too late")
    async with renewing(live, ["a", "b"]) as (jobs, _, lost):
        await clock.advance(LEASE / 3)
        assert lost == [jobs["b"]]


@pytest.mark.parametrize("subscription", [OneByOne, Together])
async def test_a_job_that_was_settled_meanwhile_is_not_lost(
    clock: VirtualClock, subscription: type[OneByOne]
) -> None:
    live = subscription()
    live.errors["a"] = AckDeadlineExceeded("too late")
    async with renewing(live, ["a"]) as (jobs, held, lost):
        await clock.advance(LEASE / 3 - 0.001)
        held.discard(jobs["a"])
        await clock.advance(0.002)
        assert lost == []


async def test_a_broken_connection_is_logged_once_and_tried_again(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    live = Together()
    live.broken = BackendUnavailable("the connection is gone")
    async with renewing(live, ["a", "b", "c"]) as (_, _, lost):
        await clock.advance(LEASE / 3)
        assert len(caplog.records) == 1
        live.broken = None
        await clock.advance(LEASE / 3)
        assert len(live.calls) == 2
        assert lost == []


async def test_an_idle_consumer_has_no_timer(clock: VirtualClock) -> None:
    live = Together()
    async with renewing(live, ["a"]) as (_, held, _):
        held.clear()
        await clock.advance(LEASE)
        assert len(live.calls) <= 1
        live.calls.clear()
        await clock.advance(10 * LEASE)
        assert live.calls == []
