"""Who gets a message, and who may send one: consumers, their limits, and waiting for room."""

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


async def begin(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has come as far as it can by itself."""
    task = asyncio.create_task(coroutine)
    await passes()
    return task


async def passes(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def actor_of(engine: Engine, queue: str = "tasks", group: str | None = None) -> Queue:
    return engine.catalogue.queue(queue, "test", group)


def assert_nothing_left(actor: Queue) -> None:
    """Nobody waits and nobody is on the way."""
    assert not actor.waiters.waiters
    assert not actor.waiters.woken
    assert not actor._capacity_waiters.waiters
    assert not actor._capacity_waiters.woken
    assert actor.members is None or not actor.members._waiting


class TestRegister:
    @pytest.mark.proves("000-structures-6")
    async def test_registered_consumers_are_listed_with_what_they_hold(
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
    async def test_open_subscriptions_are_listed_too(self, either: Engine) -> None:
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
        known = await begin(either.consume("tasks", 5, consumer="anna"))
        unknown = await begin(either.consume("tasks", 5, consumer="passer-by"))
        nameless = await begin(either.consume("tasks", 5))
        assert (await either.stats("tasks")).consumers == 3
        assert list(await asyncio.gather(known, unknown, nameless)) == [None, None, None]
        assert (await either.stats("tasks")).consumers == 1
        assert_nothing_left(actor_of(either))

    async def test_on_a_topic_a_consumer_belongs_to_a_group(self, either: Engine) -> None:
        await either.create("news", broadcast=True)
        with pytest.raises(Unsupported, match="name the group"):
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
    async def test_a_limit_that_cannot_be_is_refused(self, engine: Engine, prefetch) -> None:
        await engine.create("tasks")
        with pytest.raises(ConfigError, match="1–1000"):
            await engine.register("tasks", "anna", prefetch)
        assert await engine.consumers("tasks") == []
        await engine.register("tasks", "anna", 1000)

    async def test_names_and_queues_are_checked(self, engine: Engine) -> None:
        await engine.create("tasks")
        with pytest.raises(InvalidName):
            await engine.register("tasks", "a b")
        for call in (engine.register, engine.unregister):
            with pytest.raises(QueueNotFound):
                await call("unknown", "anna")
        with pytest.raises(QueueNotFound):
            await engine.consumers("unknown")

    @pytest.mark.proves("000-errors-5")
    async def test_a_consumer_that_nobody_registered(self, engine: Engine) -> None:
        await engine.create("tasks")
        with pytest.raises(ConsumerNotFound, match=r"'anna'.*register it first"):
            await engine.unregister("tasks", "anna")
        await engine.register("tasks", "bert")
        with pytest.raises(ConsumerNotFound):
            await engine.unregister("tasks", "anna")
        await engine.publish("tasks", b"x")
        await take(engine, consumer="anna")  # a name alone limits nothing

    async def test_what_an_unregistered_consumer_held_goes_back_uncharged(
        self, either: Engine
    ) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        for n in range(3):
            await either.publish("tasks", str(n).encode())
        held = [await take(either, consumer="anna") for _ in range(2)]
        other = await begin(take(either, timeout=5, consumer="bert"))
        assert other.done()
        await either.unregister("tasks", "anna")
        assert not held[0].held
        again = [await take(either), await take(either)]
        assert [(item.body, item.retry_count) for item in again] == [(b"0", 0), (b"1", 0)]
        assert (await either.stats("tasks")).consumers == 0


class TestUnregisteredWhileWaiting:
    @pytest.mark.proves("000-errors-5")
    async def test_a_parked_consume_is_told_at_once(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna")
        waiting = await begin(either.consume("tasks", None, consumer="anna"))
        await either.unregister("tasks", "anna")
        with pytest.raises(ConsumerNotFound):
            await waiting
        assert_nothing_left(actor_of(either))

    async def test_one_that_waits_for_a_free_slot_is_told_too(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"x")
        await take(either, consumer="anna")
        waiting = await begin(either.consume("tasks", 60, consumer="anna"))
        await either.unregister("tasks", "anna")
        with pytest.raises(ConsumerNotFound):
            await waiting
        assert_nothing_left(actor_of(either))

    async def test_its_wake_up_goes_to_the_next(self, either: Engine) -> None:
        """Woken for a message and unregistered before it ran: the other one must get it."""
        await either.create("tasks")
        await either.register("tasks", "anna")
        gone = await begin(either.consume("tasks", None, consumer="anna"))
        other = await begin(take(either, timeout=60, consumer="bert"))
        await either.publish("tasks", b"x")
        await either.unregister("tasks", "anna")
        with pytest.raises(ConsumerNotFound):
            await gone
        await passes()
        assert other.done()
        assert (await other).body == b"x"

    async def test_with_its_last_second(self, engine: Engine) -> None:
        await engine.create("tasks")
        await engine.register("tasks", "anna")

        async def end() -> None:
            await asyncio.sleep(5)
            await engine.publish("tasks", b"x")
            await engine.unregister("tasks", "anna")

        ending = await begin(end())
        with pytest.raises(ConsumerNotFound):
            await engine.consume("tasks", 5, consumer="anna")
        await ending
        assert (await take(engine)).body == b"x"


class TestPrefetch:
    @pytest.mark.proves("000-prefetch-1", "000-config-7")
    async def test_ten_unless_told_otherwise(self, either: Engine) -> None:
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
    async def test_it_waits_at_its_limit_and_is_woken(self, either: Engine, how: str) -> None:
        await either.create("tasks", ack_deadline=5)
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"1")
        await either.publish("tasks", b"2")
        held = await take(either, consumer="anna")
        assert await either.consume("tasks", 0, consumer="anna") is None
        assert await either.consume("tasks", 1, consumer="anna") is None
        waiting = await begin(take(either, timeout=60, consumer="anna"))
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
        await passes()
        assert waiting.done()
        delivery = await waiting
        expected = (b"1", 1) if how in ("nack", "lost lease") else (b"2", 0)
        assert (delivery.body, delivery.retry_count) == expected
        assert_nothing_left(actor_of(either))

    async def test_the_limit_holds_for_all_calls_in_its_name(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 2)
        waiting = [await begin(take(either, timeout=60, consumer="anna")) for _ in range(5)]
        for _ in range(5):
            await either.publish("tasks", b"x")
        for settled in range(5):
            await passes()
            done = [task for task in waiting if task.done()]
            assert len(done) == min(5, settled + 2)
            await (await done[settled]).ack()
        assert_nothing_left(actor_of(either))

    @pytest.mark.proves("000-prefetch-6")
    async def test_a_full_consumer_leaves_its_wake_up_to_others(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        first, second = [await begin(take(either, timeout=60, consumer="anna")) for _ in range(2)]
        other = await begin(take(either, timeout=60, consumer="bert"))
        await either.publish("tasks", b"1")
        await either.publish("tasks", b"2")  # wakes anna's second call, which has no slot by then
        await passes()
        assert [task.done() for task in (first, second, other)] == [True, False, True]
        second.cancel()
        await asyncio.wait([second])

    async def test_a_limit_lowered_under_a_wake_up(self, engine: Engine) -> None:
        """The only other way to lose a slot between the wake-up and the claim."""
        await engine.create("tasks")
        await engine.register("tasks", "anna", 2)
        await engine.publish("tasks", b"1")
        await take(engine, consumer="anna")
        woken = await begin(take(engine, timeout=60, consumer="anna"))
        other = await begin(take(engine, timeout=60, consumer="bert"))
        await engine.publish("tasks", b"2")
        await engine.register("tasks", "anna", 1)
        await passes()
        assert (woken.done(), other.done()) == (False, True)
        woken.cancel()
        await asyncio.wait([woken])

    async def test_registered_in_the_middle_of_a_wait(self, either: Engine) -> None:
        await either.create("tasks")
        await either.publish("tasks", b"1")
        held = await take(either, consumer="anna")
        waiting = await begin(take(either, timeout=60, consumer="anna"))
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"2")
        await passes()
        assert not waiting.done()
        await held.ack()
        assert (await waiting).body == b"2"

    @pytest.mark.parametrize("how", ["delete", "close"])
    async def test_it_is_let_go_when_the_queue_is(self, either: Engine, how: str) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        await either.publish("tasks", b"x")
        await take(either, consumer="anna")
        waiting = await begin(either.consume("tasks", None, consumer="anna"))
        await (either.delete("tasks") if how == "delete" else either.aclose())
        with pytest.raises(SubscriptionLost):
            await waiting

    async def test_cancelled_at_the_limit_with_the_slot_in_flight(self, either: Engine) -> None:
        await either.create("tasks")
        await either.register("tasks", "anna", 1)
        for n in range(20):
            await either.publish("tasks", str(n).encode())
        held = await take(either, consumer="anna")
        for _ in range(10):
            victim = await begin(either.consume("tasks", None, consumer="anna"))
            heir = await begin(take(either, timeout=None, consumer="anna"))
            await held.ack()
            victim.cancel()  # its slot was announced, it has not run yet
            with pytest.raises(asyncio.CancelledError):
                await victim
            held = await heir
            assert held.retry_count == 0
        assert_nothing_left(actor_of(either))


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
        """How many each consumer takes of messages that come one by one, none settled."""
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
        assert_nothing_left(actor_of(engine))
        return shares

    @pytest.mark.proves("000-scenarios-3", "002-improvements-4")
    async def test_by_turns(self, either: Engine) -> None:
        await either.create("tasks")
        assert await self.shares(either, "abcd", 40) == dict.fromkeys("abcd", 10)

    @pytest.mark.proves("002-improvements-4")
    async def test_by_load(self, either: Engine) -> None:
        await either.create("tasks", balance="least_busy")
        for _ in range(12):
            await either.publish("tasks", b"x")
            await take(either, ack_deadline=1e6, consumer="a")
        # The others catch up before the one that holds twelve gets another.
        assert await self.shares(either, "abc", 24) == {"b": 12, "c": 12}
        assert await self.shares(either, "abc", 30) == {"a": 10, "b": 10, "c": 10}

    async def test_by_load_counts_those_that_are_on_their_way(self, either: Engine) -> None:
        await either.create("tasks", balance="least_busy")
        anna = [await begin(take(either, timeout=5, consumer="anna")) for _ in range(2)]
        bert = await begin(take(either, timeout=5, consumer="bert"))
        await either.publish("tasks", b"1")
        await either.publish("tasks", b"2")  # anna has not run yet, but is about to hold one
        await passes()
        assert (anna[0].done(), anna[1].done(), bert.done()) == (True, False, True)
        await either.publish("tasks", b"3")
        await anna[1]

    async def test_at_equal_load_who_waited_longest(self, engine: Engine) -> None:
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
                await passes()
            for _ in range(4):
                await engine.publish("tasks", b"x")
                await passes()
        assert order == ["b", "c", "d", "a"]

    @pytest.mark.proves("002-improvements-4")
    async def test_at_random(self, either: Engine) -> None:
        await either.create("tasks", balance="random")
        actor_of(either)._random = Random(7)
        shares = await self.shares(either, "abcd", 400)
        assert sum(shares.values()) == 400
        assert all(70 <= count <= 130 for count in shares.values()), shares

    @pytest.mark.parametrize("balance", ["round_robin", "least_busy", "random"])
    @pytest.mark.parametrize("burst", [1, 4, 7, 30])
    async def test_bursts_are_shared(self, either: Engine, balance: Balance, burst: int) -> None:
        """Messages that come all at once to consumers that could take them all."""
        await either.create("tasks", balance=balance)
        got: dict[str, int] = dict.fromkeys("abc", 0)

        async with workers(either, "abc") as subscriptions:

            async def work(name: str) -> None:
                while deliveries := await subscriptions[name].receive(100):
                    got[name] += len(deliveries)

            tasks = [asyncio.create_task(work(name)) for name in "abc"]
            await passes()
            for _ in range(burst):
                await either.publish("tasks", b"x")
            await passes(20)
            assert sum(got.values()) == burst
            if balance != "random":
                assert max(got.values()) <= -(-burst // 3) + 1, got
            for subscription in subscriptions.values():
                await subscription.stop()
            await asyncio.gather(*tasks)
        assert_nothing_left(actor_of(either))

    @pytest.mark.parametrize(
        ("balance", "order"), [("round_robin", "abcabc"), ("least_busy", "bcbcab")]
    )
    async def test_through_the_backend(self, either: Engine, balance: Balance, order: str) -> None:
        backend = NativeBackend(engine=either)
        await backend.declare(QueueSpec(name="tasks", balance=balance))
        served: list[str] = []
        async with workers(either, "abc") as subscriptions:
            for _ in range(2):  # a holds two before anybody waits
                await either.publish("tasks", b"x")
            await subscriptions["a"].receive(2)

            async def work(name: str) -> None:
                while await subscriptions[name].receive(1):
                    served.append(name)

            tasks = [asyncio.create_task(work(name)) for name in "abc"]
            for _ in range(6):
                await passes()
                await either.publish("tasks", b"x")
            await passes()
            for subscription in subscriptions.values():
                await subscription.stop()
            await asyncio.gather(*tasks)
        assert "".join(served) == order

    async def test_the_overtaken_come_back_in_their_order(self, engine: Engine) -> None:
        """Two are woken, somebody who does not wait takes both messages."""
        await engine.create("tasks")
        waiting = [await begin(take(engine, timeout=60)) for _ in range(4)]
        for n in range(2):
            await engine.publish("tasks", str(n).encode())
        for _ in range(2):
            await take(engine)
        await passes()
        assert not any(task.done() for task in waiting)
        for n in range(4):
            await engine.publish("tasks", str(n).encode())
        assert [(await task).body for task in waiting] == [b"0", b"1", b"2", b"3"]

    async def test_overtaken_subscriptions_come_back_in_their_order(self, engine: Engine) -> None:
        await engine.create("tasks")
        async with workers(engine, "abcd") as subscriptions:
            waiting = [await begin(subscriptions[name].receive(1)) for name in "abcd"]
            for n in range(2):
                await engine.publish("tasks", str(n).encode())
            for _ in range(2):
                await take(engine)
            await passes()
            for n in range(4):
                await engine.publish("tasks", str(n).encode())
            bodies = [(await task)[0].envelope.body for task in waiting]
            assert bodies == [b"0", b"1", b"2", b"3"]

    async def test_spare_wake_ups_change_no_order(self, engine: Engine) -> None:
        """Three messages for five: what the spare wake-ups reach keeps its place too."""
        await engine.create("tasks")
        waiting = [await begin(take(engine, timeout=60)) for _ in range(5)]
        for n in range(3):
            await engine.publish("tasks", str(n).encode())
        await passes()
        for n in range(3, 5):
            await engine.publish("tasks", str(n).encode())
            await passes()
        assert [(await task).body for task in waiting] == [b"0", b"1", b"2", b"3", b"4"]

    @pytest.mark.parametrize("balance", ["round_robin", "least_busy", "random"])
    async def test_cancelled_waits_lose_nothing_and_leave_nothing(
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
                victims = [
                    await begin(either.consume("tasks", None, consumer="victim"))
                    for _ in range(random.randrange(3))
                ]
                for victim in victims[:1]:
                    victim.cancel()
                await either.publish("tasks", str(n).encode())
                for victim in victims:
                    victim.cancel()  # some were woken for it
                await asyncio.wait(victims) if victims else None
                for victim in victims:
                    if not victim.cancelled():  # it was quicker than the cancellation
                        delivery = victim.result()
                        assert delivery is not None
                        await delivery.ack()
                        taken.append(delivery.body)
        assert sorted(taken, key=int) == [str(n).encode() for n in range(300)]
        assert_nothing_left(actor_of(either))

    async def test_a_durable_claim_that_is_cancelled_goes_to_the_next(self, either: Engine) -> None:
        await either.create("tasks")
        for n in range(30):
            victim = await begin(either.consume("tasks", None))
            other = await begin(take(either, timeout=None))
            await either.publish("tasks", str(n).encode())
            await asyncio.sleep(0)
            victim.cancel()
            await asyncio.wait([victim])
            if not victim.cancelled():  # it was quicker than the cancellation
                quick = victim.result()
                assert quick is not None
                await quick.ack()
                other.cancel()
                await asyncio.wait([other])
                continue
            delivery = await other
            assert (delivery.body, delivery.retry_count) == (str(n).encode(), 0)
            await delivery.ack()
        assert_nothing_left(actor_of(either))


class TestWaitingForRoom:
    @staticmethod
    async def full(engine: Engine, depth: int = 1) -> None:
        """A queue whose places are all taken."""
        await engine.create("tasks", max_depth=depth)
        for n in range(depth):
            await engine.publish("tasks", f"old-{n}".encode(), message_id=f"old-{n}")
        with pytest.raises(QueueFull):
            await engine.publish("tasks", b"x")

    async def test_without_a_wait_it_is_refused_at_once(self, either: Engine) -> None:
        await self.full(either)
        with pytest.raises(QueueFull):
            await either.publish("tasks", b"new", wait=0)

    async def test_it_waits_as_long_as_it_may(self, either: Engine, clock: VirtualClock) -> None:
        await self.full(either)
        start = clock.monotonic()
        with pytest.raises(QueueFull, match="at most 1"):
            await either.publish("tasks", b"new", wait=5)
        assert clock.monotonic() - start == 5
        assert_nothing_left(actor_of(either))

    async def test_where_there_is_room_nobody_waits(
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
    async def test_it_is_woken_by_whatever_makes_room(self, either: Engine, how: str) -> None:
        options = {"max_depth": 1, "max_deliveries": 1, "ack_deadline": 5}
        either.catalogue.declare("tasks", {**options, "dead_letter": "tasks_dlq"})
        await either.publish("tasks", b"old", message_id="old", ttl=5 if how == "expiry" else None)
        held = None
        if how in ("ack", "dead letter", "last lease"):
            held = await take(either)
        waiting = await begin(either.publish("tasks", b"new", message_id="new", wait=60))
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
        await passes()
        assert waiting.done()
        assert (await waiting).message_id == "new"
        assert "new" in [item.id for item in await either.peek("tasks", 10)]
        assert_nothing_left(actor_of(either))

    async def test_a_message_that_comes_back_makes_no_room(self, either: Engine) -> None:
        await self.full(either)
        held = await take(either)
        waiting = await begin(either.publish("tasks", b"new", wait=60))
        await held.nack()
        await passes()
        assert not waiting.done()
        await (await take(either)).ack()
        await waiting

    async def test_first_come_first_served(self, either: Engine) -> None:
        await self.full(either, 3)
        senders = [
            await begin(either.publish("tasks", f"new-{n}".encode(), wait=None)) for n in range(6)
        ]
        for left in range(6, 0, -1):
            assert sum(not sender.done() for sender in senders) == left
            await (await take(either)).ack()
            await passes()
            assert [sender.done() for sender in senders] == [True] * (7 - left) + [False] * (
                left - 1
            )
        bodies = [(await take(either)).body for _ in range(3)]
        assert bodies == [b"new-3", b"new-4", b"new-5"]

    async def test_who_waits_comes_before_who_begins_to_wait(self, either: Engine) -> None:
        await self.full(either)
        first = await begin(either.publish("tasks", b"first", wait=None))
        second = await begin(either.publish("tasks", b"second", wait=None))
        held = await take(either)
        await held.ack()
        late = asyncio.create_task(either.publish("tasks", b"late", wait=None))
        await passes()
        assert [first.done(), second.done(), late.done()] == [True, False, False]
        for expected in (b"first", b"second", b"late"):
            delivery = await take(either, timeout=5)
            assert delivery.body == expected
            await delivery.ack()

    async def test_who_does_not_wait_takes_any_place_and_the_order_stays(
        self, engine: Engine
    ) -> None:
        await self.full(engine, 2)
        first = await begin(engine.publish("tasks", b"first", wait=None))
        second = await begin(engine.publish("tasks", b"second", wait=None))
        third = await begin(engine.publish("tasks", b"third", wait=None))
        assert await engine.purge("tasks") == 2
        for _ in range(2):
            quick = engine.publish("tasks", b"quick")  # before the two that were let in could run
            await quick
        await passes()
        assert not any(sender.done() for sender in (first, second, third))
        for expected in (b"quick", b"quick", b"first", b"second", b"third"):
            delivery = await take(engine, timeout=5)
            assert delivery.body == expected
            await delivery.ack()
            await passes()

    async def test_one_place_wakes_one_sender(self, engine: Engine) -> None:
        await self.full(engine)
        senders = [await begin(engine.publish("tasks", b"x", wait=None)) for _ in range(100)]
        await (await take(engine)).ack()
        assert len(actor_of(engine)._capacity_waiters.woken) == 1
        await passes()
        assert sum(sender.done() for sender in senders) == 1
        for sender in senders:
            sender.cancel()
        await asyncio.wait(senders)
        assert_nothing_left(actor_of(engine))

    async def test_cancelled_with_its_turn_given(self, either: Engine) -> None:
        await self.full(either)
        for _ in range(20):
            victim = await begin(either.publish("tasks", b"victim", wait=None))
            heir = await begin(either.publish("tasks", b"heir", wait=None))
            delivery = await take(either)
            settling = asyncio.create_task(delivery.ack())
            await asyncio.sleep(0)
            victim.cancel()  # it was let in and has not run yet
            with pytest.raises(asyncio.CancelledError):
                await victim
            await passes()
            assert settling.done()
            assert heir.done()
            assert [item.body for item in await either.peek("tasks", 5)] == [b"heir"]
        assert_nothing_left(actor_of(either))

    async def test_cancelled_just_before_there_is_room(self, either: Engine) -> None:
        await self.full(either)
        victim = await begin(either.publish("tasks", b"victim", wait=None))
        heir = await begin(either.publish("tasks", b"heir", wait=None))
        delivery = await take(either)
        victim.cancel()  # it has not run yet when the place becomes free
        await delivery.ack()
        with pytest.raises(asyncio.CancelledError):
            await victim
        await passes()
        assert heir.done()
        assert_nothing_left(actor_of(either))

    async def test_out_of_time_with_its_turn_given(self, either: Engine) -> None:
        await self.full(either)
        short = await begin(either.publish("tasks", b"short", wait=5))
        long = await begin(either.publish("tasks", b"long", wait=60))
        delivery = await take(either)
        await asyncio.sleep(5)
        await delivery.ack()
        await asyncio.wait([short])
        await passes()
        if short.exception() is None:  # it took the place with its last breath
            await (await take(either)).ack()
            await passes()
        assert long.done()
        assert_nothing_left(actor_of(either))

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"priority": 99}, InvalidPriority),
            ({"delay": 5.0, "ttl": 5.0}, ValueError),
        ],
    )
    async def test_one_that_is_refused_lets_the_next_in(
        self, either: Engine, options, error
    ) -> None:
        await self.full(either)
        wrong = await begin(either.publish("tasks", b"wrong", wait=None, **options))
        right = await begin(either.publish("tasks", b"right", wait=None))
        await (await take(either)).ack()
        with pytest.raises(error):
            await wrong
        await passes()
        assert right.done()
        assert_nothing_left(actor_of(either))

    async def test_a_place_that_the_disk_refused_is_free_again(
        self, engine: Engine, clock: VirtualClock, tmp_path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with await Engine.open(tmp_path, clock=clock) as durable:
            await durable.create("tasks", max_depth=1)
            assert durable._journal is not None
            writer, held = durable._journal.writer, list[AppendCallback]()
            with monkeypatch.context() as patch:
                patch.setattr(writer, "append_with_callback", lambda _, done: held.append(done))
                unlucky = await begin(durable.publish("tasks", b"unlucky"))
            waiting = await begin(durable.publish("tasks", b"lucky", wait=60))
            assert not waiting.done()
            writer.group_number += 1  # as after the attempt to write it
            held[0](None, StorageError("no space"))
            with pytest.raises(StorageError):
                await unlucky
            await passes()
            assert waiting.done()

    @pytest.mark.parametrize("kind", ["queue", "topic"])
    @pytest.mark.parametrize("how", ["delete", "close"])
    async def test_the_queue_goes_meanwhile(self, either: Engine, kind: str, how: str) -> None:
        await either.create("tasks", max_depth=1, broadcast=kind == "topic")
        group = None if kind == "queue" else "readers"
        assert await either.consume("tasks", group=group) is None
        await either.publish("tasks", b"old")
        waiting = await begin(either.publish("tasks", b"new", wait=None))
        if how == "delete":
            await either.delete("tasks")
            with pytest.raises(QueueNotFound):
                await waiting
        else:
            await either.aclose()
            with pytest.raises(LifecycleError):
                await waiting

    async def test_a_queue_made_anew_meanwhile_gets_it(self, engine: Engine) -> None:
        await self.full(engine)
        waiting = await begin(engine.publish("tasks", b"new", wait=None))
        await engine.delete("tasks")
        await engine.create("tasks")
        await waiting
        assert (await take(engine)).body == b"new"

    async def test_a_topic_waits_for_every_group(self, either: Engine) -> None:
        await either.create("tasks", broadcast=True, max_depth=1)
        for group in ("quick", "slow"):
            assert await either.consume("tasks", group=group) is None
        await either.publish("tasks", b"old")
        with pytest.raises(QueueFull):
            await either.publish("tasks", b"x", wait=1)
        senders = [
            await begin(either.publish("tasks", f"new-{n}".encode(), wait=60)) for n in range(2)
        ]
        for n in range(2):
            for group in ("quick", "slow"):
                assert not senders[n].done()
                await (await take(either, group=group)).ack()
                await passes()
            assert senders[n].done()
        for group in ("quick", "slow"):
            assert (await take(either, group=group)).body == b"new-1"
            assert_nothing_left(actor_of(either, "tasks", group))

    async def test_a_topics_sender_that_gives_up_blocks_nobody(self, either: Engine) -> None:
        await either.create("tasks", broadcast=True, max_depth=1)
        for group in ("first", "second"):
            assert await either.consume("tasks", group=group) is None
        await either.publish("tasks", b"old")
        victim = await begin(either.publish("tasks", b"victim", wait=None))
        heir = await begin(either.publish("tasks", b"heir", wait=None))
        await (await take(either, group="first")).ack()  # both wait for the second group now
        await passes()
        victim.cancel()
        await asyncio.wait([victim])
        await (await take(either, group="second")).ack()
        await passes()
        assert heir.done()

    async def test_many_senders_and_few_places(self, either: Engine) -> None:
        """Back-pressure at work: every message arrives once, the queue never holds too many."""
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
        for name in "abcdefgh":  # each sender's in its order
            own = [body for body in taken if body.startswith(name.encode())]
            assert own == [f"{name}{n}".encode() for n in range(40)]
        assert_nothing_left(actor_of(either))


async def test_a_receive_of_the_backend_is_woken_by_a_freed_slot_only(engine: Engine) -> None:
    """Two receives of one subscription: the second gets no more than the slots allow."""
    await engine.create("tasks")
    async with workers(engine, "a", prefetch=1) as subscriptions:
        first = await begin(subscriptions["a"].receive(1))
        second = await begin(subscriptions["a"].receive(1))
        other = await begin(take(engine, timeout=60))
        for n in range(2):
            await engine.publish("tasks", str(n).encode())
        await passes()
        assert [first.done(), second.done(), other.done()] == [True, False, True]
        delivery: Delivery = (await first)[0]
        await engine.publish("tasks", b"2")
        await subscriptions["a"].ack(delivery)
        assert (await second)[0].envelope.body == b"2"
