"""Conformance scenarios for delivery: consumers, latency, prefetch and concurrency."""

from __future__ import annotations

import asyncio
from collections import Counter

from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, bodies, requires
from qkit.handlers.decorators import consume

__all__ = ["Deliveries"]


class HoldCounter(FaultInjectingBackend):
    """Backend that counts the unsettled deliveries of its consumers."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.held: int = 0
        self.peak: int = 0

    async def receive(self, subscription: Subscription, limit: int) -> list[Delivery]:
        deliveries = await super().receive(subscription, limit)
        self.held += len(deliveries)
        self.peak = max(self.peak, self.held)
        return deliveries

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        await super().ack(subscription, delivery)
        self.held -= 1

    async def release(
        self, subscription: Subscription, delivery: Delivery, delay: float, count_attempt: bool
    ) -> None:
        await super().release(subscription, delivery, delay, count_attempt)
        self.held -= 1


class Deliveries(Harness):
    """Scenarios for competing consumers, latency, prefetch and concurrency."""

    # -- consumers ---------------------------------------------------------------------------

    async def test_one_consumer_gets_each_message_once_and_in_order(
        self, serve: Serve, name: str
    ) -> None:
        got: list[int] = []

        @consume(name)
        async def handle(number: int) -> None:
            got.append(number)

        service = await serve(handle)
        for number in range(100):
            # Use one key: a broker with partitions keeps the order only within a partition.
            await service.send(name, number, key="one")
        await self.until(lambda: len(got) >= 100)
        await self.elapse(0.5)
        assert got == list(range(100))

    @requires("queues", "redelivery")
    async def test_each_message_goes_to_one_of_several_competing_consumers(
        self, serve: Serve, name: str
    ) -> None:
        got: dict[str, list[int]] = {"a": [], "b": []}
        both = asyncio.Event()

        async def record(consumer: str, number: int) -> None:
            got[consumer].append(number)
            if all(got.values()):
                both.set()
            await both.wait()  # hold the first consumer until the other one has a message too

        @consume(name)
        async def a(number: int) -> None:
            await record("a", number)

        @consume(name)
        async def b(number: int) -> None:
            await record("b", number)

        await serve(a, prefetch=1)
        service = await serve(b, prefetch=1)
        for number in range(60):
            await service.send(name, number, key=f"k{number}")
        await self.until(lambda: len(got["a"]) + len(got["b"]) >= 60)
        await self.elapse(0.5)
        assert Counter(got["a"] + got["b"]) == Counter(range(60))
        assert got["a"]
        assert got["b"]

    @requires("depth")
    async def test_a_late_consumer_receives_earlier_messages(self, serve: Serve, name: str) -> None:
        got: list[int] = []

        @consume(name)
        async def handle(number: int) -> None:
            got.append(number)

        sender = await serve()
        await sender.send_many(name, range(20), key="one")
        await serve(handle)
        await self.until(lambda: len(got) >= 20)
        assert got == list(range(20))

    async def test_channels_are_independent(self, serve: Serve, name: str) -> None:
        got: list[tuple[str, int]] = []

        @consume(f"{name}.a")
        async def a(number: int) -> None:
            got.append(("a", number))

        @consume(f"{name}.b")
        async def b(number: int) -> None:
            got.append(("b", number))

        service = await serve(a, b)
        for number in range(10):
            await service.send(f"{name}.a", number)
            await service.send(f"{name}.b", -number)
        await self.until(lambda: len(got) >= 20)
        assert sorted(number for channel, number in got if channel == "a") == list(range(10))
        assert sorted(-number for channel, number in got if channel == "b") == list(range(10))

    # -- latency -----------------------------------------------------------------------------

    async def test_a_parked_receive_is_woken_by_a_message(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name) as subscription:
            await self.nothing(subscription, 0.3)
            parked = asyncio.ensure_future(self.take(subscription))
            await self.elapse(0.3)
            assert not parked.done()
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            (message_id,) = await self.put(backend, name, "a")
            (delivery,) = await parked
            assert loop.time() - started_at <= self.late(1.0)
            assert delivery.envelope.id == message_id

    async def test_an_idle_handler_is_called_within_a_second(self, serve: Serve, name: str) -> None:
        called: list[float] = []
        loop = asyncio.get_running_loop()

        @consume(name)
        async def handle(number: int) -> None:
            called.append(loop.time())

        service = await serve(handle)
        waits: list[float] = []
        for number in range(3):
            await self.elapse(0.3)
            started_at = loop.time()
            await service.send(name, number)
            await self.until(lambda number=number: len(called) > number)  # type: ignore[misc]  # mypy cannot infer the lambda
            waits.append(called[number] - started_at)
        assert min(waits) <= 1.0  # a busy machine may delay some calls
        assert max(waits) <= self.late(1.0)

    # -- limits ------------------------------------------------------------------------------

    async def test_receive_never_returns_more_than_the_limit(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name, prefetch=100) as subscription:
            await self.put(backend, name, *(str(number) for number in range(20)), key="one")
            found: list[Delivery] = []
            async with asyncio.timeout(30):
                for limit in (1, 2, 3, 7, 7, 7, 7, 7, 7, 7):
                    deliveries = await subscription.receive(limit)
                    assert len(deliveries) <= limit
                    found += deliveries
                    if len(found) == 20:
                        break
            found += await self.take(subscription, 20 - len(found))
            assert bodies(found) == [str(number) for number in range(20)]

    @requires("prefetch")
    async def test_a_consumer_never_holds_more_than_its_prefetch(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name, prefetch=3) as subscription:
            await self.put(backend, name, *"abcdefgh", key="one")
            held = await self.take(subscription, 3)
            await self.nothing(subscription)
            await subscription.ack(held[0])
            held += await self.take(subscription)
            await self.nothing(subscription)
            await subscription.ack(held[1])
            held += await self.take(subscription)
            assert bodies(held) == list("abcde")

    @requires("prefetch", "depth")
    async def test_while_handlers_are_blocked_other_messages_stay_on_the_broker(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        running = 0
        done: list[int] = []
        gate = asyncio.Event()

        @consume(name, concurrency=2, prefetch=5)
        async def handle(number: int) -> None:
            nonlocal running
            running += 1
            await gate.wait()
            done.append(number)

        counter = HoldCounter(new_backend())
        service = await serve(handle, backend=counter)
        await service.send_many(name, range(30))
        await self.until(lambda: running == 2)
        await self.elapse(0.5)
        assert 2 <= counter.held <= 5
        stats = await service.stats(name)
        assert stats.in_flight is None or stats.in_flight <= 5
        assert stats.depth >= 25
        gate.set()
        await self.until(lambda: len(done) >= 30)
        assert counter.peak <= 5

    async def test_concurrency_limits_how_many_handlers_run_at_once(
        self, serve: Serve, name: str
    ) -> None:
        running = peak = finished = 0
        gate = asyncio.Event()

        @consume(name, concurrency=4)
        async def handle(number: int) -> None:
            nonlocal running, peak, finished
            running += 1
            peak = max(peak, running)
            await gate.wait()
            await asyncio.sleep(0.01)
            running -= 1
            finished += 1

        service = await serve(handle)
        await service.send_many(name, range(20))
        await self.until(lambda: running == 4)
        await self.elapse(0.3)
        assert running == 4
        assert service.metrics().in_flight == 4
        gate.set()
        await self.until(lambda: finished == 20)
        assert peak == 4

    async def test_a_slow_handler_blocks_neither_its_other_slots_nor_other_channels(
        self, serve: Serve, name: str
    ) -> None:
        got: list[str] = []
        gate = asyncio.Event()

        @consume(f"{name}.slow", concurrency=2)
        async def slow(text: str) -> None:
            if text == "slow":
                await gate.wait()
            got.append(text)

        @consume(f"{name}.fast")
        async def fast(text: str) -> None:
            got.append(text)

        service = await serve(slow, fast)
        await service.send(f"{name}.slow", "slow")
        await service.send(f"{name}.slow", "quick")
        await service.send(f"{name}.fast", "other")
        await self.until(lambda: len(got) == 2)
        assert sorted(got) == ["other", "quick"]
        gate.set()
        await self.until(lambda: len(got) == 3)
