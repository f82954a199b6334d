"""Public API of the engine, in virtual time. See also test_seed_scenarios.py."""

from __future__ import annotations

import asyncio
import logging

import pytest

from qkit.errors import (
    AckDeadlineExceeded,
    ConfigError,
    InvalidBody,
    InvalidName,
    InvalidPriority,
    LifecycleError,
    MessageNotFound,
    QueueFull,
    QueueNotFound,
    SubscriptionLost,
)
from qkit.message import DeadLetter, Reason
from qkit.native import Delivery, Engine
from qkit.testing.clock import VirtualClock


async def take(engine: Engine, queue: str = "tasks", **options) -> Delivery:
    delivery = await engine.consume(queue, **options)
    assert delivery is not None
    return delivery


async def drain(engine: Engine, queue: str = "tasks") -> list[bytes]:
    bodies = []
    while (delivery := await engine.consume(queue)) is not None:
        bodies.append(delivery.body)
        await delivery.ack()
    return bodies


class TestPublish:
    @pytest.mark.proves(
        "000-operations-1",
        "000-operations-2",
        "000-structures-3",
        "000-publish-3",
        "000-publish-6",
        "000-consume-5",
        "000-consume-6",
        "000-consume-7",
        "000-consume-9",
    )
    async def test_a_delivery_has_the_fields_of_the_published_message(self, engine: Engine) -> None:
        await engine.create("tasks")
        headers = {"tenant": "acme"}
        sent = await engine.publish(
            "tasks", b"x", 8, headers=headers, key="k", message_id="mine", ttl=60
        )
        headers["tenant"] = "changed"
        delivery = await take(engine)
        assert sent == ("mine", 0)
        assert (delivery.message_id, delivery.body, delivery.priority) == ("mine", b"x", 8)
        assert (delivery.headers, delivery.key) == ({"tenant": "acme"}, "k")
        assert repr(delivery) == "<Delivery mine of tasks, retry 0>"

    @pytest.mark.proves(
        "001-overview-5", "001-reaper-1", "001-reaper-2", "004-actors-4", "004-states-5"
    )
    async def test_a_delayed_message_is_delivered_exactly_when_due(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks")
        sent = await engine.publish("tasks", b"x", delay=7 * 24 * 3600)
        assert sent.position is None
        start = clock.monotonic()
        delivery = await take(engine, timeout=None)
        assert clock.monotonic() - start == 7 * 24 * 3600
        await delivery.ack()

    @pytest.mark.proves("000-publish-2", "000-errors-1")
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"priority": 10}, InvalidPriority),
            ({"delay": -1.0}, ValueError),
            ({"delay": float("nan")}, ValueError),
            ({"ttl": 0.0}, ValueError),
            ({"delay": 5.0, "ttl": 5.0}, ValueError),
            ({"body": "text"}, InvalidBody),
            ({"queue": "unknown"}, QueueNotFound),
        ],
    )
    async def test_invalid_arguments_are_rejected(self, engine: Engine, options, error) -> None:
        await engine.create("tasks")
        with pytest.raises(error):
            await engine.publish(**{"queue": "tasks", "body": b"x", **options})
        assert (await engine.stats("tasks")).published_total == 0

    async def test_an_expired_message_without_a_dead_letter_queue_is_dropped_and_reported(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        reported: list[DeadLetter] = []
        engine.on_dead_letter(reported.append)
        await engine.create("tasks", dead_letter=False)
        await engine.publish("tasks", b"x", ttl=1)
        await clock.advance(1)
        stats = await engine.stats("tasks")
        assert (stats.depth, stats.dropped_total, stats.dead_lettered_total) == (0, 1, 0)
        assert [(letter.channel, letter.reason) for letter in reported] == [
            ("tasks", Reason.TTL_EXPIRED)
        ]
        assert await engine.list() == ["tasks"]
        assert await engine.dead_letters("tasks") == []
        assert await engine.retry_dead_letters("tasks") == 0
        assert await engine.purge_dead_letters("tasks") == 0

    @pytest.mark.proves("004-dlq-2")
    async def test_a_failing_callback_loses_no_dead_letter(
        self, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: DeadLetter) -> None:
            raise RuntimeError("callback")

        engine.on_dead_letter(fail)
        await engine.create("tasks")
        await engine.publish("tasks", b"x")
        with caplog.at_level(logging.ERROR, logger="qkit.native"):
            await (await take(engine)).nack(requeue=False)
        assert "callback failed" in caplog.text
        assert len(await engine.dead_letters("tasks")) == 1


class TestSettle:
    @pytest.mark.proves(
        "000-ack-4", "000-nack-3", "000-nack-5", "000-errors-3", "002-ack-6", "002-ack-7"
    )
    @pytest.mark.parametrize("first", ["ack", "nack"])
    @pytest.mark.parametrize("second", ["ack", "nack", "extend"])
    async def test_settling_a_delivery_twice_raises(
        self, engine: Engine, first: str, second: str
    ) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"x")
        delivery = await take(engine)
        await getattr(delivery, first)()
        other = await engine.consume("tasks")  # another consumer has the message after a nack
        with pytest.raises(MessageNotFound, match="already settled"):
            await getattr(delivery, second)(*([5] if second == "extend" else []))
        if other is not None:
            await other.ack()

    @pytest.mark.proves("000-ack-4", "000-nack-5", "000-errors-6")
    @pytest.mark.parametrize("late", ["ack", "nack", "extend"])
    async def test_settling_after_the_lease_expired_raises(
        self, engine: Engine, clock: VirtualClock, late: str
    ) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"x")
        delivery = await take(engine, ack_deadline=5)
        await clock.advance(5)
        other = await take(engine)
        for _ in range(2):
            with pytest.raises(AckDeadlineExceeded):
                await getattr(delivery, late)(*([5] if late == "extend" else []))
        await other.ack()

    async def test_extend_keeps_the_lease(self, engine: Engine, clock: VirtualClock) -> None:
        await engine.create("tasks", ack_deadline=10)
        await engine.publish("tasks", b"x")
        delivery = await take(engine)
        for _ in range(10):
            await clock.advance(8)
            await delivery.extend(10)
        assert await engine.consume("tasks") is None
        await delivery.ack()

    async def test_extend_can_shorten_a_lease(self, engine: Engine, clock: VirtualClock) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"x")
        delivery = await take(engine)
        await delivery.extend(1)
        again = await take(engine, timeout=2)
        assert again.retry_count == 1

    @pytest.mark.proves("000-features-3", "002-dlq-6")
    async def test_backoff_doubles_up_to_its_limit(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks", max_retries=None, backoff=1.0, max_backoff=5.0)
        await engine.publish("tasks", b"x")
        waits = []
        for _ in range(5):
            start = clock.monotonic()
            delivery = await take(engine, timeout=None)
            waits.append(clock.monotonic() - start)
            await delivery.nack()
        assert waits == [0, 1, 2, 4, 5]

    @pytest.mark.proves("000-dead-3")
    async def test_a_message_nacked_after_its_ttl_becomes_a_dead_letter(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"x", ttl=5)
        delivery = await take(engine)
        await clock.advance(6)
        assert await delivery.nack() == "dead_lettered"
        assert (await engine.dead_letters("tasks"))[0].reason == Reason.TTL_EXPIRED

    @pytest.mark.proves("000-lifecycle-6", "000-deadline-4", "002-ack-5", "004-states-4")
    async def test_a_message_that_always_crashes_its_consumer_is_dead_lettered(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks", ack_deadline=1)
        await engine.publish("tasks", b"x")
        for _ in range(4):
            await take(engine, timeout=2, consumer="worker-7")
        await clock.advance(1)
        (letter,) = await engine.dead_letters("tasks")
        assert (letter.reason, letter.attempts) == (Reason.MAX_RETRIES_EXCEEDED, 4)
        assert letter.error is not None
        assert "worker-7" in letter.error


class TestBlockedLoop:
    """Event loop blocked past the end of a lease, simulated by a clock jump."""

    async def test_a_pending_ack_is_accepted(self, engine: Engine, clock: VirtualClock) -> None:
        await engine.create("tasks", ack_deadline=10)
        await engine.publish("tasks", b"x")
        delivery = await take(engine)
        clock._now += 100  # as if a handler called time.sleep(100)
        await delivery.ack()
        await clock.advance(1)
        stats = await engine.stats("tasks")
        assert (stats.acked_total, stats.depth) == (1, 0)

    @pytest.mark.parametrize("renewal", ["timer", "task", "task in a task"])
    async def test_a_pending_renewal_runs_before_the_expiry(
        self, engine: Engine, clock: VirtualClock, renewal: str
    ) -> None:
        await engine.create("tasks", ack_deadline=9)
        await engine.publish("tasks", b"x")
        delivery = await take(engine)
        loop = asyncio.get_running_loop()

        async def renew() -> None:
            while True:
                pause = asyncio.sleep(3)
                await (pause if renewal == "task" else asyncio.create_task(pause))
                await delivery.extend(9)

        timers: list[asyncio.TimerHandle] = []

        def renew_by_timer() -> None:
            delivery._actor.extend(delivery._token, 9)
            timers.append(loop.call_later(3, renew_by_timer))

        if renewal == "timer":
            timers.append(loop.call_later(3, renew_by_timer))
        task = asyncio.create_task(renew()) if renewal != "timer" else None
        for _ in range(3):
            await asyncio.sleep(0)
        clock._now += 1000  # as if another handler blocked the loop
        await clock.advance(5)
        assert await engine.consume("tasks") is None
        await delivery.ack()
        if task is not None:
            task.cancel()
        for timer in timers:
            timer.cancel()

    async def test_without_a_renewal_the_lease_expires(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks", ack_deadline=9)
        await engine.publish("tasks", b"x")
        delivery = await take(engine)
        clock._now += 1000
        await clock.advance(0)
        with pytest.raises(AckDeadlineExceeded):
            await delivery.ack()

    async def test_deleting_a_queue_while_an_expiry_is_deferred_is_safe(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks", ack_deadline=1)
        await engine.publish("tasks", b"x")
        await take(engine)
        await asyncio.sleep(1)
        await engine.delete("tasks")
        await clock.advance(5)
        assert await engine.list() == []

    async def test_a_message_that_expired_meanwhile_is_not_delivered(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"old", ttl=5)
        await engine.publish("tasks", b"delayed", delay=6)
        clock._now += 10
        assert (await take(engine)).body == b"delayed"
        assert [letter.body for letter in await engine.dead_letters("tasks")] == [b"old"]


class TestParkedConsumers:
    @pytest.mark.proves(
        "000-management-3", "000-metrics-3", "001-overview-8", "001-cycle-2", "002-hybrid-2"
    )
    async def test_parked_consumers_are_served_immediately_and_in_order(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks")
        served: list[int] = []

        async def wait(n: int) -> None:
            await take(engine, timeout=60)
            served.append(n)

        start = clock.monotonic()
        async with asyncio.TaskGroup() as group:
            for n in range(4):
                group.create_task(wait(n))
                await asyncio.sleep(0)
            assert (await engine.stats("tasks")).consumers == 4
            for _ in range(4):
                await engine.publish("tasks", b"x")
        assert served == [0, 1, 2, 3]
        assert clock.monotonic() == start

    @pytest.mark.proves("000-consume-3")
    async def test_a_timeout_ends_the_wait(self, engine: Engine, clock: VirtualClock) -> None:
        await engine.create("tasks")
        start = clock.monotonic()
        assert await engine.consume("tasks", timeout=5) is None
        assert clock.monotonic() - start == 5
        assert (await engine.stats("tasks")).consumers == 0

    async def test_a_message_that_arrives_at_the_timeout_is_delivered(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks")
        asyncio.get_running_loop().call_later(
            5, lambda: engine._channels["tasks"].put(clock.monotonic(), "a", b"x")
        )
        assert (await take(engine, timeout=5)).message_id == "a"

    async def test_an_overtaken_consumer_keeps_its_place(self, engine: Engine) -> None:
        await engine.create("tasks")
        first = asyncio.create_task(take(engine, timeout=None))
        second = asyncio.create_task(take(engine, timeout=None))
        await asyncio.sleep(0)
        await engine.publish("tasks", b"1")
        overtaker = await take(engine)  # before the woken consumer can run
        assert overtaker.body == b"1"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.publish("tasks", b"2")
        await engine.publish("tasks", b"3")
        assert [(await first).body, (await second).body] == [b"2", b"3"]

    async def test_a_single_wake_up_is_passed_on_while_messages_are_ready(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks")
        tasks = [asyncio.create_task(take(engine, timeout=None)) for _ in range(3)]
        await asyncio.sleep(0)
        actor = engine.catalogue.queue("tasks", "test")
        for n in range(3):  # three messages become ready with a single wake-up
            actor.state.put(0.0, str(n), b"x")
        actor.wake()
        assert {(await task).message_id for task in tasks} == {"0", "1", "2"}

    @pytest.mark.proves("004-actors-7")
    @pytest.mark.parametrize("others", [0, 1])
    async def test_a_consume_cancelled_after_its_wake_up_loses_no_message(
        self, engine: Engine, others: int
    ) -> None:
        """Run fifty rounds: no message is lost, and no consumer waits while a message is ready."""
        await engine.create("tasks")
        for n in range(50):
            cancelled = asyncio.create_task(engine.consume("tasks", timeout=None))
            await asyncio.sleep(0)
            rest = [asyncio.create_task(take(engine, timeout=None)) for _ in range(others)]
            await asyncio.sleep(0)
            await engine.publish("tasks", str(n).encode())
            cancelled.cancel()  # it was woken and has not run yet
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            delivery = await rest[0] if rest else await take(engine)
            assert (delivery.body, delivery.retry_count) == (str(n).encode(), 0)
            await delivery.ack()

    async def test_cancelled_waits_leave_no_waiters(self, engine: Engine) -> None:
        await engine.create("tasks")
        for _ in range(100):
            task = asyncio.create_task(engine.consume("tasks", timeout=None))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert not engine.catalogue.queue("tasks", "test").waiters.waiters

    @pytest.mark.parametrize("how", ["delete", "close"])
    async def test_parked_consumers_raise_when_their_queue_is_deleted_or_closed(
        self, engine: Engine, how: str
    ) -> None:
        await engine.create("tasks")
        tasks = [asyncio.create_task(engine.consume("tasks", timeout=None)) for _ in range(3)]
        await asyncio.sleep(0)
        await (engine.delete("tasks") if how == "delete" else engine.aclose())
        for task in tasks:
            with pytest.raises(SubscriptionLost):
                await task


class TestAdministration:
    @pytest.mark.proves("000-management-1", "000-structures-1", "004-actors-1")
    async def test_create_is_idempotent_and_reports_a_different_option(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks", max_depth=5)
        await engine.publish("tasks", b"x")
        await engine.create("tasks", max_depth=5)
        assert (await engine.stats("tasks")).depth == 1
        with pytest.raises(ConfigError, match="max_depth=5 and now with 6"):
            await engine.create("tasks", max_depth=6)

    @pytest.mark.proves("004-actors-6", "004-dlq-3", "004-dlq-5")
    async def test_an_automatic_dead_letter_queue_can_be_declared_later(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"x")
        await (await take(engine)).nack(requeue=False)
        await engine.create("tasks_dlq", dead_letter=False, max_depth=7)
        assert (await engine.stats("tasks_dlq")).depth == 1
        delivery = await take(engine, "tasks_dlq")
        assert delivery.headers["qkit-dead-channel"] == "tasks"

    @pytest.mark.proves("000-dead-4")
    async def test_the_oldest_dead_letter_is_dropped_when_the_queue_is_full(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks", dead_letter_max_depth=2)
        for n in range(3):
            await engine.publish("tasks", str(n).encode())
            await (await take(engine)).nack(requeue=False)
            await clock.advance(1)
        assert [letter.body for letter in await engine.dead_letters("tasks")] == [b"1", b"2"]
        assert (await engine.stats("tasks_dlq")).dropped_total == 1

    @pytest.mark.proves("004-dlq-4")
    async def test_a_dead_letter_queue_may_have_fewer_priorities(self, engine: Engine) -> None:
        await engine.create("tasks_dlq", dead_letter=False, max_priority=0)
        await engine.create("tasks")
        await engine.publish("tasks", b"x", 9)
        await (await take(engine)).nack(requeue=False)
        assert len(await engine.dead_letters("tasks")) == 1

    async def test_a_replay_into_a_full_queue_keeps_the_remaining_dead_letters(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks", max_depth=2)
        for n in range(3):
            await engine.publish("tasks", str(n).encode())
            await (await take(engine)).nack(requeue=False)
        with pytest.raises(QueueFull):
            await engine.retry_dead_letters("tasks")
        assert [letter.body for letter in await engine.dead_letters("tasks")] == [b"2"]
        assert await drain(engine) == [b"0", b"1"]

    @pytest.mark.proves(
        "000-management-3",
        "000-structures-2",
        "000-structures-7",
        "000-metrics-1",
        "000-metrics-2",
        "000-metrics-4",
        "000-metrics-5",
        "000-metrics-6",
        "000-metrics-7",
        "000-metrics-9",
        "000-metrics-10",
        "002-improvements-8",
        "002-improvements-9",
        "002-improvements-10",
        "004-actors-3",
    )
    async def test_stats_return_every_figure(self, engine: Engine, clock: VirtualClock) -> None:
        await engine.create("tasks")
        fresh = await engine.stats("tasks")
        assert (fresh.avg_wait_time_ms, fresh.oldest_message_age_secs) == (None, None)
        for n in range(4):
            await engine.publish("tasks", str(n).encode())
        await engine.publish("tasks", b"later", delay=60)
        await clock.advance(2)
        await (await take(engine)).ack()
        await (await take(engine)).nack()
        await take(engine)
        await clock.advance(1)
        stats = await engine.stats("tasks")
        assert (stats.queue, stats.depth, stats.in_flight, stats.scheduled) == ("tasks", 2, 1, 1)
        assert (stats.published_total, stats.consumed_total) == (5, 3)
        assert (stats.acked_total, stats.nacked_total, stats.dropped_total) == (1, 1, 0)
        assert stats.avg_wait_time_ms == 2000
        assert stats.oldest_message_age_secs == 3

    @pytest.mark.proves("000-operations-5", "000-operations-6", "000-management-4")
    async def test_messages_can_be_peeked_removed_and_purged_and_the_queue_deleted(
        self, engine: Engine, clock: VirtualClock
    ) -> None:
        await engine.create("tasks")
        for n in range(4):
            await engine.publish("tasks", str(n).encode(), message_id=str(n))
        await engine.publish("tasks", b"later", delay=5, ttl=60, message_id="later")
        await engine.publish("tasks", b"expired", ttl=1, message_id="expired")
        await clock.advance(1)
        envelopes = await engine.peek("tasks", 10)
        assert [item.id for item in envelopes] == ["0", "1", "2", "3", "later"]
        assert envelopes[-1].not_before == clock.time() + 4
        assert envelopes[-1].expires_at == clock.time() + 59
        assert envelopes[0].attempt == 0
        assert len(await engine.peek("tasks")) == 1
        assert await engine.remove("tasks", ["1", "no"]) == 1
        held = await take(engine)
        assert await engine.purge("tasks") == 3
        await held.ack()
        await engine.delete("tasks")
        for call in (engine.stats, engine.peek, engine.purge, engine.delete, engine.dead_letters):
            with pytest.raises(QueueNotFound, match="'tasks'"):
                await call("tasks")

    @pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 201])
    async def test_invalid_names_are_rejected(self, engine: Engine, name: str) -> None:
        with pytest.raises(InvalidName):
            await engine.create(name)

    async def test_a_queue_with_the_longest_name_has_dead_letters(self, engine: Engine) -> None:
        name = "x" * 200
        await engine.create(name)
        await engine.publish(name, b"x")
        await (await take(engine, name)).nack(requeue=False)
        assert len(await engine.dead_letters(name)) == 1
        assert await engine.list() == [name, name + "_dlq"]

    @pytest.mark.proves("000-management-1")
    @pytest.mark.parametrize(
        "options",
        [
            {"max_depth": 0},
            {"max_priority": 256},
            {"max_retries": -1},
            {"ack_deadline": 0},
            {"backoff": -1},
            {"dead_letter_max_depth": 0},
        ],
    )
    async def test_invalid_options_are_rejected(self, engine: Engine, options) -> None:
        with pytest.raises(ConfigError):
            await engine.create("tasks", **options)


class TestLifecycle:
    async def test_an_engine_cannot_be_reopened(self, engine: Engine) -> None:
        assert engine.running
        with pytest.raises(LifecycleError):
            await engine.__aenter__()
        await engine.create("tasks")
        await engine.aclose()
        await engine.aclose()
        assert not engine.running
        with pytest.raises(LifecycleError, match="closed"):
            await engine.publish("tasks", b"x")

    async def test_an_unopened_engine_rejects_calls(self) -> None:
        with pytest.raises(LifecycleError, match="async with"):
            await Engine().create("tasks")

    async def test_synchronous_methods_reject_another_loop(self, engine: Engine) -> None:
        async def declare() -> None:
            engine.catalogue.declare("tasks", {})

        with pytest.raises(LifecycleError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, declare())

    @pytest.mark.proves("001-reaper-1")
    async def test_close_cancels_all_timers(self, engine: Engine, clock: VirtualClock) -> None:
        await engine.create("tasks")
        await engine.publish("tasks", b"x", delay=5)
        await engine.publish("tasks", b"y")
        delivery = await take(engine)
        actor = engine.catalogue.queue("tasks", "test")
        await engine.aclose()
        assert actor._timer is None
        await delivery.nack()  # has no effect and starts no timer
        assert actor._timer is None


async def test_a_full_user_created_dead_letter_queue_drops_its_oldest_letter(
    clock: VirtualClock,
) -> None:
    async with Engine(clock=clock) as engine:
        await engine.create("orders_dlq", max_depth=1, dead_letter=False)
        await engine.create("orders")
        for number in range(3):
            await engine.publish("orders", str(number).encode(), ttl=1)
        await clock.advance(2)
        assert [letter.body for letter in await engine.dead_letters("orders")] == [b"2"]
        await engine.publish("orders", b"later", delay=0.5)  # the timer still works
        delivery = await engine.consume("orders", timeout=5)
        assert delivery is not None
        assert delivery.body == b"later"


async def test_a_topic_cannot_be_a_dead_letter_queue(clock: VirtualClock) -> None:
    async with Engine(clock=clock) as engine:
        await engine.create("orders_dlq", broadcast=True)
        with pytest.raises(ConfigError, match="topic"):
            await engine.create("orders")


async def test_more_than_ten_thousand_dead_letters_are_replayed() -> None:
    async with Engine() as engine:
        await engine.create("orders", dead_letter_max_depth=20_000, max_retries=0)
        for _ in range(10_001):
            await engine.publish("orders", b"x")
            await (await take(engine, "orders")).nack(requeue=False)
        assert await engine.retry_dead_letters("orders") == 10_001
        assert (await engine.stats("orders")).depth == 10_001
