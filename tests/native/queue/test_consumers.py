"""Registered consumers, prefetch, balancing, and sends that wait for capacity."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any, TypeVar

import pytest

from qkit.backend import Balance, Delivery, QueueSpec, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.subscription import NativeSubscription
from qkit.errors import (
    ConfigError,
    ConsumerNotFound,
    InvalidName,
    InvalidPriority,
    LifecycleError,
    QueueFull,
    QueueNotFound,
    StorageError,
    SubscriptionLost,
    Unsupported,
)
from qkit.native import Delivery as Taken
from qkit.native import Engine
from qkit.native.log.writer import AppendCallback
from qkit.native.queue.consumers import Consumer
from qkit.native.queue.queue import Queue
from qkit.testing.clock import VirtualClock

T = TypeVar("T")


async def take(engine: Engine, queue: str = "tasks", **options) -> Taken:
    delivery = await engine.consume(queue, **options)
    assert delivery is not None
    return delivery


async def start(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task and let it run until it waits."""
    task = asyncio.create_task(coroutine)
    await run_loop()
    return task


async def run_loop(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def actor_of(engine: Engine, queue: str = "tasks", group: str | None = None) -> Queue:
    return engine.catalogue.queue(queue, "test", group)


def assert_no_waiters(actor: Queue) -> None:
    """Assert that no call is waiting and that none was just woken."""
    assert not actor.waiters.waiters
    assert not actor.waiters.woken
    assert not actor._capacity_waiters.waiters
    assert not actor._capacity_waiters.woken
    assert actor.members is None or not actor.members._waiting


class TestRegister:
    @pytest.mark.proves("000-structures-6")
    async def test_registered_consumers_are_listed_with_their_messages_in_flight(
        self, either: Engine
    ) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        await either.register("tasks", "bert", 3)
        for _ in range(2):
            await either.publish("tasks", b"x")
        held = await take(either, consumer="bert")
        assert await either.consumers("tasks") == [
            Consumer(consumer="anna", prefetch=10, in_flight=0),
            Consumer(consumer="bert", prefetch=3, in_flight=1),
        ]
        assert (await either.stats("tasks")).consumers == 2
        await held.ack()
        assert [entry.in_flight for entry in await either.consumers("tasks")] == [0, 0]

    @pytest.mark.proves("000-structures-6")
    async def test_open_subscriptions_are_listed_as_consumers(self, either: Engine) -> None:
        await either.create("tasks")
        await either.publish("tasks", b"x")
        await either.register("tasks", "anna")
        spec = SubscriptionSpec(queue="tasks", group="g", consumer="worker", prefetch=7)
        async with NativeBackend(engine=either).subscribe(spec) as subscription:
            await subscription.receive(1)
            assert await either.consumers("tasks") == [
                Consumer(consumer="anna", prefetch=10, in_flight=0),
                Consumer(consumer="worker", prefetch=7, in_flight=1),
            ]
            assert (await either.stats("tasks")).consumers == 2
        assert [entry.consumer for entry in await either.consumers("tasks")] == ["anna"]

    async def test_a_waiting_consume_is_counted_once(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        known = await start(either.consume("tasks", 5, consumer="anna"))
        unknown = await start(either.consume("tasks", 5, consumer="passer-by"))
        nameless = await start(either.consume("tasks", 5))
        assert (await either.stats("tasks")).consumers == 3
        assert list(await asyncio.gather(known, unknown, nameless)) == [None, None, None]
        assert (await either.stats("tasks")).consumers == 1
        assert_no_waiters(actor_of(either))

    async def test_a_consumer_of_a_topic_belongs_to_a_group(self, either: Engine) -> None:
        await either.create("news", broadcast=True)
        with pytest.raises(Unsupported, match="pass the group"):
            await either.register("news", "anna")
        await either.register("news", "anna", 1, group="readers")
        await either.register("news", "anna", 2, group="writers")
        for _ in range(2):
            await either.publish("news", b"x")
        await take(either, "news", consumer="anna", group="readers")
        assert await either.consume("news", consumer="anna", group="readers") is None
        await take(either, "news", consumer="anna", group="writers")
        await take(either, "news", consumer="anna", group="writers")
        assert await either.consumers("news") == [
            Consumer(consumer="anna", prefetch=1, in_flight=1, group="readers"),
            Consumer(consumer="anna", prefetch=2, in_flight=2, group="writers"),
        ]
        with pytest.raises(ConsumerNotFound):
            await either.unregister("news", "anna", group="others")

    @pytest.mark.proves("000-config-8")
    @pytest.mark.parametrize("prefetch", [0, -1, 1001, 2.5])
    async def test_an_invalid_prefetch_is_rejected(self, engine: Engine, prefetch) -> None:
        await engine.create("tasks")
        with pytest.raises(ConfigError, match="1–1000"):
            await engine.register("tasks", "anna", prefetch)
        assert await engine.consumers("tasks") == []
        await engine.register("tasks", "anna", 1000)

    async def test_invalid_names_and_unknown_queues_are_rejected(self, engine: Engine) -> None:
        await engine.create("tasks")
        with pytest.raises(InvalidName):
            await engine.register("tasks", "a b")
        for call in (engine.register, engine.unregister):
            with pytest.raises(QueueNotFound):
                await call("unknown", "anna")
        with pytest.raises(QueueNotFound):
            await engine.consumers("unknown")

    @pytest.mark.proves("000-errors-5")
    async def test_an_unregistered_consumer_cannot_be_unregistered_and_has_no_limit(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks")
        with pytest.raises(ConsumerNotFound, match=r"'anna'.*register it first"):
            await engine.unregister("tasks", "anna")
        await engine.register("tasks", "bert")
        with pytest.raises(ConsumerNotFound):
            await engine.unregister("tasks", "anna")
        await engine.publish("tasks", b"x")
        await take(engine, consumer="anna")

    async def test_unregister_releases_messages_without_counting_an_attempt(
        self, either: Engine
    ) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        for n in range(3):
            await either.publish("tasks", str(n).encode())
        held = [await take(either, consumer="anna") for _ in range(2)]
        other = await start(take(either, timeout=5, consumer="bert"))
        assert other.done()
        await either.unregister("tasks", "anna")
        assert not held[0].held
        again = [await take(either), await take(either)]
        assert [(item.body, item.retry_count) for item in again] == [(b"0", 0), (b"1", 0)]
        assert (await either.stats("tasks")).consumers == 0


class TestUnregisteredWhileWaiting:
    @pytest.mark.proves("000-errors-5")
    async def test_a_parked_consume_raises_immediately(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        waiting = await start(either.consume("tasks", None, consumer="anna"))
        await either.unregister("tasks", "anna")
        with pytest.raises(ConsumerNotFound):
            await waiting
        assert_no_waiters(actor_of(either))

    async def test_a_consume_that_waits_for_prefetch_raises(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"x")
        await take(either, consumer="anna")
        waiting = await start(either.consume("tasks", 60, consumer="anna"))
        await either.unregister("tasks", "anna")
        with pytest.raises(ConsumerNotFound):
            await waiting
        assert_no_waiters(actor_of(either))

    async def test_the_wake_up_of_an_unregistered_consumer_is_passed_to_the_next_one(
        self, either: Engine
    ) -> None:
        """The consumer is woken for a message and unregistered before its task runs."""
        await either.create("tasks")
        await either.register("tasks", "anna")
        unregistered = await start(either.consume("tasks", None, consumer="anna"))
        other = await start(take(either, timeout=60, consumer="bert"))
        await either.publish("tasks", b"x")
        await either.unregister("tasks", "anna")
        with pytest.raises(ConsumerNotFound):
            await unregistered
        await run_loop()
        assert other.done()
        assert (await other).body == b"x"

    async def test_a_consume_unregistered_as_its_timeout_expires_raises(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks")
        await engine.register("tasks", "anna")

        async def end() -> None:
            await asyncio.sleep(5)
            await engine.publish("tasks", b"x")
            await engine.unregister("tasks", "anna")

        ending = await start(end())
        with pytest.raises(ConsumerNotFound):
            await engine.consume("tasks", 5, consumer="anna")
        await ending
        assert (await take(engine)).body == b"x"


class TestPrefetch:
    @pytest.mark.proves("000-prefetch-1", "000-config-7")
    async def test_the_default_prefetch_is_ten(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        for _ in range(12):
            await either.publish("tasks", b"x")
        for _ in range(10):
            await take(either, consumer="anna")
        assert await either.consume("tasks", consumer="anna") is None
        await take(either, consumer="bert")

    @pytest.mark.proves("000-prefetch-4", "000-scenarios-6")
    @pytest.mark.parametrize("how", ["ack", "nack", "dead letter", "lost lease", "raised limit"])
    async def test_a_consumer_at_its_limit_waits_and_is_woken(
        self, either: Engine, how: str
    ) -> None:
        await either.create("tasks", ack_deadline=5)
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"1")
        await either.publish("tasks", b"2")
        held = await take(either, consumer="anna")
        assert await either.consume("tasks", 0, consumer="anna") is None
        assert await either.consume("tasks", 1, consumer="anna") is None
        waiting = await start(take(either, timeout=60, consumer="anna"))
        assert not waiting.done()
        if how == "ack":
            await held.ack()
        elif how == "nack":
            await held.nack()
        elif how == "dead letter":
            await held.nack(requeue=False)
        elif how == "raised limit":
            await either.register("tasks", "anna", 2)
        else:
            await asyncio.sleep(4)
        await run_loop()
        assert waiting.done()
        delivery = await waiting
        expected = (b"1", 1) if how in ("nack", "lost lease") else (b"2", 0)
        assert (delivery.body, delivery.retry_count) == expected
        assert_no_waiters(actor_of(either))

    async def test_all_calls_of_a_consumer_share_its_limit(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 2)
        waiting = [await start(take(either, timeout=60, consumer="anna")) for _ in range(5)]
        for _ in range(5):
            await either.publish("tasks", b"x")
        for settled in range(5):
            await run_loop()
            done = [task for task in waiting if task.done()]
            assert len(done) == min(5, settled + 2)
            await (await done[settled]).ack()
        assert_no_waiters(actor_of(either))

    @pytest.mark.proves("000-prefetch-6")
    async def test_a_consumer_at_its_limit_passes_its_wake_up_on(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        first, second = [await start(take(either, timeout=60, consumer="anna")) for _ in range(2)]
        other = await start(take(either, timeout=60, consumer="bert"))
        await either.publish("tasks", b"1")
        # This wakes anna's second call, but anna has reached its limit by then.
        await either.publish("tasks", b"2")
        await run_loop()
        assert [task.done() for task in (first, second, other)] == [True, False, True]
        second.cancel()
        await asyncio.wait([second])

    async def test_a_limit_lowered_after_a_wake_up_is_respected(self, engine: Engine) -> None:
        """The limit is lowered between the wake-up and the claim."""
        await engine.create("tasks")
        await engine.register("tasks", "anna", 2)
        await engine.publish("tasks", b"1")
        await take(engine, consumer="anna")
        woken = await start(take(engine, timeout=60, consumer="anna"))
        other = await start(take(engine, timeout=60, consumer="bert"))
        await engine.publish("tasks", b"2")
        await engine.register("tasks", "anna", 1)
        await run_loop()
        assert (woken.done(), other.done()) == (False, True)
        woken.cancel()
        await asyncio.wait([woken])

    async def test_a_consumer_registered_during_its_wait_is_limited(self, either: Engine) -> None:
        await either.create("tasks")
        await either.publish("tasks", b"1")
        held = await take(either, consumer="anna")
        waiting = await start(take(either, timeout=60, consumer="anna"))
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"2")
        await run_loop()
        assert not waiting.done()
        await held.ack()
        assert (await waiting).body == b"2"

    @pytest.mark.parametrize("how", ["delete", "close"])
    async def test_a_consumer_at_its_limit_raises_when_its_queue_is_deleted_or_closed(
        self, either: Engine, how: str
    ) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"x")
        await take(either, consumer="anna")
        waiting = await start(either.consume("tasks", None, consumer="anna"))
        await (either.delete("tasks") if how == "delete" else either.aclose())
        with pytest.raises(SubscriptionLost):
            await waiting

    async def test_a_wait_cancelled_after_its_wake_up_loses_no_message(
        self, either: Engine
    ) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        for n in range(20):
            await either.publish("tasks", str(n).encode())
        held = await take(either, consumer="anna")
        for _ in range(10):
            cancelled = await start(either.consume("tasks", None, consumer="anna"))
            following = await start(take(either, timeout=None, consumer="anna"))
            await held.ack()
            cancelled.cancel()  # it was woken and has not run yet
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            held = await following
            assert held.retry_count == 0
        assert_no_waiters(actor_of(either))


@asynccontextmanager
async def workers(
    engine: Engine, names: str, prefetch: int = 100
) -> AsyncIterator[dict[str, NativeSubscription]]:
    backend = NativeBackend(engine=engine)
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                backend.subscribe(
                    SubscriptionSpec(queue="tasks", group="g", consumer=name, prefetch=prefetch)
                )
            )
            for name in names
        }


class TestBalance:
    @staticmethod
    async def shares(engine: Engine, names: str, messages: int) -> Counter[str]:
        """Publish messages one by one; return how many each consumer takes without settling."""
        shares: Counter[str] = Counter()

        async def work(name: str) -> None:
            while await engine.consume("tasks", 1, ack_deadline=1e6, consumer=name) is not None:
                shares[name] += 1

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(work(name))
            for _ in range(messages):
                await asyncio.sleep(0.01)
                await engine.publish("tasks", b"x")
        assert_no_waiters(actor_of(engine))
        return shares

    @pytest.mark.proves("000-scenarios-3", "002-improvements-4")
    async def test_round_robin_shares_messages_evenly(self, either: Engine) -> None:
        await either.create("tasks")
        assert await self.shares(either, "abcd", 40) == dict.fromkeys("abcd", 10)

    @pytest.mark.proves("002-improvements-4")
    async def test_least_busy_prefers_the_consumer_with_the_fewest_messages(
        self, either: Engine
    ) -> None:
        await either.create("tasks", balance="least_busy")
        for _ in range(12):
            await either.publish("tasks", b"x")
            await take(either, ack_deadline=1e6, consumer="a")
        # b and c catch up before a, which holds twelve messages, receives another.
        assert await self.shares(either, "abc", 24) == {"b": 12, "c": 12}
        assert await self.shares(either, "abc", 30) == {"a": 10, "b": 10, "c": 10}

    async def test_least_busy_counts_the_messages_that_woken_consumers_will_take(
        self, either: Engine
    ) -> None:
        await either.create("tasks", balance="least_busy")
        anna = [await start(take(either, timeout=5, consumer="anna")) for _ in range(2)]
        bert = await start(take(either, timeout=5, consumer="bert"))
        await either.publish("tasks", b"1")
        await either.publish("tasks", b"2")  # anna was woken for message 1 but has not run yet
        await run_loop()
        assert (anna[0].done(), anna[1].done(), bert.done()) == (True, False, True)
        await either.publish("tasks", b"3")
        await anna[1]

    async def test_least_busy_prefers_the_longest_waiting_consumer_at_equal_load(
        self, engine: Engine
    ) -> None:
        await engine.create("tasks", balance="least_busy")
        await engine.publish("tasks", b"x")
        await take(engine, consumer="a")
        order: list[str] = []

        async def work(name: str) -> None:
            await take(engine, timeout=5, consumer=name)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(work(name))
                await run_loop()
            for _ in range(4):
                await engine.publish("tasks", b"x")
                await run_loop()
        assert order == ["b", "c", "d", "a"]

    @pytest.mark.proves("002-improvements-4")
    async def test_random_balance_reaches_all_consumers(self, either: Engine) -> None:
        await either.create("tasks", balance="random")
        actor_of(either)._random = Random(7)
        shares = await self.shares(either, "abcd", 400)
        assert sum(shares.values()) == 400
        assert all(70 <= count <= 130 for count in shares.values()), shares

    @pytest.mark.parametrize("balance", ["round_robin", "least_busy", "random"])
    @pytest.mark.parametrize("burst", [1, 4, 7, 30])
    async def test_bursts_are_shared_among_waiting_consumers(
        self, either: Engine, balance: Balance, burst: int
    ) -> None:
        """Messages arrive together, and each consumer could take all of them."""
        await either.create("tasks", balance=balance)
        received: dict[str, int] = dict.fromkeys("abc", 0)

        async with workers(either, "abc") as subscriptions:

            async def work(name: str) -> None:
                while deliveries := await subscriptions[name].receive(100):
                    received[name] += len(deliveries)

            tasks = [asyncio.create_task(work(name)) for name in "abc"]
            await run_loop()
            for _ in range(burst):
                await either.publish("tasks", b"x")
            await run_loop(20)
            assert sum(received.values()) == burst
            if balance != "random":
                assert max(received.values()) <= -(-burst // 3) + 1, received
            for subscription in subscriptions.values():
                await subscription.stop()
            await asyncio.gather(*tasks)
        assert_no_waiters(actor_of(either))

    @pytest.mark.parametrize(
        ("balance", "order"), [("round_robin", "abcabc"), ("least_busy", "bcbcab")]
    )
    async def test_balance_applies_to_subscriptions(
        self, either: Engine, balance: Balance, order: str
    ) -> None:
        backend = NativeBackend(engine=either)
        await backend.declare(QueueSpec(name="tasks", balance=balance))
        served: list[str] = []
        async with workers(either, "abc") as subscriptions:
            for _ in range(2):  # a holds two messages before any consumer waits
                await either.publish("tasks", b"x")
            await subscriptions["a"].receive(2)

            async def work(name: str) -> None:
                while await subscriptions[name].receive(1):
                    served.append(name)

            tasks = [asyncio.create_task(work(name)) for name in "abc"]
            for _ in range(6):
                await run_loop()
                await either.publish("tasks", b"x")
            await run_loop()
            for subscription in subscriptions.values():
                await subscription.stop()
            await asyncio.gather(*tasks)
        assert "".join(served) == order

    async def test_overtaken_consumers_keep_their_order(self, engine: Engine) -> None:
        """Two consumers are woken, but calls that do not wait take both messages."""
        await engine.create("tasks")
        waiting = [await start(take(engine, timeout=60)) for _ in range(4)]
        for n in range(2):
            await engine.publish("tasks", str(n).encode())
        for _ in range(2):
            await take(engine)
        await run_loop()
        assert not any(task.done() for task in waiting)
        for n in range(4):
            await engine.publish("tasks", str(n).encode())
        assert [(await task).body for task in waiting] == [b"0", b"1", b"2", b"3"]

    async def test_overtaken_subscriptions_keep_their_order(self, engine: Engine) -> None:
        await engine.create("tasks")
        async with workers(engine, "abcd") as subscriptions:
            waiting = [await start(subscriptions[name].receive(1)) for name in "abcd"]
            for n in range(2):
                await engine.publish("tasks", str(n).encode())
            for _ in range(2):
                await take(engine)
            await run_loop()
            for n in range(4):
                await engine.publish("tasks", str(n).encode())
            bodies = [(await task)[0].envelope.body for task in waiting]
            assert bodies == [b"0", b"1", b"2", b"3"]

    async def test_surplus_wake_ups_do_not_change_the_order(self, engine: Engine) -> None:
        """Consumers that are woken but find no message keep their order."""
        await engine.create("tasks")
        waiting = [await start(take(engine, timeout=60)) for _ in range(5)]
        for n in range(3):
            await engine.publish("tasks", str(n).encode())
        await run_loop()
        for n in range(3, 5):
            await engine.publish("tasks", str(n).encode())
            await run_loop()
        assert [(await task).body for task in waiting] == [b"0", b"1", b"2", b"3", b"4"]

    @pytest.mark.parametrize("balance", ["round_robin", "least_busy", "random"])
    async def test_cancelled_waits_lose_no_message_and_leave_no_waiter(
        self, either: Engine, balance: Balance
    ) -> None:
        await either.create("tasks", balance=balance)
        random = Random(11)
        taken: list[bytes] = []

        async def work(name: str) -> None:
            while (delivery := await either.consume("tasks", 2, consumer=name)) is not None:
                await delivery.ack()
                taken.append(delivery.body)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(work(name))
            for n in range(300):
                cancelled_tasks = [
                    await start(either.consume("tasks", None, consumer="cancelled"))
                    for _ in range(random.randrange(3))
                ]
                for cancelled in cancelled_tasks[:1]:
                    cancelled.cancel()
                await either.publish("tasks", str(n).encode())
                for cancelled in cancelled_tasks:
                    cancelled.cancel()  # some of them were woken for the message
                await asyncio.wait(cancelled_tasks) if cancelled_tasks else None
                for cancelled in cancelled_tasks:
                    if not cancelled.cancelled():  # it finished before the cancellation
                        delivery = cancelled.result()
                        assert delivery is not None
                        await delivery.ack()
                        taken.append(delivery.body)
        assert sorted(taken, key=int) == [str(n).encode() for n in range(300)]
        assert_no_waiters(actor_of(either))

    async def test_a_cancelled_durable_claim_is_released_to_the_next_consumer(
        self, either: Engine
    ) -> None:
        await either.create("tasks")
        for n in range(30):
            cancelled = await start(either.consume("tasks", None))
            other = await start(take(either, timeout=None))
            await either.publish("tasks", str(n).encode())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            if not cancelled.cancelled():  # it finished before the cancellation
                quick = cancelled.result()
                assert quick is not None
                await quick.ack()
                other.cancel()
                await asyncio.wait([other])
                continue
            delivery = await other
            assert (delivery.body, delivery.retry_count) == (str(n).encode(), 0)
            await delivery.ack()
        assert_no_waiters(actor_of(either))


class TestWaitingForCapacity:
    @staticmethod
    async def full(engine: Engine, depth: int = 1) -> None:
        """Create a full queue."""
        await engine.create("tasks", max_depth=depth)
        for n in range(depth):
            await engine.publish("tasks", f"old-{n}".encode(), message_id=f"old-{n}")
        with pytest.raises(QueueFull):
            await engine.publish("tasks", b"x")

    async def test_a_send_without_wait_is_rejected_immediately(self, either: Engine) -> None:
        await self.full(either)
        with pytest.raises(QueueFull):
            await either.publish("tasks", b"new", wait=0)

    async def test_a_send_waits_up_to_its_limit(self, either: Engine, clock: VirtualClock) -> None:
        await self.full(either)
        start = clock.monotonic()
        with pytest.raises(QueueFull, match="at most 1"):
            await either.publish("tasks", b"new", wait=5)
        assert clock.monotonic() - start == 5
        assert_no_waiters(actor_of(either))

    async def test_a_send_does_not_wait_if_there_is_capacity(
        self, either: Engine, clock: VirtualClock
    ) -> None:
        await either.create("tasks", max_depth=2)
        start = clock.monotonic()
        assert (await either.publish("tasks", b"1", wait=None)).position == 0
        assert (await either.publish("tasks", b"2", wait=5)).position == 1
        assert clock.monotonic() == start

    @pytest.mark.proves("000-scenarios-8")
    @pytest.mark.parametrize(
        "how",
        ["ack", "dead letter", "last lease", "purge", "remove", "expiry", "limit", "drop oldest"],
    )
    async def test_a_waiting_send_is_woken_whenever_capacity_becomes_free(
        self, either: Engine, how: str
    ) -> None:
        options = {"max_depth": 1, "max_deliveries": 1, "ack_deadline": 5}
        either.catalogue.declare("tasks", {**options, "dead_letter": "tasks_dlq"})
        await either.publish("tasks", b"old", message_id="old", ttl=5 if how == "expiry" else None)
        held = None
        if how in ("ack", "dead letter", "last lease"):
            held = await take(either)
        waiting = await start(either.publish("tasks", b"new", message_id="new", wait=60))
        assert not waiting.done()
        if how == "ack" and held is not None:
            await held.ack()
        elif how == "dead letter" and held is not None:
            await held.nack(requeue=False)
        elif how == "purge":
            assert await either.purge("tasks") == 1
        elif how == "remove":
            assert await either.remove("tasks", ["old"]) == 1
        elif how == "limit":
            either.catalogue.declare("tasks", {"max_depth": 2})
        elif how == "drop oldest":
            either.catalogue.declare("tasks", {"drop_oldest": True})
        else:
            await asyncio.sleep(5)
        await run_loop()
        assert waiting.done()
        assert (await waiting).message_id == "new"
        assert "new" in [item.id for item in await either.peek("tasks", 10)]
        assert_no_waiters(actor_of(either))

    async def test_a_released_message_frees_no_capacity(self, either: Engine) -> None:
        await self.full(either)
        held = await take(either)
        waiting = await start(either.publish("tasks", b"new", wait=60))
        await held.nack()
        await run_loop()
        assert not waiting.done()
        await (await take(either)).ack()
        await waiting

    async def test_waiting_sends_are_served_in_order(self, either: Engine) -> None:
        await self.full(either, 3)
        senders = [
            await start(either.publish("tasks", f"new-{n}".encode(), wait=None)) for n in range(6)
        ]
        for waiting in range(6, 0, -1):
            assert sum(not sender.done() for sender in senders) == waiting
            await (await take(either)).ack()
            await run_loop()
            assert [sender.done() for sender in senders] == [True] * (7 - waiting) + [False] * (
                waiting - 1
            )
        bodies = [(await take(either)).body for _ in range(3)]
        assert bodies == [b"new-3", b"new-4", b"new-5"]

    async def test_a_waiting_send_precedes_a_new_waiting_send(self, either: Engine) -> None:
        await self.full(either)
        first = await start(either.publish("tasks", b"first", wait=None))
        second = await start(either.publish("tasks", b"second", wait=None))
        held = await take(either)
        await held.ack()
        late = asyncio.create_task(either.publish("tasks", b"late", wait=None))
        await run_loop()
        assert [first.done(), second.done(), late.done()] == [True, False, False]
        for expected in (b"first", b"second", b"late"):
            delivery = await take(either, timeout=5)
            assert delivery.body == expected
            await delivery.ack()

    async def test_a_send_without_wait_takes_free_capacity_and_waiting_sends_keep_their_order(
        self, engine: Engine
    ) -> None:
        await self.full(engine, 2)
        first = await start(engine.publish("tasks", b"first", wait=None))
        second = await start(engine.publish("tasks", b"second", wait=None))
        third = await start(engine.publish("tasks", b"third", wait=None))
        assert await engine.purge("tasks") == 2
        for _ in range(2):
            await engine.publish("tasks", b"quick")  # before the two woken senders can run
        await run_loop()
        assert not any(sender.done() for sender in (first, second, third))
        for expected in (b"quick", b"quick", b"first", b"second", b"third"):
            delivery = await take(engine, timeout=5)
            assert delivery.body == expected
            await delivery.ack()
            await run_loop()

    async def test_freed_capacity_for_one_message_wakes_one_send(self, engine: Engine) -> None:
        await self.full(engine)
        senders = [await start(engine.publish("tasks", b"x", wait=None)) for _ in range(100)]
        await (await take(engine)).ack()
        assert len(actor_of(engine)._capacity_waiters.woken) == 1
        await run_loop()
        assert sum(sender.done() for sender in senders) == 1
        for sender in senders:
            sender.cancel()
        await asyncio.wait(senders)
        assert_no_waiters(actor_of(engine))

    async def test_a_send_cancelled_after_its_wake_up_passes_it_on(self, either: Engine) -> None:
        await self.full(either)
        for _ in range(20):
            cancelled = await start(either.publish("tasks", b"cancelled", wait=None))
            following = await start(either.publish("tasks", b"next", wait=None))
            delivery = await take(either)
            settling = asyncio.create_task(delivery.ack())
            await asyncio.sleep(0)
            cancelled.cancel()  # it was woken and has not run yet
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await run_loop()
            assert settling.done()
            assert following.done()
            assert [item.body for item in await either.peek("tasks", 5)] == [b"next"]
        assert_no_waiters(actor_of(either))

    async def test_a_send_cancelled_just_before_capacity_is_freed_blocks_no_other_send(
        self, either: Engine
    ) -> None:
        await self.full(either)
        cancelled = await start(either.publish("tasks", b"cancelled", wait=None))
        following = await start(either.publish("tasks", b"next", wait=None))
        delivery = await take(either)
        cancelled.cancel()  # its task has not run yet when capacity is freed
        await delivery.ack()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await run_loop()
        assert following.done()
        assert_no_waiters(actor_of(either))

    async def test_a_send_whose_timeout_expires_as_it_is_woken_blocks_no_other_send(
        self, either: Engine
    ) -> None:
        await self.full(either)
        short = await start(either.publish("tasks", b"short", wait=5))
        long = await start(either.publish("tasks", b"long", wait=60))
        delivery = await take(either)
        await asyncio.sleep(5)
        await delivery.ack()
        await asyncio.wait([short])
        await run_loop()
        if short.exception() is None:  # it was accepted at the last moment
            await (await take(either)).ack()
            await run_loop()
        assert long.done()
        assert_no_waiters(actor_of(either))

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"priority": 99}, InvalidPriority),
            ({"delay": 5.0, "ttl": 5.0}, ValueError),
        ],
    )
    async def test_a_rejected_send_passes_its_wake_up_on(
        self, either: Engine, options, error
    ) -> None:
        await self.full(either)
        invalid = await start(either.publish("tasks", b"invalid", wait=None, **options))
        valid = await start(either.publish("tasks", b"valid", wait=None))
        await (await take(either)).ack()
        with pytest.raises(error):
            await invalid
        await run_loop()
        assert valid.done()
        assert_no_waiters(actor_of(either))

    async def test_a_failed_write_frees_its_capacity(
        self, engine: Engine, clock: VirtualClock, tmp_path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with await Engine.open(tmp_path, clock=clock) as durable:
            await durable.create("tasks", max_depth=1)
            assert durable._journal is not None
            writer, held = durable._journal.writer, list[AppendCallback]()
            with monkeypatch.context() as patch:
                patch.setattr(writer, "append_with_callback", lambda _, done: held.append(done))
                rejected = await start(durable.publish("tasks", b"rejected"))
            waiting = await start(durable.publish("tasks", b"accepted", wait=60))
            assert not waiting.done()
            writer.group_number += 1  # as the writer does after a write attempt
            held[0](None, StorageError("no space"))
            with pytest.raises(StorageError):
                await rejected
            await run_loop()
            assert waiting.done()

    @pytest.mark.parametrize("kind", ["queue", "topic"])
    @pytest.mark.parametrize("how", ["delete", "close"])
    async def test_a_waiting_send_raises_when_its_queue_is_deleted_or_closed(
        self, either: Engine, kind: str, how: str
    ) -> None:
        await either.create("tasks", max_depth=1, broadcast=kind == "topic")
        group = None if kind == "queue" else "readers"
        assert await either.consume("tasks", group=group) is None
        await either.publish("tasks", b"old")
        waiting = await start(either.publish("tasks", b"new", wait=None))
        if how == "delete":
            await either.delete("tasks")
            with pytest.raises(QueueNotFound):
                await waiting
        else:
            await either.aclose()
            with pytest.raises(LifecycleError):
                await waiting

    async def test_a_waiting_send_uses_a_queue_created_meanwhile(self, engine: Engine) -> None:
        await self.full(engine)
        waiting = await start(engine.publish("tasks", b"new", wait=None))
        await engine.delete("tasks")
        await engine.create("tasks")
        await waiting
        assert (await take(engine)).body == b"new"

    async def test_a_send_to_a_topic_waits_for_every_group(self, either: Engine) -> None:
        await either.create("tasks", broadcast=True, max_depth=1)
        for group in ("quick", "slow"):
            assert await either.consume("tasks", group=group) is None
        await either.publish("tasks", b"old")
        with pytest.raises(QueueFull):
            await either.publish("tasks", b"x", wait=1)
        senders = [
            await start(either.publish("tasks", f"new-{n}".encode(), wait=60)) for n in range(2)
        ]
        for n in range(2):
            for group in ("quick", "slow"):
                assert not senders[n].done()
                await (await take(either, group=group)).ack()
                await run_loop()
            assert senders[n].done()
        for group in ("quick", "slow"):
            assert (await take(either, group=group)).body == b"new-1"
            assert_no_waiters(actor_of(either, "tasks", group))

    async def test_a_cancelled_send_to_a_topic_blocks_no_other_send(self, either: Engine) -> None:
        await either.create("tasks", broadcast=True, max_depth=1)
        for group in ("first", "second"):
            assert await either.consume("tasks", group=group) is None
        await either.publish("tasks", b"old")
        cancelled = await start(either.publish("tasks", b"cancelled", wait=None))
        following = await start(either.publish("tasks", b"next", wait=None))
        # After this ack, both senders wait for the second group.
        await (await take(either, group="first")).ack()
        await run_loop()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await (await take(either, group="second")).ack()
        await run_loop()
        assert following.done()

    async def test_back_pressure_delivers_every_message_once(self, either: Engine) -> None:
        """Many senders share a small queue, which never exceeds its limit."""
        await either.create("tasks", max_depth=3)
        taken: list[bytes] = []

        async def produce(name: str) -> None:
            for n in range(40):
                await either.publish("tasks", f"{name}{n}".encode(), wait=None)

        async def work() -> None:
            while (delivery := await either.consume("tasks", 1)) is not None:
                stats = await either.stats("tasks")
                assert stats.depth + (stats.in_flight or 0) <= 3
                taken.append(delivery.body)
                await asyncio.sleep(0.001)
                await delivery.ack()

        async with asyncio.TaskGroup() as group:
            for name in "abcdefgh":
                group.create_task(produce(name))
            for _ in range(2):
                group.create_task(work())
        assert len(taken) == len(set(taken)) == 320
        for name in "abcdefgh":  # messages of each sender keep their order
            own = [body for body in taken if body.startswith(name.encode())]
            assert own == [f"{name}{n}".encode() for n in range(40)]
        assert_no_waiters(actor_of(either))


async def test_a_second_receive_of_a_subscription_waits_for_free_prefetch(engine: Engine) -> None:
    """Concurrent receives of one subscription share its prefetch."""
    await engine.create("tasks")
    async with workers(engine, "a", prefetch=1) as subscriptions:
        first = await start(subscriptions["a"].receive(1))
        second = await start(subscriptions["a"].receive(1))
        other = await start(take(engine, timeout=60))
        for n in range(2):
            await engine.publish("tasks", str(n).encode())
        await run_loop()
        assert [first.done(), second.done(), other.done()] == [True, False, True]
        delivery: Delivery = (await first)[0]
        await engine.publish("tasks", b"2")
        await subscriptions["a"].ack(delivery)
        assert (await second)[0].envelope.body == b"2"
