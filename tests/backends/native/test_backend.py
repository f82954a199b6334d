"""Native backend: declarations, publishing, subscriptions and administration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from qkit.backend import (
    Admin,
    Backend,
    DeadLetterSource,
    Delivery,
    PublishNow,
    QueueSpec,
    SubscriptionSpec,
)
from qkit.backends.native.backend import NativeBackend
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    ConfigError,
    InvalidPriority,
    LifecycleError,
    MessageNotFound,
    PartialSend,
    QueueFull,
    QueueNotFound,
    SubscriptionLost,
)
from qkit.message import GROUP, DeadLetter, Envelope, Reason, Sent
from qkit.native import Engine
from qkit.testing.clock import VirtualClock


@pytest_asyncio.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    with VirtualClock() as clock:
        yield clock


@pytest_asyncio.fixture
async def backend(clock: VirtualClock) -> AsyncIterator[NativeBackend]:
    backend = NativeBackend(clock=clock)
    await backend.start()
    await backend.declare(QueueSpec(name="orders"))
    yield backend
    await backend.aclose()


def spec(**options) -> SubscriptionSpec:
    return SubscriptionSpec(
        **{"queue": "orders", "group": "g", "consumer": "c", "prefetch": 10, **options}
    )


async def send(backend: NativeBackend, *ids: str, queue: str = "orders", **options) -> list[Sent]:
    return await backend.publish(queue, [Envelope(id, id.encode(), **options) for id in ids])


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.envelope.id for delivery in deliveries]


class TestBackend:
    def test_the_native_backend_implements_the_protocols(self) -> None:
        backend: Backend = NativeBackend()
        assert isinstance(backend, Admin)
        assert isinstance(backend, DeadLetterSource)
        assert backend.name == "native"

    def test_an_in_memory_engine_lacks_only_durability_and_replicas(self) -> None:
        features = NativeBackend().capabilities.as_dict()
        unsupported = {name for name, support in features.items() if support == "unsupported"}
        emulated = {name for name, support in features.items() if support == "emulated"}
        assert unsupported == {"durable", "replicas"}
        assert emulated == {"key_order", "batch"}

    async def test_ping_fails_before_start_and_after_close(self, clock: VirtualClock) -> None:
        backend = NativeBackend(clock=clock)
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        await backend.start()
        await backend.start()
        await backend.ping()
        await backend.aclose()
        await backend.aclose()
        with pytest.raises(BackendUnavailable):
            await backend.ping()
        with pytest.raises(LifecycleError):
            await backend.publish("orders", [Envelope("a", b"")])

    async def test_an_engine_passed_to_the_backend_is_shared_and_not_closed(
        self, clock: VirtualClock
    ) -> None:
        with pytest.raises(BackendUnavailable):
            await NativeBackend(engine=Engine(clock=clock)).start()
        async with Engine(clock=clock) as engine:
            one, two = NativeBackend(engine=engine), NativeBackend(engine=engine)
            await one.start()
            await one.declare(QueueSpec(name="orders"))
            await two.start()
            await send(two, "a")
            await two.aclose()
            assert (await one.stats("orders")).depth == 1
        alone = NativeBackend(clock=clock)
        await alone.start()
        assert await alone.queues() == []
        await alone.aclose()

    async def test_admin_calls_read_and_change_the_engine(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        await send(backend, "a", "b", "c", expires_at=clock.time() + 60, key="k", priority=3)
        assert await backend.queues() == ["orders"]
        (first, *_) = await backend.peek("orders", 2)
        assert first == Envelope("a", b"a", {}, "k", 3, None, clock.time() + 60, 0)
        assert await backend.remove("orders", ["b", "x"]) == 1
        assert await backend.purge("orders") == 2
        assert (await backend.stats("orders")).depth == 0
        await backend.delete("orders")
        with pytest.raises(QueueNotFound):
            await backend.stats("orders")


class TestDeclare:
    async def test_unset_fields_keep_their_earlier_values(self, backend: NativeBackend) -> None:
        await backend.declare(QueueSpec(name="orders", max_depth=2, dead_letter="orders.dlq"))
        await backend.declare(QueueSpec(name="orders"))  # sets no field
        await send(backend, "a", "b")
        with pytest.raises(QueueFull):
            await send(backend, "c")

    async def test_balance_is_passed_to_the_engine(self, backend: NativeBackend) -> None:
        await backend.declare(QueueSpec(name="orders", balance="least_busy"))
        await backend.declare(QueueSpec(name="orders"))
        assert backend._engine.catalogue.find("orders", "test").config.balance == "least_busy"

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"broadcast": True}, {}),
            ({}, {"broadcast": True}),
            ({}, {"replicas": 3}),
        ],
    )
    async def test_declaring_another_kind_or_replicas_raises_config_error(
        self, backend: NativeBackend, first, second
    ) -> None:
        await backend.declare(QueueSpec(name="other", **first))
        with pytest.raises(ConfigError):
            await backend.declare(QueueSpec(name="other", **second))

    @pytest.mark.parametrize(
        ("field", "first", "second"),
        [
            ("max_depth", 2, 3),
            ("max_priority", 3, 20),
            ("max_deliveries", 4, 3),
            ("ack_deadline", 5.0, 60.0),
            ("balance", "random", "least_busy"),
        ],
    )
    async def test_the_last_declaration_of_a_field_wins(
        self, backend: NativeBackend, field, first, second
    ) -> None:
        config = backend._engine.catalogue.find("orders", "test").config
        await backend.declare(QueueSpec(name="orders", **{field: first}))
        await backend.declare(QueueSpec(name="orders", **{field: second}))
        await backend.declare(QueueSpec(name="orders"))
        now = backend._engine.catalogue.find("orders", "test").config
        assert now == replace(config, **{field: second})

    async def test_the_consumer_sets_the_dead_letter_queue(self, backend: NativeBackend) -> None:
        async def declare(dead_letter: str | None, *, consumed: bool = False) -> str | None:
            await backend.declare(
                QueueSpec(name="other", dead_letter=dead_letter, consumed=consumed)
            )
            return backend._engine.catalogue.find("other", "test").config.dead_letter

        assert await declare("a") == "a"
        assert await declare("b") == "a", "a sender must change nothing"
        assert await declare(None) == "a"
        assert await declare(None, consumed=True) is None
        assert await declare("a") is None, "a sender must change nothing"
        assert await declare("b", consumed=True) == "b"

    async def test_a_passive_declaration_creates_nothing(self, backend: NativeBackend) -> None:
        await backend.declare(QueueSpec(name="orders", passive=True, max_depth=1))
        with pytest.raises(QueueNotFound):
            await backend.declare(QueueSpec(name="unknown", passive=True))
        assert await backend.queues() == ["orders"]

    async def test_the_defaults_of_the_backend_apply_to_new_queues(
        self, clock: VirtualClock
    ) -> None:
        backend = NativeBackend(clock=clock, max_depth=1, max_priority=3, ack_deadline=7)
        await backend.start()
        await backend.declare(QueueSpec(name="orders"))
        await send(backend, "a", priority=3)
        with pytest.raises(QueueFull):
            await send(backend, "b")
        async with backend.subscribe(spec()) as subscription:
            (delivery,) = await subscription.receive(1)
            assert delivery.lease == 7
        await backend.aclose()


class TestPublish:
    async def test_messages_have_positions_and_are_delivered_in_order(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        assert await send(backend, "a", "b") == [("a", 0), ("b", 1)]
        assert await send(backend, "high", priority=9) == [("high", 0)]
        assert await send(backend, "later", not_before=clock.time() + 5) == [("later", None)]
        assert await send(backend) == []
        async with backend.subscribe(spec()) as subscription:
            assert ids(await subscription.receive(10)) == ["high", "a", "b"]
            start = clock.time()
            assert ids(await subscription.receive(10)) == ["later"]
            assert clock.time() - start == 5

    async def test_a_partly_accepted_publish_raises_partial_send(
        self, backend: NativeBackend
    ) -> None:
        await backend.declare(QueueSpec(name="orders", max_depth=2))
        envelopes = [
            Envelope("a", b""),
            Envelope("bad", b"", priority=10),
            Envelope("b", b""),
            Envelope("c", b""),
        ]
        with pytest.raises(PartialSend, match="2 of 4") as caught:
            await backend.publish("orders", envelopes)
        a, bad, b, c = caught.value.results
        assert (a, b) == (("a", 0), ("b", 1))
        assert isinstance(bad, InvalidPriority)
        assert isinstance(c, QueueFull)
        assert (c.backend, c.queue, c.message_id) == ("native", "orders", "c")
        assert (await backend.stats("orders")).depth == 2

    async def test_messages_are_published_without_waiting_only_in_memory(
        self, clock: VirtualClock, tmp_path: Path
    ) -> None:
        async with Engine(clock=clock) as engine, await Engine.open(tmp_path) as durable:
            assert isinstance(NativeBackend(), PublishNow)
            for number, each in enumerate((engine, durable)):
                backend = NativeBackend(engine=each)
                assert backend.publish_now("orders", [Envelope("a", b"a")]) is None
                await backend.declare(QueueSpec(name="orders", max_depth=1))
                sent = backend.publish_now("orders", [Envelope("a", b"a")])
                assert sent == ([Sent("a", 0)] if number == 0 else None)
            with pytest.raises(QueueFull):
                NativeBackend(engine=engine).publish_now("orders", [Envelope("b", b"b")])

    async def test_a_later_change_of_the_envelope_does_not_affect_the_message(
        self, backend: NativeBackend
    ) -> None:
        envelope = Envelope("a", b"x", {"h": "1"})
        await backend.publish("orders", [envelope])
        envelope.headers["h"] = "changed"
        async with backend.subscribe(spec()) as subscription:
            (delivery,) = await subscription.receive(1)
            assert delivery.envelope.headers == {"h": "1"}

    @pytest.mark.proves("002-improvements-6")
    async def test_messages_expire_by_wall_clock_time(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        letters: list[DeadLetter] = []
        backend.on_dead_letter(letters.append)
        await backend.declare(QueueSpec(name="orders", dead_letter="orders.dlq"))
        await send(backend, "a", "b", expires_at=clock.time() + 5)
        async with backend.subscribe(spec()) as subscription:
            (delivery,) = await subscription.receive(1)
            assert delivery.envelope.expires_at == clock.time() + 5
            await clock.advance(5)
            await subscription.ack(delivery)  # a delivered message does not expire
        (letter,) = letters
        assert (letter.message_id, letter.reason) == ("b", Reason.TTL_EXPIRED)
        assert [item.id for item in await backend.peek("orders.dlq", 5)] == ["b"]


class TestSubscription:
    async def test_a_delivery_has_the_envelope_and_the_lease(self, backend: NativeBackend) -> None:
        await send(backend, "a", headers={"h": "1"}, key="k", priority=2)
        async with backend.subscribe(spec(ack_deadline=12)) as subscription:
            (delivery,) = await subscription.receive(5)
            assert delivery.envelope == Envelope("a", b"a", {"h": "1"}, "k", 2, None, None, 1)
            assert (delivery.queue, delivery.lease) == ("orders", 12)
            assert (await backend.stats("orders")).consumers == 1
            await subscription.ack(delivery)
        stats = await backend.stats("orders")
        assert (stats.consumers, stats.in_flight, stats.acked_total) == (0, 0, 1)

    async def test_a_released_message_is_redelivered_after_its_delay(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec()) as subscription:
            attempts = []
            for delay, count in [(0.0, True), (0.0, False), (60.0, True)]:
                (delivery,) = await subscription.receive(5)
                attempts.append(delivery.envelope.attempt)
                delivery.envelope.headers["failed"] = str(delay)
                await subscription.release(delivery, delay, count_attempt=count)
            start = clock.monotonic()
            (delivery,) = await subscription.receive(5)
            assert clock.monotonic() - start == 60
            assert [*attempts, delivery.envelope.attempt] == [1, 2, 2, 3]
            assert delivery.envelope.headers == {"failed": "60.0"}

    @pytest.mark.proves("000-ack-2")
    @pytest.mark.parametrize("what", ["ack", "release", "extend"])
    async def test_settling_twice_or_late_raises_an_error(
        self, backend: NativeBackend, clock: VirtualClock, what: str
    ) -> None:
        arguments = [] if what == "ack" else [1.0]
        await send(backend, "a", "b")
        async with backend.subscribe(spec(ack_deadline=5)) as subscription:
            a, b = await subscription.receive(5)
            settle = getattr(subscription, what)
            await subscription.ack(a)
            with pytest.raises(MessageNotFound) as twice:
                await settle(a, *arguments)
            assert twice.value.message_id == "a"
            await clock.advance(5)
            (again,) = await subscription.receive(5)
            for _ in range(2):
                with pytest.raises(AckDeadlineExceeded) as late:
                    await settle(b, *arguments)
            assert (late.value.backend, late.value.message_id) == ("native", "b")
            await subscription.ack(again)

    async def test_an_extended_lease_does_not_expire(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec(ack_deadline=5)) as subscription:
            (delivery,) = await subscription.receive(1)
            for _ in range(20):
                await clock.advance(3)
                await subscription.extend(delivery, 5)
            await subscription.ack(delivery)
        assert (await backend.stats("orders")).consumed_total == 1

    async def test_max_deliveries_limits_expired_leases(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        letters: list[DeadLetter] = []
        backend.on_dead_letter(letters.append)
        await backend.declare(QueueSpec(name="orders", max_deliveries=2, dead_letter="dead"))
        await backend.declare(QueueSpec(name="dead", drop_oldest=True, max_depth=5))
        await send(backend, "a")
        async with backend.subscribe(spec(ack_deadline=5)) as subscription:
            await subscription.receive(1)
            await subscription.receive(1)
            await clock.advance(5)
        assert [(letter.reason, letter.attempts) for letter in letters] == [
            (Reason.MAX_RETRIES_EXCEEDED, 2)
        ]
        assert (await backend.stats("dead")).depth == 1

    @pytest.mark.proves("000-prefetch-1")
    async def test_prefetch_is_never_exceeded(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        await send(backend, *(str(n) for n in range(10)))
        async with backend.subscribe(spec(prefetch=3, ack_deadline=5)) as subscription:
            held = await subscription.receive(2)
            held += await subscription.receive(10)
            assert ids(held) == ["0", "1", "2"]
            for release in (False, True):
                task = asyncio.create_task(subscription.receive(10))
                await asyncio.sleep(0)
                assert not task.done()
                if release:
                    await subscription.release(held.pop(), 100.0)
                else:
                    await subscription.ack(held.pop())
                held += await task
                assert len(held) == 3
            start = clock.monotonic()
            await subscription.receive(10)  # waits until the leases expire
            assert clock.monotonic() - start == 5

    async def test_a_lost_lease_frees_its_slot_when_extend_fails(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec(prefetch=1, ack_deadline=5)) as subscription:
            (delivery,) = await subscription.receive(1)
            await clock.advance(5)
            with pytest.raises(AckDeadlineExceeded):
                await subscription.extend(delivery, 5)
            (delivery,) = await subscription.receive(1)
            assert delivery.envelope.attempt == 2

    async def test_closing_releases_deliveries_in_order_without_counting_attempts(
        self, backend: NativeBackend, clock: VirtualClock
    ) -> None:
        await send(backend, "a", "b", "c", "d")
        async with backend.subscribe(spec(ack_deadline=5)) as subscription:
            (lost,) = await subscription.receive(1)
            await clock.advance(5)
            held = await subscription.receive(3)
            assert ids(held) == ["a", "b", "c"]
            await subscription.ack(held[1])
        async with backend.subscribe(spec()) as subscription:
            again = await subscription.receive(10)
        assert [(d.envelope.id, d.envelope.attempt) for d in again] == [
            ("a", 2),
            ("c", 1),
            ("d", 1),
        ]
        assert lost.envelope.attempt == 1

    async def test_closing_a_subscription_wakes_another_consumer(
        self, backend: NativeBackend
    ) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec()) as other:
            async with backend.subscribe(spec()) as subscription:
                await subscription.receive(1)
                task = asyncio.create_task(other.receive(1))
                await asyncio.sleep(0)
            assert ids(await task) == ["a"]

    async def test_waiting_receives_share_new_messages(self, backend: NativeBackend) -> None:
        async with backend.subscribe(spec()) as one, backend.subscribe(spec()) as two:
            tasks = [asyncio.create_task(item.receive(2)) for item in (one, two)]
            await asyncio.sleep(0)
            await send(backend, "a", "b", "c")
            assert [ids(await task) for task in tasks] == [["a", "b"], ["c"]]

    @pytest.mark.parametrize("full", [False, True])
    async def test_stop_wakes_a_waiting_receive(self, backend: NativeBackend, full: bool) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec(prefetch=1 if full else 2)) as subscription:
            (delivery,) = await subscription.receive(1)
            task = asyncio.create_task(subscription.receive(1))
            await asyncio.sleep(0)
            await subscription.stop()
            await subscription.stop()
            assert await task == []
            assert await subscription.receive(1) == []
            await subscription.ack(delivery)

    async def test_a_message_for_a_stopped_consumer_goes_to_the_next(
        self, backend: NativeBackend
    ) -> None:
        async with backend.subscribe(spec()) as one, backend.subscribe(spec()) as two:
            first = asyncio.create_task(one.receive(1))
            await asyncio.sleep(0)
            second = asyncio.create_task(two.receive(1))
            await asyncio.sleep(0)
            await send(backend, "a")  # wakes the first receive, which has not run yet
            await one.stop()
            assert await first == []
            assert ids(await second) == ["a"]

    @pytest.mark.proves("000-features-5", "000-prefetch-6")
    async def test_a_message_for_a_full_consumer_goes_to_the_next(
        self, backend: NativeBackend
    ) -> None:
        async with backend.subscribe(spec(prefetch=1)) as one, backend.subscribe(spec()) as two:
            quick, slow = (asyncio.create_task(one.receive(1)) for _ in range(2))
            await asyncio.sleep(0)
            other = asyncio.create_task(two.receive(1))
            await asyncio.sleep(0)
            await send(backend, "a", "b")  # wakes both receives of ``one``, whose prefetch is 1
            assert ids(await quick) == ["a"]
            assert ids(await other) == ["b"]
            slow.cancel()
            await asyncio.wait([slow])

    @pytest.mark.parametrize("others", [0, 1])
    async def test_a_receive_cancelled_after_it_is_woken_loses_no_message(
        self, backend: NativeBackend, others: int
    ) -> None:
        """Check it fifty times, with and without another waiting receive."""
        async with backend.subscribe(spec()) as one, backend.subscribe(spec()) as two:
            for n in range(50):
                cancelled = asyncio.create_task(one.receive(1))
                await asyncio.sleep(0)
                waiting = [asyncio.create_task(two.receive(1)) for _ in range(others)]
                await asyncio.sleep(0)
                await send(backend, str(n))
                cancelled.cancel()
                await asyncio.wait([cancelled])
                assert cancelled.cancelled()
                (delivery,) = await (waiting[0] if waiting else two.receive(1))
                assert (delivery.envelope.id, delivery.envelope.attempt) == (str(n), 1)
                await two.ack(delivery)

    async def test_a_cancelled_receive_leaves_no_waiter(self, backend: NativeBackend) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec(prefetch=1)) as subscription:
            for slot in (False, True):  # wait first for a slot, then for a message
                held = [] if slot else await subscription.receive(1)
                task = asyncio.create_task(subscription.receive(1))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                for delivery in held:
                    await subscription.ack(delivery)
            assert not subscription._queue.waiters.waiters
            assert not subscription._slot_waiters

    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize("how", ["close", "delete"])
    async def test_a_deleted_queue_or_closed_engine_raises_subscription_lost(
        self, backend: NativeBackend, how: str, full: bool
    ) -> None:
        await send(backend, "a")
        async with backend.subscribe(spec(prefetch=1 if full else 2)) as subscription:
            (delivery,) = await subscription.receive(1)
            task = asyncio.create_task(subscription.receive(1))
            await asyncio.sleep(0)
            await (backend.aclose() if how == "close" else backend.delete("orders"))
            with pytest.raises(SubscriptionLost):
                await task
            with pytest.raises(SubscriptionLost):
                await subscription.receive(1)
            await subscription.ack(delivery)  # has no effect

    @pytest.mark.proves("000-consume-2")
    async def test_subscribing_to_an_unknown_queue_raises_queue_not_found(
        self, backend: NativeBackend
    ) -> None:
        with pytest.raises(QueueNotFound):
            async with backend.subscribe(spec(queue="unknown")):
                pass

    @pytest.mark.proves("000-metrics-3")
    async def test_each_group_of_a_topic_gets_a_copy(self, backend: NativeBackend) -> None:
        await backend.declare(QueueSpec(name="prices", broadcast=True))
        await send(backend, "unheard", queue="prices")
        a, b = spec(queue="prices", group="a"), spec(queue="prices", group="b")
        async with backend.subscribe(a) as one, backend.subscribe(b) as two:
            await send(backend, "x", queue="prices")
            await send(backend, "for b", queue="prices", headers={GROUP: "b"})
            assert ids(await one.receive(5)) == ["x"]
            assert ids(await two.receive(5)) == ["x", "for b"]
            assert (await backend.stats("prices")).consumers == 2


async def test_a_closed_backend_restarts_with_an_empty_engine() -> None:
    backend = NativeBackend()
    letters: list[DeadLetter] = []
    backend.on_dead_letter(letters.append)
    for _ in range(2):
        await backend.start()
        await backend.declare(QueueSpec(name="q"))
        await backend.publish("q", [Envelope("a", b"", expires_at=1.0)])
        assert (await backend.stats("q")).depth == 0
        await backend.aclose()
    assert [letter.reason for letter in letters] == ["TTLExpired", "TTLExpired"]


async def test_a_loop_of_sends_lets_other_tasks_run(backend: NativeBackend) -> None:
    await backend.declare(QueueSpec(name="q"))
    iterations = 0

    async def other() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    running = asyncio.ensure_future(other())
    spec = SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=1)
    async with backend.subscribe(spec):
        for number in range(1_000):
            await backend.publish("q", [Envelope(str(number), b"")])
    running.cancel()
    assert iterations >= 50


async def test_a_receive_cancelled_before_a_publish_raises_only_cancelled_error(
    backend: NativeBackend,
) -> None:
    await backend.declare(QueueSpec(name="q"))
    spec = SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=1)
    async with backend.subscribe(spec) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(1))
        await asyncio.sleep(0)
        receiving.cancel()
        await backend.publish("q", [Envelope("a", b"")])
        with pytest.raises(asyncio.CancelledError):
            await receiving
        (delivery,) = await subscription.receive(1)
        assert delivery.envelope.id == "a"


async def test_stats_count_each_consumer_once(backend: NativeBackend) -> None:
    await backend.declare(QueueSpec(name="q"))
    spec = SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=1)
    async with backend.subscribe(spec) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(1))
        await asyncio.sleep(0)
        assert (await backend.stats("q")).consumers == 1
        receiving.cancel()
