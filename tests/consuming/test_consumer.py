"""Consumers: fetching, concurrency, order, leases, outages, lost subscriptions and shutdown."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import random
import threading
from collections import Counter
from itertools import pairwise

import pytest

from qkit import Channel, Message, Reject, RetrySettings, Unavailable, consume
from qkit.backend import Support
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    ConfigError,
    MessageNotFound,
    QueueError,
    QueueFull,
    SubscriptionLost,
)
from qkit.message import Envelope
from qkit.observability.events import ShutDown
from qkit.testing.clock import VirtualClock
from tests.support.backends import ScriptedBackend, can
from tests.support.services import failures, make_service, only_letter, until


class Work:
    """A handler that runs for ``seconds`` and records its calls."""

    def __init__(self, clock: VirtualClock, seconds: float = 1.0) -> None:
        self.clock = clock
        self.seconds = seconds
        self.origin = clock.monotonic()
        self.began: list[tuple[object, float]] = []
        self.ended: list[object] = []
        self.cancelled: list[object] = []
        self.attempts: list[int] = []
        self.running = 0
        self.most = 0

    async def __call__(self, body: object, message: Message) -> None:
        self.began.append((body, self.clock.monotonic() - self.origin))
        self.attempts.append(message.attempt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(body)
            raise
        finally:
            self.running -= 1
        self.ended.append(body)

    @property
    def bodies(self) -> list[object]:
        return [body for body, _ in self.began]

    @property
    def times(self) -> list[float]:
        return [time for _, time in self.began]


def envelopes(count: int, key: str | None = None) -> list[Envelope]:
    return [Envelope(f"m{number}", b"%d" % number, key=key) for number in range(count)]


# -- fetching ----------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 10])
async def test_concurrency_is_the_number_of_handlers_that_run_at_once(clock, concurrency):
    work = Work(clock)
    async with make_service(
        consume("orders", concurrency=concurrency)(work), clock=clock
    ) as service:
        await service.send_many("orders", range(30))
        await clock.advance(30 / concurrency + 1)
    assert work.most == concurrency
    assert work.bodies == list(range(30))
    assert work.times == [number // concurrency for number in range(30)]


async def test_a_free_slot_does_not_wait_for_a_busy_one(clock):
    work = Work(clock, 1000)
    async with make_service(consume("orders", concurrency=10)(work), clock=clock) as service:
        await service.send_many("orders", range(6))
        await clock.advance(1)
        await service.send_many("orders", range(6, 10))
        await clock.advance(1)
        assert work.bodies == list(range(10))
        await service.shutdown(0)


@pytest.mark.parametrize("prefetch", [1, 2, 7])
async def test_prefetch_is_never_exceeded(clock, prefetch):
    work = Work(clock)
    backend = ScriptedBackend()
    async with make_service(
        consume("orders", prefetch=prefetch)(work), clock=clock, backend=backend
    ):
        backend.put("orders", *envelopes(20))
        await clock.advance(30)
    assert backend.most_held == prefetch
    assert work.ended == list(range(20))


async def test_handlers_that_never_wait_do_not_block_the_loop(clock):
    turns: list[int] = []
    handled = 0

    @consume("orders")
    async def handle(body: object) -> None:
        nonlocal handled
        handled += 1

    async with make_service(handle, clock=clock) as service:
        service.pause("orders")
        await service.send_many("orders", range(1_000))
        service.resume("orders")
        while handled < 1_000:
            turns.append(handled)
            await asyncio.sleep(0)
    assert max(later - before for before, later in pairwise(turns)) <= 100


async def test_a_message_for_an_idle_worker_takes_one_loop_iteration(clock):
    handled: list[object] = []

    @consume("orders")
    async def handle(body: object) -> None:
        handled.append(body)

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", "first")  # starts the lease renewal
        await clock.advance(1)
        await service.send("orders", "next")
        await asyncio.sleep(0)
        assert handled == ["first", "next"]


async def test_counters_and_health_follow_a_message(clock):
    work = Work(clock, 5)
    async with make_service(consume("orders", group="billing")(work), clock=clock) as service:
        began = clock.time()
        await clock.advance(1)
        await service.send_many("orders", [1, 2])
        await clock.advance(1)
        metrics = service.metrics().channels["orders"]
        assert (metrics.messages_received, metrics.in_flight) == (2, 1)
        (health,) = service.health_check().consumers
        assert (health.channel, health.group, health.state) == ("orders", "billing", "consuming")
        assert health.in_flight == 2  # a buffered message counts too
        assert health.last_settle_at is None
        await clock.advance(20)
        (health,) = service.health_check().consumers
        assert health.in_flight == 0
        assert health.last_settle_at == began + 11
        assert health.last_poll_at is not None
        assert health.last_poll_at >= began + 1
        assert service.ready
    assert service.metrics().in_flight == 0


async def test_a_foreign_message_is_consumed(clock):
    work = Work(clock)
    backend = ScriptedBackend()
    async with make_service(consume("orders")(work), clock=clock, backend=backend):
        backend.put("orders", Envelope("foreign", b'{"id": 1}'))
        await clock.advance(2)
    assert work.bodies == [{"id": 1}]
    assert backend.of("ack") == [("ack", "foreign")]


# -- pause and resume --------------------------------------------------------------------------


async def test_pause_starts_no_handler_and_releases_buffered_messages_without_counting_an_attempt(
    clock,
):
    work = Work(clock, 5)
    async with make_service(consume("orders")(work), clock=clock) as service:
        await service.send_many("orders", range(4))
        await clock.advance(1)
        service.pause("orders")
        assert service.health_check().consumers[0].state == "paused"
        assert service.ready  # a paused consumer is healthy
        await clock.advance(100)
        assert work.bodies == work.ended == [0]  # the running handler finished
        stats = await service.stats("orders")
        assert (stats.depth, stats.in_flight) == (3, 0)
        await service.send("orders", 4)
        await clock.advance(100)
        assert work.bodies == [0]
        service.resume("orders")
        await clock.advance(100)
    assert work.ended == [0, 1, 2, 3, 4]
    assert set(work.attempts) == {1}


@pytest.mark.parametrize("passes", range(8))
async def test_pause_works_at_any_point_of_a_delivery(clock, passes):
    work = Work(clock)
    async with make_service(consume("orders", concurrency=4)(work), clock=clock) as service:
        await service.send_many("orders", range(4))
        for _ in range(passes):
            await asyncio.sleep(0)
        service.pause("orders")
        begun = list(work.bodies)
        await clock.advance(50)
        assert work.bodies == begun
        service.resume("orders")
        await clock.advance(50)
    assert sorted(Counter(work.ended).items()) == [(number, 1) for number in range(4)]


async def test_a_partial_batch_does_not_start_after_pause(clock):
    batches: list[list[int]] = []

    @consume("orders", batch_size=10, batch_wait=5)
    async def handle(bodies: list[int]) -> None:
        batches.append(bodies)

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", [1, 2])
        await clock.advance(1)
        service.pause("orders")
        await clock.advance(50)
        assert batches == []
        assert (await service.stats("orders")).in_flight == 0
        service.resume("orders")
        await clock.advance(10)
    assert batches == [[1, 2]]


# -- unavailable -------------------------------------------------------------------------------


class Outage:
    """A handler whose dependency is down until a given time."""

    def __init__(self, clock: VirtualClock, until: float, retry_after: float | None = None) -> None:
        self.clock = clock
        self.origin = clock.monotonic()
        self.until = until
        self.retry_after = retry_after
        self.tries: list[float] = []
        self.done: list[object] = []
        self.attempts: list[int] = []

    @property
    def now(self) -> float:
        return self.clock.monotonic() - self.origin

    async def __call__(self, body: object, message: Message) -> None:
        self.tries.append(self.now)
        self.attempts.append(message.attempt)
        await asyncio.sleep(0)
        if self.now < self.until:
            raise Unavailable("the ledger is down", retry_after=self.retry_after)
        self.done.append(body)


async def test_an_outage_counts_no_attempt_and_is_probed_with_one_message_at_a_time(clock):
    outage = Outage(clock, until=35, retry_after=10)
    handle = consume("orders", concurrency=3)(outage)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(20))
        await clock.advance(1)
        assert service.health_check().consumers[0].state == "paused"
        await clock.advance(100)
        assert failures(service, "orders") == (0, 0, 0)
    # Three calls at first, then one after each pause. The call at 40 s succeeds; the rest follow.
    assert outage.tries[:6] == [0, 0, 0, 10, 20, 30]
    assert outage.tries[6:] == [40] * 20
    assert sorted(outage.done) == list(range(20))  # type: ignore[type-var]
    assert set(outage.attempts) == {1}


@pytest.mark.parametrize("concurrency", [1, 5])
async def test_without_retry_after_each_pause_of_the_channel_is_longer(
    clock, concurrency, monkeypatch
):
    monkeypatch.setattr("qkit.consuming.consumer_state.UNAVAILABLE_BACKOFF._jitter", 0)
    outage = Outage(clock, until=20)
    handle = consume("orders", concurrency=concurrency)(outage)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(5))
        await clock.advance(100)
    assert outage.tries[concurrency - 1 : concurrency + 5] == [0, 1, 3, 7, 15, 31]
    assert len(outage.done) == 5


async def test_a_recovery_resets_the_backoff(clock, monkeypatch):
    monkeypatch.setattr("qkit.consuming.consumer_state.UNAVAILABLE_BACKOFF._jitter", 0)
    outage = Outage(clock, until=2)
    async with make_service(consume("orders")(outage), clock=clock) as service:
        await service.send("orders", 1)
        await clock.advance(10)
        assert outage.tries == [0, 1, 3]
        outage.until = 11.5
        await service.send("orders", 2)
        await clock.advance(10)
    assert outage.tries[3:] == [10, 11, 13]  # the backoff starts again at its first step


async def test_resume_ends_a_backoff_early(clock):
    outage = Outage(clock, until=1, retry_after=1000)
    async with make_service(consume("orders")(outage), clock=clock) as service:
        await service.send_many("orders", [1, 2])
        await clock.advance(5)
        assert outage.tries == [0]
        service.resume("orders")
        await clock.advance(5)
        assert outage.done == [2]  # message 1 waits in the broker for its full delay
        await clock.advance(2000)
    assert outage.done == [2, 1]


async def test_a_pause_continues_after_a_backoff(clock):
    outage = Outage(clock, until=1, retry_after=5)
    async with make_service(consume("orders")(outage), clock=clock) as service:
        await service.send("orders", 1)
        await clock.advance(1)
        service.pause("orders")
        await clock.advance(100)
        assert outage.tries == [0]
        service.resume("orders")
        await clock.advance(1)
    assert outage.done == [1]


# -- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_messages_of_a_key_are_handled_in_order_with_random_failures(clock, seed):
    print("seed", seed)
    dice = random.Random(seed)
    seen: dict[str, list[int]] = {}
    running: set[str] = set()
    overlap = 0

    async def handle(body: int, message: Message) -> None:
        nonlocal overlap
        key = message.key
        assert key is not None
        assert key not in running
        running.add(key)
        overlap = max(overlap, len(running))
        try:
            await asyncio.sleep(dice.random())
            if dice.random() < 0.3 and message.attempt < 3:
                raise ValueError("try again")
            if dice.random() < 0.05:
                raise Unavailable(retry_after=dice.random())
        finally:
            running.discard(key)
        seen.setdefault(key, []).append(body)

    orders = Channel("orders", ordered=True, retry=RetrySettings(initial_delay=0.1))
    async with make_service(consume(orders, concurrency=5)(handle), clock=clock) as service:
        sent: dict[str, list[int]] = {}
        for number in range(100):
            key = dice.choice("abcdef")
            await service.send("orders", number, key=key)
            sent.setdefault(key, []).append(number)
        for _ in range(5):
            await clock.advance(dice.random() * 5)
            service.pause("orders")
            await clock.advance(dice.choice([0, 0.1, 2]))
            service.resume("orders")
        await clock.advance(1000)
        assert await service.dead_letters("orders").list() == []
    assert seen == sent
    assert overlap > 1  # keys do not wait for each other


async def test_a_slow_key_does_not_delay_other_keys(clock):
    work = Work(clock, 0)

    async def handle(body: str, message: Message) -> None:
        work.seconds = 100 if message.key == "slow" else 1
        await work(body, message)

    orders = Channel("orders", ordered=True)
    async with make_service(consume(orders, concurrency=2)(handle), clock=clock) as service:
        for body, key in [("s1", "slow"), ("s2", "slow"), ("a1", "a"), ("b1", "b"), ("n", None)]:
            await service.send("orders", body, key=key)
        await clock.advance(50)
        assert work.ended == ["a1", "b1", "n"]
        await clock.advance(200)
    assert work.ended == ["a1", "b1", "n", "s1", "s2"]


async def test_a_redelivered_message_does_not_overtake_the_running_message_of_its_key(clock):
    work = Work(clock, 50)
    orders = Channel("orders", ordered=True)
    async with make_service(consume(orders, concurrency=2)(work), clock=clock) as service:
        await service.send_many("orders", [1, 2], key="k")
        await clock.advance(1)
        service.pause("orders")
        await clock.advance(1)
        service.resume("orders")
        await clock.advance(10)
        assert work.bodies == [1]
        await clock.advance(100)
    assert work.ended == [1, 2]
    assert work.most == 1


# -- leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 1])
async def test_a_handler_that_runs_longer_than_ten_leases_runs_once(clock, batch_size):
    runs: list[object] = []

    @consume("orders", ack_deadline=2, batch_size=batch_size)
    async def handle(body: list[object]) -> None:
        runs.append(body)
        await asyncio.sleep(25)

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", [])
        await clock.advance(100)
        assert (await service.stats("orders")).acked_total == 1
    assert len(runs) == 1


async def test_the_lease_of_a_buffered_message_is_extended(clock):
    work = Work(clock, 10)
    handle = consume("orders", ack_deadline=2)(work)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(4))
        await clock.advance(100)
    assert work.ended == [0, 1, 2, 3]
    assert set(work.attempts) == {1}


async def test_a_handler_that_blocks_the_loop_for_ten_leases_runs_once(clock):
    runs: list[object] = []

    @consume("orders", ack_deadline=2)
    async def handle(body: object) -> None:
        runs.append(body)
        clock.jump(25)
        await asyncio.sleep(1)
        clock.jump(25)

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(3))
        await clock.advance(500)
        assert (await service.stats("orders")).acked_total == 3
        assert failures(service, "orders") == (0, 0, 0)
    assert runs == [0, 1, 2]


@pytest.mark.parametrize("error", [AckDeadlineExceeded("lost"), MessageNotFound("gone")])
async def test_a_handler_whose_lease_is_lost_is_cancelled_and_settles_nothing(clock, caplog, error):
    work = Work(clock, 100)
    backend = ScriptedBackend()
    handle = consume("orders", ack_deadline=3)(work)
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(1))
        await clock.advance(0.5)
        backend.script("extend", error)
        await clock.advance(0.6)
        assert work.cancelled == [0]
        assert backend.of("ack", "release") == []
        assert service.metrics().in_flight == 0
        backend.put("orders", Envelope("next", b"9"))
        await clock.advance(1)
        assert work.bodies == [0, 9]  # the slot is free
        await service.shutdown(0)
    (record,) = [item for item in caplog.records if "delivery of message" in item.getMessage()]
    assert vars(record).items() >= {"queue": "orders", "message_id": "m0", "attempt": 1}.items()


async def test_a_buffered_message_whose_lease_is_lost_is_not_handled(clock):
    work = Work(clock, 10)
    backend = ScriptedBackend()
    backend.script("extend", *[AckDeadlineExceeded("lost")] * 2)
    handle = consume("orders", ack_deadline=3)(work)
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", *envelopes(2))
        await clock.advance(15)
    assert work.bodies == work.cancelled == [0]
    assert backend.of("ack", "release") == []


async def test_a_batch_runs_without_a_message_whose_lease_is_lost(clock):
    batches: list[list[int]] = []

    @consume("orders", ack_deadline=3, batch_size=5, batch_wait=10)
    async def handle(bodies: list[int]) -> None:
        batches.append(bodies)

    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.script("extend", AckDeadlineExceeded("lost"))
        backend.put("orders", Envelope("alone", b"1"))
        await clock.advance(20)
        assert batches == []
        backend.script("extend", AckDeadlineExceeded("lost"))
        backend.put("orders", Envelope("lost", b"2"))
        await clock.advance(5)
        backend.put("orders", Envelope("kept", b"3"))
        await clock.advance(20)
        assert service.ready
    assert batches == [[3]]
    assert backend.of("ack", "release") == [("ack", "kept")]


async def test_a_failed_renewal_of_a_settled_message_cancels_no_handler(clock, caplog):
    async def slow_rejection() -> None:
        await asyncio.sleep(2)  # the message is acked during this time
        raise AckDeadlineExceeded("settled")

    work = Work(clock, 2)
    backend = ScriptedBackend()
    backend.script("extend", slow_rejection)
    handle = consume("orders", ack_deadline=3)(work)
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", *envelopes(1))
        await clock.advance(10)
    assert work.ended == [0]
    assert backend.of("ack") == [("ack", "m0")]
    assert not [item for item in caplog.records if "delivery of message" in item.getMessage()]


async def test_a_backend_without_leases_gets_no_renewals(clock):
    work = Work(clock, 100)
    backend = ScriptedBackend(can(lease=Support.UNSUPPORTED))
    async with make_service(consume("orders")(work), clock=clock, backend=backend):
        backend.put("orders", *envelopes(1))
        await clock.advance(200)
    assert work.ended == [0]
    assert backend.count("extend") == 0


async def test_a_message_whose_lease_is_lost_before_its_release_is_not_released(clock):
    work = Work(clock, 100)
    backend = ScriptedBackend()
    handle = consume("orders", ack_deadline=3)(work)
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(3))
        await clock.advance(0.5)
        backend.script("release", 5.0)  # the first of two releases is slow
        backend.script("extend", *[AckDeadlineExceeded("lost")] * 3)
        service.pause("orders")
        await clock.advance(10)
        assert work.cancelled == [0]
        assert len(backend.of("release")) == 1
        assert service.health_check().consumers[0].in_flight == 0


async def test_a_renewal_that_fails_for_another_reason_is_logged_and_retried(clock, caplog):
    work = Work(clock, 5)
    backend = ScriptedBackend()
    backend.script("extend", BackendUnavailable("hiccup"))
    handle = consume("orders", ack_deadline=3)(work)
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", *envelopes(1))
        await clock.advance(10)
    assert work.ended == [0]
    assert backend.count("extend") >= 3
    assert [item for item in caplog.records if "could not renew a lease" in item.getMessage()]


async def test_leases_are_renewed_concurrently(clock):
    work, began = Work(clock, 100), []

    async def slow() -> None:
        began.append(clock.monotonic())
        await asyncio.sleep(0.5)

    backend = ScriptedBackend()
    backend.script("extend", *[slow] * 8)
    handle = consume("orders", ack_deadline=3, concurrency=8, prefetch=8)(work)
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", *envelopes(8))
        await clock.advance(2)
        assert len(began) == 8
        assert len(set(began)) == 1


async def test_a_late_ack_is_rejected_and_the_message_is_handled_again(clock, caplog):
    work = Work(clock, 1)
    backend = ScriptedBackend()
    backend.script("ack", AckDeadlineExceeded("late"))
    async with make_service(consume("orders")(work), clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(2))
        await clock.advance(5)
        assert service.ready
    assert [item for item in caplog.records if "settled too late" in item.getMessage()]
    assert work.ended == [0, 1]


# -- deliveries that the subscription reports as lost --------------------------------------------


async def test_a_handler_whose_delivery_is_lost_is_cancelled_and_settles_nothing(clock, caplog):
    work = Work(clock, 100)
    backend = ScriptedBackend(can(lease=Support.UNSUPPORTED))
    handle = consume("orders", concurrency=2, prefetch=4)(work)
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(4))
        await clock.advance(0.5)
        backend.lose("m1", "m2")  # one is running, one is buffered
        await clock.advance(0.5)
        assert work.cancelled == [1]
        assert work.bodies == [0, 1, 3], "started a lost message, or kept its slot"
        assert service.metrics().in_flight == 2
        backend.put("orders", Envelope("next", b"9"))
        await clock.advance(200)
        assert work.ended == [0, 3, 9]
    assert backend.of("ack", "release") == [("ack", "m0"), ("ack", "m3"), ("ack", "next")]
    lost = [item for item in caplog.records if "delivery of message" in item.getMessage()]
    assert sorted(vars(item)["message_id"] for item in lost) == ["m1", "m2"]


async def test_a_final_failure_of_a_lost_delivery_leaves_no_dead_letter(clock):
    """The consumer that now holds the message may succeed."""

    @consume("orders")
    async def handle(body: object) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            raise Reject("interrupted") from None

    backend = ScriptedBackend(can(lease=Support.UNSUPPORTED))
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(1))
        await clock.advance(0.5)
        backend.lose("m0")
        await clock.advance(1)
        assert service.metrics().in_flight == 0
        assert failures(service, "orders") == (0, 0, 0)
    assert backend.of("publish", "ack", "release") == []


async def test_a_loss_reported_during_settlement_cancels_no_handler(clock):
    work = Work(clock, 1)
    backend = ScriptedBackend(can(lease=Support.UNSUPPORTED))
    backend.script("ack", 5.0)
    async with make_service(consume("orders")(work), clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(1))
        await clock.advance(2)
        backend.lose("m0")
        backend.put("orders", Envelope("next", b"9"))
        await clock.advance(10)
        assert work.ended == [0, 9]
        assert service.ready
    assert backend.of("ack", "release") == [("ack", "next")]


async def test_a_batch_that_loses_its_messages_one_by_one_is_cancelled_once(clock):
    cleaned: list[list[int]] = []

    @consume("orders", batch_size=3, batch_wait=1)
    async def handle(bodies: list[int]) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(5)
            cleaned.append(bodies)

    backend = ScriptedBackend(can(lease=Support.UNSUPPORTED))
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(3))
        await clock.advance(2)
        backend.lose("m0")
        await clock.advance(2)
        backend.lose("m1")
        await clock.advance(4)
        assert cleaned == [[0, 1, 2]]
        assert backend.of("ack", "release") == [("release", "m2", 0.0, False)]
        await service.shutdown(0)


# -- lost subscriptions ------------------------------------------------------------------------


async def test_a_lost_subscription_is_reopened_and_its_messages_are_redelivered(clock):
    work = Work(clock, 10)
    backend = ScriptedBackend()
    states: list[tuple[str, str]] = []
    async with make_service(
        consume("orders", concurrency=2)(work), clock=clock, backend=backend
    ) as service:
        service.on("state_change", lambda event: states.append((event.old, event.new)))
        backend.put("orders", *envelopes(3))
        await clock.advance(1)
        backend.script("receive", SubscriptionLost("the connection broke"))
        await clock.advance(0.05)
        assert sorted(work.cancelled) == [0, 1]  # type: ignore[type-var]
        assert backend.of("ack", "release") == []
        assert not service.ready
        assert service.health_check().consumers[0].state == "reconnecting"
        await clock.advance(30)
        assert service.ready
    assert backend.count("subscribe") == 2
    assert sorted(work.ended) == [0, 1, 2]
    assert states == [
        ("connected", "disconnected"),
        ("disconnected", "connected"),
        ("connected", "closing"),
        ("closing", "closed"),
    ]


async def test_a_lost_subscription_is_logged_in_one_line_with_the_traceback_at_debug(clock, caplog):
    backend = ScriptedBackend()
    with caplog.at_level(logging.DEBUG, "qkit"):
        async with make_service(consume("orders")(Work(clock)), clock=clock, backend=backend):
            backend.script("receive", SubscriptionLost("the connection\nbroke"))
            await clock.advance(10)
    records = [
        item
        for item in caplog.records
        if "failed subscription" in item.getMessage() or "subscribing again" in item.getMessage()
    ]
    assert [(item.levelname, bool(item.exc_info)) for item in records] == [
        ("WARNING", False),
        ("DEBUG", True),
    ]
    assert "SubscriptionLost: the connection" in records[0].getMessage()
    assert "\n" not in records[0].getMessage()


async def test_a_lost_subscription_cancels_a_batch_handler(clock):
    cancelled: list[object] = []
    done: list[object] = []

    @consume("orders", batch_size=2, batch_wait=1)
    async def handle(bodies: list[int]) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(bodies)
            raise
        done.append(bodies)

    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", *envelopes(3))
        await clock.advance(2)
        backend.script("receive", SubscriptionLost("broke"))
        await clock.advance(40)
    assert cancelled == [[0, 1]]
    assert sorted(body for bodies in done for body in bodies) == [0, 1, 2]  # type: ignore[attr-defined]


async def delays_between_subscriptions(clock, backend, seconds: float) -> list[float]:
    """Return the seconds between attempts to subscribe."""
    times: list[float] = []
    step = backend._step

    async def timed(operation: str) -> None:
        if operation == "subscribe":
            times.append(clock.monotonic())
        await step(operation)

    backend._step = timed
    async with make_service(consume("orders")(Work(clock)), clock=clock, backend=backend):
        await clock.advance(seconds)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


BACKOFF = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize("operation", ["subscribe", "receive"])
async def test_subscribing_backs_off_even_if_a_subscription_is_lost_immediately(
    clock, operation, monkeypatch
):
    monkeypatch.setattr("qkit.consuming.consumer.RESUBSCRIBE_BACKOFF._jitter", 0)
    backend = ScriptedBackend()
    backend.script(operation, *[SubscriptionLost("broke")] * 8)
    waits = await delays_between_subscriptions(clock, backend, 60)
    assert waits == pytest.approx(BACKOFF)


async def test_the_loss_of_a_stable_subscription_resets_the_backoff(clock, monkeypatch):
    monkeypatch.setattr("qkit.consuming.consumer.RESUBSCRIBE_BACKOFF._jitter", 0)
    backend = ScriptedBackend()
    lost = SubscriptionLost("broke")
    backend.script("receive", lost, lost, lost)
    asyncio.get_running_loop().call_later(60, backend.script, "receive", lost, lost)
    waits = await delays_between_subscriptions(clock, backend, 100)
    assert waits[:2] == pytest.approx([0.1, 0.2])
    assert waits[-2] > 50
    assert waits[-1] == pytest.approx(0.2)


async def test_a_timeout_error_of_receive_is_a_lost_subscription(clock):
    work = Work(clock)
    backend = ScriptedBackend()
    backend.script("receive", TimeoutError("from a driver"))
    async with make_service(consume("orders")(work), clock=clock, backend=backend):
        await clock.advance(1)
        backend.put("orders", *envelopes(1))
        await clock.advance(5)
    assert backend.count("subscribe") == 2
    assert work.ended == [0]


async def test_an_unexpected_error_ends_the_session_but_not_the_consumer(clock, caplog):
    work = Work(clock, 1)
    backend = ScriptedBackend()
    backend.script("ack", ZeroDivisionError("a bug in a driver"))
    handle = consume("orders", concurrency=2)(work)
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", *envelopes(1))
        await clock.advance(0.5)
        backend.put("orders", Envelope("other", b'"other"'))
        await clock.advance(10)
        assert service.ready
    assert backend.count("subscribe") == 2
    assert sorted(backend.of("ack")) == [("ack", "m0"), ("ack", "other")]
    assert ("release", "other", 0.0, False) in backend.calls  # cancelled, so no attempt is counted
    assert [item for item in caplog.records if "subscription of" in item.getMessage()]


async def test_a_deleted_queue_is_declared_and_consumed_again(clock):
    work = Work(clock)
    async with make_service(consume("orders")(work), clock=clock) as service:
        await service.delete("orders")
        await clock.advance(10)
        assert service.ready
        await service.send("orders", 1)
        await clock.advance(10)
        assert work.ended == [1]


async def test_stopping_does_not_wait_for_a_subscription_that_cannot_be_opened(clock):
    backend = ScriptedBackend()
    backend.script("subscribe", *[BackendUnavailable("down")] * 50)
    service = make_service(consume("orders")(Work(clock)), clock=clock, backend=backend)
    await service.start()
    assert service.health_check().consumers[0].state == "starting"
    before = clock.monotonic()
    await service.shutdown()
    assert clock.monotonic() - before < 0.1


# -- shutdown ----------------------------------------------------------------------------------


async def test_shutdown_finishes_handlers_and_releases_buffered_messages_without_an_attempt(
    clock,
):
    work = Work(clock, 10)
    backend = ScriptedBackend()
    service = make_service(consume("orders")(work), clock=clock, backend=backend)
    ended: list[ShutDown] = []
    service.on("shutdown", ended.append)
    await service.start()
    backend.put("orders", *envelopes(3))
    await clock.advance(1)
    before = clock.monotonic()
    coming_down = asyncio.create_task(service.shutdown())
    await clock.advance(1)
    assert service.health_check().consumers[0].state == "stopped"
    assert not service.ready
    await coming_down
    assert clock.monotonic() - before == 9
    assert work.ended == work.bodies == [0]
    assert backend.of("ack") == [("ack", "m0")]
    assert sorted(backend.of("release")) == [
        ("release", "m1", 0.0, False),
        ("release", "m2", 0.0, False),
    ]
    assert backend.calls.index(("stop", "orders")) < backend.calls.index(("ack", "m0"))
    assert backend.calls[-1] == ("aclose",)
    assert [event.abandoned for event in ended] == [0]


async def test_handlers_that_miss_the_deadline_are_cancelled_and_their_messages_released(clock):
    work = Work(clock, 1000)
    backend = ScriptedBackend()
    service = make_service(consume("orders", concurrency=2)(work), clock=clock, backend=backend)
    ended: list[ShutDown] = []
    service.on("shutdown", ended.append)
    await service.start()
    backend.put("orders", *envelopes(3))
    await clock.advance(1)
    before = clock.monotonic()
    await service.shutdown(timeout=5)
    assert clock.monotonic() - before == 5
    assert sorted(work.cancelled) == [0, 1]  # type: ignore[type-var]
    assert sorted(backend.of("ack", "release")) == [
        (("release"), f"m{number}", 0.0, False) for number in range(3)
    ]
    assert [event.abandoned for event in ended] == [2]


class HandlerWithCleanup:
    """A handler that cleans up when cancelled, then raises a given error or returns."""

    def __init__(self, end: BaseException | None) -> None:
        self.end = end
        self.cleaned = 0
        self.runs = 0

    async def __call__(self, body: object) -> None:
        self.runs += 1
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
            self.cleaned += 1
            if self.end is not None:
                raise self.end from None


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("mode", ["release", "inline"])
@pytest.mark.parametrize(
    "end", [ValueError("turned into another error"), Reject("no"), asyncio.CancelledError()]
)
async def test_the_message_of_a_cancelled_handler_is_released_without_counting_an_attempt(
    clock, end, mode, batch_size
):
    cleaning = HandlerWithCleanup(end)

    retry = RetrySettings(mode=mode, initial_delay=0)

    @consume("orders", retry=retry, batch_size=batch_size, batch_wait=0)
    async def handle(body: list[object]) -> None:
        await cleaning(body)

    backend = ScriptedBackend()
    service = make_service(handle, clock=clock, backend=backend)
    await service.start()
    backend.put("orders", Envelope("m0", b"[]"))
    await clock.advance(1)
    await service.shutdown(timeout=0)
    assert cleaning.cleaned == cleaning.runs == 1
    assert backend.of("ack", "release", "publish") == [("release", "m0", 0.0, False)]


async def test_a_cancelled_handler_that_returns_has_succeeded(clock):
    cleaning = HandlerWithCleanup(None)
    backend = ScriptedBackend()
    service = make_service(consume("orders")(cleaning), clock=clock, backend=backend)
    await service.start()
    backend.put("orders", *envelopes(1))
    await clock.advance(1)
    await service.shutdown(timeout=0)
    assert backend.of("ack", "release") == [("ack", "m0")]


async def test_shutdown_releases_a_partial_batch_without_counting_an_attempt(clock):
    batches: list[list[int]] = []

    @consume("orders", batch_size=10, batch_wait=100)
    async def handle(bodies: list[int]) -> None:
        batches.append(bodies)

    backend = ScriptedBackend()
    service = make_service(handle, clock=clock, backend=backend)
    await service.start()
    backend.put("orders", *envelopes(2))
    await clock.advance(1)
    before = clock.monotonic()
    await service.shutdown()
    assert clock.monotonic() == before
    assert batches == []
    assert sorted(backend.of("ack", "release")) == [
        ("release", "m0", 0.0, False),
        ("release", "m1", 0.0, False),
    ]


async def test_a_message_that_waits_for_an_inline_retry_is_released_at_the_deadline(clock):
    async def handle(body: object) -> None:
        raise ValueError("again")

    retry = RetrySettings(mode="inline", initial_delay=1000, max_delay=1000)
    backend = ScriptedBackend()
    service = make_service(consume("orders", retry=retry)(handle), clock=clock, backend=backend)
    await service.start()
    backend.put("orders", *envelopes(1))
    await clock.advance(1)
    await service.shutdown(timeout=5)
    assert backend.of("ack", "release") == [("release", "m0", 0.0, False)]


@pytest.mark.parametrize("batch_size", [None, 1])
async def test_shutdown_does_not_wait_for_a_thread_after_the_deadline(clock, caplog, batch_size):
    gate, began = threading.Event(), threading.Event()

    @consume("orders", batch_size=batch_size)
    def handle(body: list[object]) -> None:
        began.set()
        gate.wait(60)

    backend = ScriptedBackend()
    service = make_service(handle, clock=clock, backend=backend)
    await service.start()
    backend.put("orders", Envelope("m0", b"[]"))
    await until(began.is_set)
    await service.shutdown(timeout=0.1)  # real time passes while a thread runs
    gate.set()
    assert backend.of("ack", "release") == [("release", "m0", 0.0, False)]
    assert [item for item in caplog.records if "still running" in item.getMessage()]


async def test_no_task_remains_if_the_broker_does_not_respond_at_shutdown(clock, caplog):
    work = Work(clock, 1000)
    backend = ScriptedBackend()
    service = make_service(consume("orders")(work), clock=clock, backend=backend)
    before = asyncio.all_tasks()
    await service.start()
    backend.put("orders", *envelopes(3))
    await clock.advance(1)
    backend.script("release", asyncio.Event(), asyncio.Event())  # no response
    await service.shutdown(timeout=5)
    await clock.advance(30)
    assert asyncio.all_tasks() == before
    assert not [item for item in caplog.records if "still running" in item.getMessage()]


async def test_a_subscription_that_is_lost_while_it_stops_loses_its_deliveries(clock):
    work = Work(clock, 1000)
    backend = ScriptedBackend()
    service = make_service(consume("orders")(work), clock=clock, backend=backend)
    await service.start()
    backend.put("orders", *envelopes(1))
    await clock.advance(1)
    backend.script("stop", SubscriptionLost("broke"))
    await service.shutdown()
    assert work.cancelled == [0]
    assert backend.of("release uncounted") == [("release uncounted", "m0")]


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_loop_that_is_closed_without_a_shutdown_counts_no_attempt(batch_size):
    backend = ScriptedBackend()
    began: list[object] = []

    @consume("orders", retry=RetrySettings(max_attempts=1), batch_size=batch_size, concurrency=2)
    async def handle(body: list[object]) -> None:
        began.append(body)
        await asyncio.sleep(1000)

    async def main() -> None:
        await make_service(handle, backend=backend).start()
        backend.put("orders", Envelope("m0", b"[]"), Envelope("m1", b"[]"))
        await until(lambda: len(began) == 2)

    asyncio.run(main())
    assert backend.count("publish") == backend.count("ack") == 0
    assert sorted(backend.of("release", "release uncounted")) == [
        ("release", "m0", 0.0, False),
        ("release", "m1", 0.0, False),
    ]


@pytest.mark.proves("003-shutdown-1")
@pytest.mark.parametrize("passes", range(10))
async def test_shutdown_at_any_moment_loses_no_message_and_counts_no_attempt(clock, passes):
    work = Work(clock, 0.5)
    backend = ScriptedBackend()
    service = make_service(consume("orders", concurrency=2)(work), clock=clock, backend=backend)
    await service.start()
    backend.put("orders", *envelopes(6))
    for _ in range(passes):
        await asyncio.sleep(0)
    await service.shutdown()
    acked = {call[1] for call in backend.of("ack")}
    await asyncio.sleep(1)
    left = {(item.id, item.attempt) for item in backend.queues["orders"]}
    assert acked == {f"m{body}" for body in work.ended}
    assert left == {(f"m{n}", 1) for n in range(6)} - {(name, 1) for name in acked}


# -- logs and events ---------------------------------------------------------------------------


@pytest.mark.proves(
    "003-retry-4", "003-retry-8", "003-errors-1", "003-errors-5", "003-errors-6", "003-errors-7"
)
async def test_every_failure_is_logged_as_one_record_with_fields(clock, caplog):
    async def handle(body: object) -> None:
        raise ValueError("no stock")

    handle = consume("orders", group="billing")(handle)
    with caplog.at_level(logging.INFO, "qkit"):
        async with make_service(handle, clock=clock) as service:
            sent = await service.send("orders", 1)
            await clock.advance(100)
            letter = await only_letter(service, "orders")
    assert letter.attempts == 3
    records = [item for item in caplog.records if hasattr(item, "message_id")]
    assert [(item.levelname, vars(item)["attempt"]) for item in records] == [
        ("WARNING", 1),
        ("WARNING", 2),
        ("ERROR", 3),
    ]
    for record in records:
        fields = vars(record)
        assert fields["queue"] == "orders"
        assert fields["consumer"].endswith("-billing")
        assert fields["message_id"] == sent.message_id
        assert fields["error"] == "ValueError: no stock"
        assert record.exc_info is not None
        assert record.exc_info[2] is not None  # the traceback includes the handler


async def test_a_failing_listener_does_not_affect_settlement(clock):
    def broken(event: object) -> None:
        raise RuntimeError("listener")

    async def handle(body: object) -> None:
        raise QueueFull("downstream")

    async with make_service(consume("orders")(handle), clock=clock) as service:
        service.on("retry", broken)
        service.on("dead_letter", broken)
        await service.send("orders", 1)
        await clock.advance(100)
        assert failures(service, "orders") == (2, 1, 1)
    assert issubclass(QueueFull, QueueError)


# -- isolation and edge cases --------------------------------------------------------------------

tenant: contextvars.ContextVar[str | None] = contextvars.ContextVar("tenant", default=None)


@pytest.mark.parametrize("batch_size", [None, 1])
async def test_context_variables_do_not_leak_from_one_message_to_the_next(clock, batch_size):
    seen: list[str | None] = []

    @consume("orders", batch_size=batch_size, batch_wait=0)
    async def handle(body: list[object]) -> None:
        seen.append(tenant.get())
        tenant.set("acme")

    async with make_service(handle, clock=clock) as service:
        for _ in range(3):
            await service.send("orders", [1])
        await clock.advance(5)
    assert seen == [None, None, None]


async def test_a_base_exception_of_a_handler_is_a_failure(clock):
    class Panic(BaseException):
        pass

    handled: list[int] = []

    @consume("orders", retry=RetrySettings(max_attempts=1))
    async def handle(body: int) -> None:
        if body == 1:
            raise Panic
        handled.append(body)

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", [1, 2])
        await clock.advance(1)
        (letter,) = await service.dead_letters("orders").list()
        assert "Panic" in (letter.error or "")
        assert handled == [2]
        assert service.ready


async def test_a_busy_thread_does_not_delay_the_next_subscription(clock):
    gate, began = threading.Event(), threading.Event()
    handled: list[object] = []

    @consume("orders", concurrency=2)
    def handle(body: int) -> None:
        if body == 1:
            began.set()
            gate.wait(60)
        handled.append(body)

    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend) as service:
        backend.put("orders", Envelope("m1", b"1"))
        await until(began.is_set)
        backend.script("receive", SubscriptionLost("the connection broke"))
        backend.put("orders", Envelope("m2", b"2"))
        await clock.advance(1)  # the consumer resubscribes
        await until(lambda: 2 in handled)
        gate.set()
        assert service.connection_state == "connected"


async def test_shutdown_waits_for_a_slow_ack(clock):
    @consume("orders")
    async def handle(body: object) -> None: ...

    backend = ScriptedBackend()
    backend.script("ack", 3.0)
    service = make_service(handle, clock=clock, backend=backend)
    await service.start()
    backend.put("orders", Envelope("m1", b"1"))
    await clock.advance(0.5)
    await service.shutdown(timeout=0.5)
    assert [call[0] for call in backend.of("ack")] == ["ack"]


async def test_a_handler_may_send_while_another_consumer_is_still_subscribing(clock):
    sent: list[object] = []

    @consume("fast")
    async def fast(body: object) -> None:
        sent.append(await service.send("elsewhere", body))

    @consume("slow")
    async def slow(body: object) -> None: ...

    backend = ScriptedBackend()
    service = make_service(fast, slow, clock=clock, backend=backend)
    backend.script("subscribe", None, 4.0)
    starting = asyncio.ensure_future(service.start())
    await clock.advance(0.5)
    backend.put("fast", Envelope("m1", b"1"))
    await clock.advance(0.5)
    assert not starting.done()
    assert len(sent) == 1
    await starting
    await service.shutdown()


async def test_a_rejected_subscription_fails_the_start(clock):
    @consume("orders")
    async def handle(body: object) -> None: ...

    backend = ScriptedBackend()
    backend.script("subscribe", ConfigError("declared elsewhere with other arguments"))
    service = make_service(handle, clock=clock, backend=backend)
    with pytest.raises(ConfigError, match="declared elsewhere"):
        await service.start()
